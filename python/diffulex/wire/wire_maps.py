# SPDX-License-Identifier: Apache-2.0
"""How dataclasses travel: as maps with a `type` and their fields.

Fields beyond the base protocol travel only when they are set, so that a peer of the base protocol
reads what it knows and nothing is lost. What a peer does not know is ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["PROTOCOL_VERSION", "ProtocolVersionError", "WireMaps", "WireShape", "WireTable"]

#: Version of the maps; a map without `v` is of version 1.
PROTOCOL_VERSION = 1


class ProtocolVersionError(ValueError):
    """A map says that it is of a newer version than this side reads."""


#: Class and fields of the base protocol, by `type`.
WireTable: TypeAlias = Mapping[str, tuple[type[Any], tuple[str, ...]]]


class WireShape:
    """How one class travels: computed once, since every step encodes and decodes.

    Args:
        name: the `type` of its maps.
        cls: a dataclass.
        base: fields of the base protocol, which always travel.
    """

    def __init__(self, name: str, cls: type[Any], base: tuple[str, ...]) -> None:
        self.name = name
        self.cls = cls
        self.base = base
        fields = dataclasses.fields(cls)
        self.names = tuple(item.name for item in fields)
        self.extra = tuple((item.name, _default(item)) for item in fields if item.name not in base)
        self.required = tuple(item.name for item in fields if _default(item) is dataclasses.MISSING)

    def arguments(self, data: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Keyword arguments of the class; ValueError when a required one is missing."""
        for name in self.required:
            if name not in data:
                raise ValueError(f"{where}: expected a {name} in {self.name}, got none")
        return {name: data[name] for name in self.names if name in data}


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


class WireMaps:
    """The maps of several classes.

    Args:
        table: class and fields of the base protocol, by `type`.
    """

    def __init__(self, table: WireTable) -> None:
        self._shapes = {name: WireShape(name, cls, base) for name, (cls, base) in table.items()}
        self._by_class = {shape.cls: shape for shape in self._shapes.values()}
        #: Every `type`.
        self.names = tuple(table)

    def to_dict(self, value: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
        """The map of an object; TypeError when its type is none of `names`."""
        shape = self._by_class.get(type(value))
        if shape is None or shape.name not in names:
            kind = type(value).__name__
            raise TypeError(f"{where}: expected one of {', '.join(names)}, got {kind}")
        data: dict[str, Any] = {"type": shape.name}
        for name in shape.base:
            data[name] = getattr(value, name)
        for name, default in shape.extra:
            item = getattr(value, name)
            if item != default:
                data[name] = item
        return data

    def shape_of(self, data: Any, names: tuple[str, ...], where: str) -> WireShape:
        """The shape of a map.

        Raises:
            ProtocolVersionError: it is of a newer version.
            ValueError: it is no map, or its type is none of `names`.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"{where}: expected a map, got {type(data).__name__}")
        version = data.get("v", 1)
        if not isinstance(version, int) or version > PROTOCOL_VERSION:
            raise ProtocolVersionError(
                f"{where}: expected protocol version <= {PROTOCOL_VERSION}, got {version!r}"
            )
        name = data.get("type")
        if not isinstance(name, str) or name not in names:
            raise ValueError(f"{where}: expected a type of {', '.join(names)}, got {name!r}")
        return self._shapes[name]
