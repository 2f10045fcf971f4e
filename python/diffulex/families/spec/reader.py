# SPDX-License-Identifier: Apache-2.0
"""Typed access to ``config.json`` and the reading rules that all families share."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, TypeVar, cast

from diffulex.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T")

#: Newest first: transformers 5 writes ``dtype``, older versions ``torch_dtype``.
_DTYPE_KEYS = ("dtype", "torch_dtype")
#: No dimension of a model comes near; the kernels index with 32 bits.
_LARGEST = 2**31 - 1
#: No model has as many layers or experts; lists of them are built before the weights are looked at.
MOST_PARTS = 1 << 16
_DTYPES = ("float32", "bfloat16", "float16")


def read_json_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file whose top level is an object; anything else is a CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"checkpoint: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint: {path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(
            f"checkpoint: {path} is not valid JSON: brackets are nested too deeply"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"checkpoint: {path}: expected a JSON object, got {type(value).__name__}"
        )
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Like `read_json_object`, but an absent file is an empty object."""
    return read_json_object(path) if path.is_file() else {}


class ConfigReader:
    """Reads keys of one configuration; every error names the key and the value found."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def fail(self, key: str, expected: str, value: object) -> CheckpointError:
        return CheckpointError(f"config.json: {key}: expected {expected}, got {value!r}")

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _LARGEST
    ) -> int:
        """An integer in [minimum, maximum]; null counts as absent; absent without default fails."""
        value = self.config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.fail(key, f"an integer of at least {minimum}", value)
        if value > maximum:
            raise self.fail(key, f"an integer of at most {maximum}", value)
        return value

    def count(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A number of layers or experts: an integer that is small enough to list them."""
        return self.integer(key, default, minimum=minimum, maximum=MOST_PARTS)

    def number(self, key: str, default: float) -> float:
        """A positive finite number."""
        value = self.config.get(key)
        if value is None:
            value = default
        return self._positive(key, value)

    def _positive(self, key: str, value: object) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < cast("float", value) <= sys.float_info.max:
            raise self.fail(key, "a positive number", value)
        return float(cast("float", value))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; null counts as absent."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false", value)
        return value

    def require(self, key: str, allowed: tuple[object, ...]) -> None:
        """Fails when `key` holds a value that changes the math in a way that is not implemented."""
        value = self.config.get(key)
        if not any(value is option or value == option for option in allowed):
            names = " or ".join("null" if option is None else repr(option) for option in allowed)
            raise self.fail(key, f"{names} (other values are not supported)", value)

    def dtype(self, default: str = "bfloat16") -> str:
        """Storage dtype: ``dtype`` or ``torch_dtype``."""
        value = next((self.config[key] for key in _DTYPE_KEYS if self.config.get(key)), default)
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            raise self.fail("dtype", f"one of {', '.join(_DTYPES)}", value)
        return name

    def rope_theta(self) -> float:
        """Base of the rotary frequencies from any place it is stored; all must agree.

        Configurations saved by transformers 5 hold only ``rope_parameters``; older ones only the
        top-level key. Of the older ``rope_scaling``, transformers 5 makes ``rope_parameters``.
        Absent from all of them it is an error: another base gives fluent nonsense.
        """
        found: dict[str, float] = {}
        self.rope_parameters()
        for where in ("rope_parameters", "rope_scaling"):
            value = (self.config.get(where) or {}).get("rope_theta")
            if value is not None:
                found[f"{where}.rope_theta"] = self._positive(f"{where}.rope_theta", value)
        if self.config.get("rope_theta") is not None:
            found["rope_theta"] = self._positive("rope_theta", self.config["rope_theta"])
        if not found:
            raise self.fail("rope_theta", "the base of the rotary frequencies", None)
        (first, theta), *others = found.items()
        for key, value in others:
            if value != theta:
                raise self.fail(key, f"the value of {first} ({theta!r})", value)
        return theta

    def rope_parameters(self) -> Mapping[str, Any]:
        """The ``rope_parameters`` object; any type but plain rotary embedding is an error."""
        for key in ("rope_scaling", "rope_parameters"):
            value = self.config.get(key)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise self.fail(key, "an object or null", value)
            kind = value.get("rope_type", value.get("type"))
            if kind not in (None, "default"):
                raise self.fail(f"{key}.rope_type", "null or 'default' (no scaling)", kind)
            # Parameters by layer type; taking them for absent would mean another rotation.
            if any(isinstance(item, dict) for item in value.values()):
                raise self.fail(key, "one set of parameters for all layers", value)
        parameters = self.config.get("rope_parameters")
        return parameters if isinstance(parameters, dict) else {}

    def rotary_dim(self, head_dim: int, default_factor: float = 1.0) -> int:
        """Leading entries of a head that are rotated; an explicit ``rotary_dim`` must agree."""
        factor = self.rope_parameters().get("partial_rotary_factor")
        if factor is None:
            factor = self.config.get("partial_rotary_factor")
        where = "partial_rotary_factor"
        value = default_factor if factor is None else self._positive(where, factor)
        dims = int(head_dim * value)
        if self.config.get("rotary_dim") is not None:
            explicit = self.integer("rotary_dim")
            # A default factor says nothing about the checkpoint.
            if factor is not None and explicit != dims:
                expected = f"head_dim {head_dim} * partial_rotary_factor {value} = {dims}"
                raise self.fail("rotary_dim", expected, explicit)
            dims, where, value = explicit, "rotary_dim", explicit / head_dim
        if value > 1 or dims < 2 or dims % 2:
            raise self.fail(where, "an even number of rotary dimensions", value)
        return dims

    def head_dim(self, hidden_size: int, num_q_heads: int) -> int:
        """Explicit ``head_dim``, else hidden size over heads, which must then divide."""
        if self.config.get("head_dim") is None and hidden_size % num_q_heads:
            raise self.fail("hidden_size", f"a multiple of {num_q_heads} heads", hidden_size)
        return self.integer("head_dim", hidden_size // num_q_heads)

    def num_kv_heads(self, num_q_heads: int, key: str = "num_key_value_heads") -> int:
        """Key/value heads; null and 0 mean one per query head."""
        value = self.integer(key, num_q_heads, minimum=0) or num_q_heads
        if num_q_heads % value:
            raise self.fail(key, f"a divisor of {num_q_heads}", value)
        return value

    def block_size(self) -> int | None:
        """Native diffusion block length under any of its published names."""
        for key in ("block_size", "bd_size", "canvas_length"):
            if self.config.get(key) is not None:
                return self.integer(key)
        return None


def token_id_list(value: object, where: str) -> tuple[int, ...]:
    """Ids stored as an integer, a list of integers or null."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise CheckpointError(f"{where}: expected token ids, got {value!r}")
    return tuple(items)
