# SPDX-License-Identifier: Apache-2.0
"""What a setting is: a row of a table with kind, default, legal range and help.

A key is a field of a section dataclass; its metadata holds everything the validation, the command
line and the documentation need.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from diffulex.errors import ConfigError

__all__ = [
    "ANY",
    "IDS",
    "NAME",
    "UNIT",
    "ConfigKey",
    "Range",
    "Support",
    "above",
    "at_least",
    "between",
    "build_table",
    "check_key",
    "inert",
    "key",
    "later",
    "one_of",
    "switch",
    "unknown_key",
]


class Support(Enum):
    """What the engine does with a key today."""

    FULL = "yes"
    DEFAULT_ONLY = "default only"
    IGNORED = "accepted, no effect"


class _Rule(NamedTuple):
    """Metadata of a key."""

    kind: str
    legal: str
    help: str
    is_legal: Callable[[Any], bool]
    support: Support
    is_decoding: bool
    schema: Mapping[str, Any]


class ConfigKey(NamedTuple):
    """One row of the table."""

    name: str
    section: str
    kind: str
    default: Any
    legal: str
    help: str
    support: Support
    is_legal: Callable[[Any], bool]
    #: About how tokens are decoded, although the section is not.
    is_decoding: bool = False
    #: The range in words of JSON schema, as far as it has such.
    schema: Mapping[str, Any] = MappingProxyType({})


class Range(NamedTuple):
    """A legal range: its text, its test, and the same in words of JSON schema."""

    text: str
    test: Callable[[Any], bool]
    schema: Mapping[str, Any] = MappingProxyType({})


def one_of(*values: object) -> Range:
    text = "one of " + ", ".join(str(v) for v in values)
    return Range(text, lambda v: v in values, {"enum": list(values)})


def at_least(low: float) -> Range:
    return Range(f">= {low}", lambda v: v >= low, {"minimum": low})


def above(low: float) -> Range:
    return Range(f"> {low}", lambda v: v > low, {"exclusiveMinimum": low})


def between(low: float, high: float) -> Range:
    text = f"[{low}, {high}]"
    return Range(text, lambda v: low <= v <= high, {"minimum": low, "maximum": high})


ANY = Range("any", lambda _: True)
UNIT = between(0, 1)
NAME = Range("that is not blank", lambda v: bool(v.strip()), {"minLength": 1})
IDS = Range("ids >= 0", lambda v: all(i >= 0 for i in v))


def key(
    kind: str,
    default: Any,
    legal: Range,
    help_text: str,
    support: Support = Support.FULL,
    is_decoding: bool = False,
) -> Any:
    rule = _Rule(kind, legal.text, help_text, legal.test, support, is_decoding, legal.schema)
    return field(default=default, metadata={"rule": rule})


def switch(default: bool, help_text: str) -> Any:
    """A key that is on or off."""
    return key("bool", default, one_of(True, False), help_text)


def later(kind: str, default: Any, legal: Range, help_text: str) -> Any:
    return key(kind, default, legal, help_text, Support.DEFAULT_ONLY)


def inert(kind: str, default: Any, legal: Range, help_text: str, is_decoding: bool = False) -> Any:
    return key(kind, default, legal, help_text, Support.IGNORED, is_decoding)


def build_table(sections: Mapping[str, type[Any]]) -> dict[str, ConfigKey]:
    """The rows of all sections by name; fields without a rule are results, not keys."""
    table: dict[str, ConfigKey] = {}
    for section, cls in sections.items():
        for item in dataclasses.fields(cls):
            rule = item.metadata.get("rule")
            if rule is None:
                continue
            table[item.name] = ConfigKey(
                item.name,
                section,
                rule.kind,
                item.default,
                rule.legal,
                rule.help,
                rule.support,
                rule.is_legal,
                rule.is_decoding,
                rule.schema,
            )
    return table


def check_key(key: ConfigKey, value: Any) -> Any:
    """The value in its canonical type, or ConfigError with the name, range and value."""
    kind = key.kind.rstrip("?")
    if value is None:
        if key.kind.endswith("?"):
            return None
        raise _illegal(key, value)
    result = _coerce(kind, value)
    if result is None or not key.is_legal(result):
        raise _illegal(key, value)
    if key.support is Support.DEFAULT_ONLY and result != key.default:
        raise ConfigError(
            f"{key.name}: only {key.default!r} is supported so far (documented range: {key.legal}),"
            f" got {value!r}"
        )
    return result


def _kind_text(key: ConfigKey) -> str:
    kind = key.kind.rstrip("?")
    says_what = key.legal.startswith("one of") or (kind in ("ids", "strs") and key.legal != "any")
    return "" if says_what else f"{kind} "


def _illegal(key: ConfigKey, value: Any) -> ConfigError:
    return ConfigError(f"{key.name}: expected {_kind_text(key)}{key.legal}, got {value!r}")


def _coerce(kind: str, value: Any) -> Any:
    """`value` as `kind`, or None if it is of another type. A bool is never a number."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if kind == "int":
        return int(value) if is_int else None
    if kind == "float":
        return _as_float(value) if is_int or isinstance(value, float) else None
    if kind == "ids":
        items = (value,) if is_int else value
        is_list = isinstance(items, (list, tuple)) and all(
            isinstance(i, int) and not isinstance(i, bool) for i in items
        )
        return tuple(items) if is_list else None
    if kind == "floats":
        items = value if isinstance(value, (list, tuple)) else ()
        numbers = [_coerce("float", item) for item in items]
        return None if not numbers or None in numbers else tuple(numbers)
    if kind == "strs":
        texts = (value,) if isinstance(value, str) else value
        is_list = isinstance(texts, (list, tuple)) and all(isinstance(i, str) for i in texts)
        return tuple(texts) if is_list else None
    types = {"bool": bool, "str": str, "mapping": Mapping, "str or mapping": (str, Mapping)}
    return value if isinstance(value, types[kind]) else None  # type: ignore[arg-type]


def _as_float(value: float) -> float | None:
    """None for what is not finite, and for an integer that is larger than any float."""
    with suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def unknown_key(shown: str, name: str, known: Iterable[str]) -> str:
    """Message about a name that no table has, with the nearest that one has."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f", nearest is {near[0]!r}" if near else ""
    return f"configuration: expected a known key{hint}, got {shown!r}"
