# SPDX-License-Identifier: Apache-2.0
"""Names, types and ranges of single keys, checked before the rules between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffulex.config.key import unknown_key
from diffulex.config.table import CONFIG_TABLE, THRESHOLD_KEYS, check_value
from diffulex.errors import ConfigError

__all__ = ["dtype_name", "normalise"]

# Integer keys wider than the 31 bits of the core's counts, with their bits.
_WIDE_KEYS = {"seed": 64, "cpu_kv_cache_bytes": 63}
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


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
