# SPDX-License-Identifier: Apache-2.0
"""The six registries through which strategies, models and samplers are found by name.

A built-in entry is a row `name -> "module:attribute"` that is imported when it is first asked for;
the rows come from the records of the families and the list of the strategies.
A program adds an entry with `register`; an installed package announces entries as entry points of
the group `diffulex.plugins`, named `<registry>.<name>` (for example `AutoSampler.my_model`).
See docs/extending.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, overload

__all__ = [
    "PLUGIN_GROUP",
    "AutoKVCacheManager",
    "AutoModelForDiffusionLM",
    "AutoModelRunner",
    "AutoReq",
    "AutoSampler",
    "AutoScheduler",
    "Registry",
]

PLUGIN_GROUP = "diffulex.plugins"

T = TypeVar("T")
V = TypeVar("V")


class Registry(Generic[T]):
    """Names of one kind of object, resolved on first use.

    Args:
        name: name of the registry, used in messages and entry points.
        built_in: table `name -> "module:attribute"`, or "module:attribute" of such a table, which
            is imported when the registry is first asked for something.
        key: how `from_config` finds the name in a configuration.
        default: name that `get(None)` means.
        aliases: further names of built-in entries, given like `built_in`.
    """

    def __init__(
        self,
        name: str,
        built_in: Mapping[str, str] | str,
        key: Callable[[Any], str],
        default: str | None = None,
        aliases: Mapping[str, str] | str = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._values: dict[str, T] = {}
        self._tables = (built_in, aliases)
        self._plugins: dict[str, EntryPoint] | None = None
        self._key = key
        self._default = default

    @cached_property
    def _lazy(self) -> dict[str, str]:
        return _table(self._tables[0])

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return _table(self._tables[1])

    @overload
    def register(
        self,
        name: str,
        value: None = None,
        *,
        aliases: Iterable[str] = (),
        is_default: bool = False,
        exist_ok: bool = False,
    ) -> Callable[[V], V]: ...

    @overload
    def register(
        self,
        name: str,
        value: V,
        *,
        aliases: Iterable[str] = (),
        is_default: bool = False,
        exist_ok: bool = False,
    ) -> V: ...

    def register(
        self,
        name: str,
        value: V | None = None,
        *,
        aliases: Iterable[str] = (),
        is_default: bool = False,
        exist_ok: bool = False,
    ) -> V | Callable[[V], V]:
        """Adds an entry; works as a call and as a decorator and returns the object.

        Raises:
            ValueError: one of the names is taken by another object and `exist_ok` is false.
        """
        if value is None:

            def decorate(decorated: V) -> V:
                return self.register(
                    name, decorated, aliases=aliases, is_default=is_default, exist_ok=exist_ok
                )

            return decorate
        alias_names = tuple(aliases)
        for taken in (name, *alias_names):
            if not exist_ok and self._is_taken_by_another(taken, value):
                raise ValueError(
                    f"{self.name}: expected a new name, got {taken!r}, which is registered already"
                    " (pass exist_ok=True to replace it)"
                )
        # A primary name that used to be an alias stops being one, else it could not be reached.
        self._aliases.pop(name, None)
        self._values[name] = cast("T", value)
        for alias in alias_names:
            self._lazy.pop(alias, None)
            self._values.pop(alias, None)
            self._aliases[alias] = name
        if is_default:
            self._default = name
        return value

    def unregister(self, name: str) -> None:
        """Removes an entry and its aliases; a removed alias leaves its entry.

        Raises:
            ValueError: unknown name.
        """
        if name in self._aliases:
            del self._aliases[name]
            return
        plugins = self._load_plugins()
        if name not in self._values and name not in self._lazy and name not in plugins:
            raise self._unknown(name)
        self._values.pop(name, None)
        self._lazy.pop(name, None)
        plugins.pop(name, None)
        self._aliases = {a: target for a, target in self._aliases.items() if target != name}
        if self._default == name:
            self._default = None

    def available(self) -> tuple[str, ...]:
        """Sorted names, aliases included; imports nothing."""
        names = {*self._values, *self._lazy, *self._aliases, *self._load_plugins()}
        return tuple(sorted(names))

    def is_built_in(self, name: str) -> bool:
        """Whether the name stands for the entry of the literal table, not for one added later."""
        name = self.canonical(name)
        value = self._values.get(name)
        if name not in self._lazy:
            return False
        return value is None or self._is_table_entry(name, value)

    def canonical(self, name: str) -> str:
        """The name that an alias stands for; other names come back unchanged."""
        return self._aliases.get(name, name)

    def get(self, name: str | None = None) -> T:
        """The entry of this name; None means the default entry.

        Raises:
            ValueError: unknown name; the message lists the available ones.
            ImportError: the entry exists but its module cannot be imported.
        """
        if name is None:
            if self._default is None:
                raise ValueError(f"{self.name}: expected a name, got None, and there is no default")
            name = self._default
        name = self._aliases.get(name, name)
        if name in self._values:
            return self._values[name]
        if name in self._lazy:
            value = self._import(name, lambda: _attribute(self._lazy[name]))
        else:
            plugin = self._load_plugins().get(name)
            if plugin is None:
                raise self._unknown(name)
            value = self._import(name, plugin.load)
        # An import may itself have registered the name; the explicit registration wins.
        return self._values.setdefault(name, cast("T", value))

    def create(self, name: str, *args: Any) -> Any:
        """Calls the entry of this name with the arguments its registry documents."""
        return cast("Callable[..., Any]", self.get(name))(*args)

    def from_config(self, config: Any) -> Any:
        """Calls the entry that `config` selects with the configuration."""
        return self.create(self._key(config), config)

    def _import(self, name: str, load: Callable[[], object]) -> object:
        try:
            return load()
        except (ImportError, AttributeError) as error:
            raise ImportError(f"{self.name}: entry {name!r} cannot be imported: {error}") from error

    def _is_taken_by_another(self, name: str, value: object) -> bool:
        if name in self._values:
            return self._values[name] is not value
        if name in self._aliases:
            return self._values.get(self._aliases[name]) is not value
        return name in self._lazy and not self._is_table_entry(name, value)

    def _is_table_entry(self, name: str, value: object) -> bool:
        # A built-in module that registers itself while it is imported is not a duplicate.
        module, _, attribute = self._lazy[name].partition(":")
        identity = (getattr(value, "__module__", None), getattr(value, "__qualname__", None))
        return identity == (module, attribute)

    def _load_plugins(self) -> dict[str, EntryPoint]:
        if self._plugins is None:
            prefix = self.name + "."
            self._plugins = {
                point.name.removeprefix(prefix): point
                for point in entry_points(group=PLUGIN_GROUP)
                if point.name.startswith(prefix)
            }
        return self._plugins

    def _unknown(self, name: str) -> ValueError:
        names = ", ".join(self.available()) or "none"
        return ValueError(f"{self.name}: expected one of {names}, got {name!r}")


def _attribute(path: str) -> Any:
    """What "module:attribute" names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _table(table: Mapping[str, str] | str) -> dict[str, str]:
    return dict(_attribute(table) if isinstance(table, str) else table)


def _strategy(config: Any) -> str:
    return cast("str", config.decoding.decoding_strategy)


def _model_name(config: Any) -> str:
    return cast("str", config.model.model_name)


def _strategy_registry(name: str, table: str) -> Registry[Callable[..., Any]]:
    """Registry of one factory per strategy."""
    module = "diffulex.strategies.listing"
    return Registry(
        name, f"{module}:{table}", _strategy, default="multi_bd", aliases=f"{module}:ALIASES"
    )


#: strategy -> factory `(token_ids, sampling_params, config) -> Request`.
AutoReq = _strategy_registry("AutoReq", "REQUESTS")
#: strategy -> factory `(config) -> Scheduler`.
AutoScheduler = _strategy_registry("AutoScheduler", "SCHEDULERS")
#: strategy -> factory `(config) -> KVCacheManager`.
AutoKVCacheManager = _strategy_registry("AutoKVCacheManager", "KV_CACHE_MANAGERS")
#: strategy -> `ModelRunner` class, called as `(config, model)`.
AutoModelRunner = _strategy_registry("AutoModelRunner", "MODEL_RUNNERS")
#: model name or `architectures[0]` -> model class, called as `(spec, dtype, device)`.
AutoModelForDiffusionLM: Registry[Callable[..., Any]] = Registry(
    "AutoModelForDiffusionLM",
    "diffulex.families.listing:MODELS",
    _model_name,
    aliases="diffulex.families.listing:MODEL_ALIASES",
)
#: model name -> factory `(config) -> Sampler`.
AutoSampler: Registry[Callable[..., Any]] = Registry(
    "AutoSampler", "diffulex.families.listing:SAMPLERS", _model_name
)
