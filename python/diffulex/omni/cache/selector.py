# SPDX-License-Identifier: Apache-2.0
"""Caches by the name of the setting `cache_backend`.

An installed package adds its own as an entry point `AutoCacheBackend.<name>` of the group
`diffulex.plugins`, a program with `AutoCacheBackend.register`; such names are written without hyphens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.registry import Registry

if TYPE_CHECKING:
    from diffulex.omni.cache.base import CacheBackend
    from diffulex.omni.config_table import DiffusionCacheConfig

__all__ = ["NO_CACHE", "AutoCacheBackend", "cache_name", "get_cache_backend"]

NO_CACHE = "none"


def _backend_name(config: Any) -> str:
    name: str = config.cache_backend
    return name


#: Name -> class, called as `(DiffusionCacheConfig)`.
AutoCacheBackend: Registry[Callable[[Any], Any]] = Registry(
    "AutoCacheBackend",
    {
        "tea_cache": "diffulex.omni.cache.teacache:TeaCacheBackend",
        "cache_dit": "diffulex.omni.cache.dbcache:DBCacheBackend",
    },
    _backend_name,
)


def cache_name(name: object) -> object:
    """The name of a cache as the registry has it; what is no text comes back unchanged."""
    return name.strip().lower().replace("-", "_") if isinstance(name, str) else name


def get_cache_backend(name: str | None, config: DiffusionCacheConfig) -> CacheBackend | None:
    """A cache that is not enabled yet; None for `none`.

    Raises:
        ConfigError: there is none of this name.
    """
    named = NO_CACHE if name is None else cache_name(name)
    if named == NO_CACHE:
        return None
    known = AutoCacheBackend.available()
    if named not in known:
        names = ", ".join((NO_CACHE, *known))
        raise ConfigError(f"cache_backend: expected one of {names}, got {name!r}")
    backend: CacheBackend = AutoCacheBackend.create(str(named), config)
    return backend
