# SPDX-License-Identifier: Apache-2.0
"""The cache that a request chooses in place of the engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from diffulex.config.key import check_key, unknown_key
from diffulex.errors import ConfigError
from diffulex.omni.cache.selector import NO_CACHE, cache_name
from diffulex.omni.config_table import OMNI_CONFIG_TABLE, DiffusionCacheConfig
from diffulex.omni.errors import RequestError

__all__ = ["CACHE_SETTINGS", "cache_schema", "chosen_cache"]

_BACKEND = "cache_backend"
#: What `cache_config` of a request may hold, by name.
CACHE_SETTINGS = {
    field.name: OMNI_CONFIG_TABLE[field.name]
    for field in dataclasses.fields(DiffusionCacheConfig)
    if field.name not in (_BACKEND, "num_inference_steps")
}

#: Kinds of settings in words of JSON schema.
_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "str": {"type": "string"},
    "ids": {"type": "array"},
    "floats": {"type": "array", "items": {"type": "number"}},
}


def cache_schema() -> dict[str, Any]:
    """What `cache_config` may be, as a JSON schema."""
    found = {}
    for name, key in CACHE_SETTINGS.items():
        forms = [{**_TYPES[key.kind.rstrip("?")], **key.schema}, {"type": "null"}]
        found[name] = {"anyOf": forms, "description": key.help}
    return {"type": "object", "properties": found, "additionalProperties": False}


def chosen_cache(
    engine: DiffusionCacheConfig, backend: object, settings: object
) -> DiffusionCacheConfig:
    """All settings of a request's cache: what it leaves open is the engine's.

    Args:
        engine: its settings.
        backend: name of a cache, or None.
        settings: by name, or None.

    Raises:
        RequestError: one of them is not known or not legal, or there are some of no cache.
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise RequestError(f"cache_config: expected a mapping, got {settings!r:.100}")
    chosen = {} if backend is None else {_BACKEND: cache_name(backend)}
    for name, value in (settings or {}).items():
        if name not in CACHE_SETTINGS:
            text = unknown_key(str(name), str(name), CACHE_SETTINGS)
            raise RequestError(f"cache_config: {text.removeprefix('configuration: ')}")
        if value is not None:
            chosen[name] = value
    try:
        checked = {name: check_key(OMNI_CONFIG_TABLE[name], chosen[name]) for name in chosen}
    except ConfigError as error:
        raise RequestError(str(error)) from None
    cache = dataclasses.replace(engine, **checked)
    if cache.cache_backend == NO_CACHE and settings:
        raise RequestError("cache_config: expected a cache_backend with it, got none")
    return cache
