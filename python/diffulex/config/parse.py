# SPDX-License-Identifier: Apache-2.0
"""The first phase of a configuration: names, types and ranges of single keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffulex.config.key import unknown_key
from diffulex.config.table import CONFIG_TABLE, THRESHOLD_KEYS, check_value
from diffulex.errors import ConfigError
from diffulex.log import get_logger, warn_once
from diffulex.profiling.config import ProfilerConfig

__all__ = ["Options", "dtype_name", "normalise"]

logger = get_logger(__name__)

# Integer keys wider than the 31 bits of the core's counts, with their bits.
_WIDE_KEYS = {"seed": 64, "cpu_kv_cache_bytes": 63}
_DTYPE_ALIASES = {
    **{"fp32": "float32", "float": "float32", "bf16": "bfloat16"},
    **{"fp16": "float16", "half": "float16"},
}


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller gave, parsed once.

    Attributes:
        model: `demo`, a directory or a hub id.
        given: key -> value in its canonical type, of the keys that have one.
    """

    model: str
    given: Mapping[str, Any]

    @classmethod
    def parse(cls, model: str | os.PathLike[str], flat: Mapping[str, Any]) -> Options:
        """Checks names, types and ranges.

        Raises:
            ConfigError: unknown key, illegal or unsupported value.
        """
        given = normalise(flat, where="")
        for name in THRESHOLD_KEYS:
            if flat.get(name) is not None:
                text = "%s: deprecated as a flat key, use decoding_thresholds={'%s': ...}"
                warn_once(logger, f"flat {name}", text, name, name)
        # What is neither is refused where models are looked for.
        return cls(os.fspath(model) if isinstance(model, os.PathLike) else model, given)


def normalise(flat: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checks names, types and ranges; expands `decoding_thresholds`; drops None."""
    result: dict[str, Any] = {}
    try:
        thresholds = flat.get("decoding_thresholds") or {}
        if not isinstance(thresholds, Mapping):
            raise ConfigError(f"decoding_thresholds: expected a mapping, got {thresholds!r}")
        for name, value in thresholds.items():
            if name not in THRESHOLD_KEYS:
                raise ConfigError(unknown_key(f"decoding_thresholds.{name}", name, THRESHOLD_KEYS))
            result[name] = _checked(name, value)
        for name, value in flat.items():
            if name == "decoding_thresholds" or value is None:
                continue
            if name == "profiler_config":
                settings = ProfilerConfig.of(value)
                if settings.is_enabled:
                    result[name] = settings.as_dict()
                continue
            if name not in CONFIG_TABLE:
                known = (*CONFIG_TABLE, "decoding_thresholds")
                raise ConfigError(unknown_key(name, name, known))
            result[name] = _checked(name, value)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from error.__cause__
    return result


def _checked(name: str, value: Any) -> Any:
    """`check_value`, aware of the names of dtypes and of the integers that the core can hold."""
    # A torch dtype is recognised by its text: importing torch here would be slow.
    if name == "dtype" and (isinstance(value, str) or str(value).startswith("torch.")):
        value = dtype_name(value)
    result = check_value(name, value)
    bits = _WIDE_KEYS.get(name, 31)
    for item in result if isinstance(result, tuple) else (result,):
        if isinstance(item, int) and not -(2**bits) <= item < 2**bits:
            raise ConfigError(f"{name}: expected {CONFIG_TABLE[name].kind} < 2**{bits}, got {item}")
    return result


def dtype_name(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_ALIASES.get(name, name)
