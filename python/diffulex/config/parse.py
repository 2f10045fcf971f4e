# SPDX-License-Identifier: Apache-2.0
"""A configuration on its way to being resolved: the levels of every key and what changed them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.config.key import unknown_key
from diffulex.config.table import CONFIG_TABLE, THRESHOLD_KEYS, check_value
from diffulex.errors import ConfigError
from diffulex.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.engine.tokenizer import Tokenizer
    from diffulex.families.spec import ModelSpec
    from diffulex_edge.bundle import Bundle

__all__ = ["Draft", "ModelFacts", "dtype_name", "normalise"]

logger = get_logger(__name__)

# Integer keys wider than the 31 bits of the core's counts, with their bits.
_WIDE_KEYS = {"seed": 64, "cpu_kv_cache_bytes": 63}
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the checkpoint directory says, as the resolution needs it."""

    model_name: str
    model_dir: Path
    spec: ModelSpec
    checkpoint_defaults: Mapping[str, Any]
    tokenizer_vocab_size: int | None = None
    tokenizer: Tokenizer | None = None
    #: `generation_config.json` as a whole; a family may read its own keys from it.
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    #: The directory's exported program, if that is to be run.
    program: Bundle | None = None


class Draft:
    """Values of every key while the rules between keys are applied.

    `explicit` holds what the caller gave and `checkpoint` what the model's files say, so that a
    value that equals a default is still known to be wanted.
    """

    def __init__(
        self,
        facts: ModelFacts,
        explicit: Mapping[str, Any],
        checkpoint: Mapping[str, Any],
        family: Mapping[str, Any],
    ) -> None:
        self.facts = facts
        self.explicit = explicit
        self.checkpoint = checkpoint
        self.values: dict[str, Any] = {key.name: key.default for key in CONFIG_TABLE.values()}
        for level in (family, checkpoint, explicit):
            self.values.update(level)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def is_given(self, name: str) -> bool:
        """Whether the caller or the checkpoint set the key."""
        return name in self.explicit or name in self.checkpoint

    def change(self, name: str, value: Any, reason: str) -> None:
        """Sets a key and logs old value, new value and reason, unless it has that value."""
        old = self.values[name]
        if old != value:
            logger.info("%s: changed from %r to %r: %s", name, old, value, reason)
            self.values[name] = value


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
