# SPDX-License-Identifier: Apache-2.0
"""A resolved configuration as the options of the C++ core."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from diffulex.config.table import CONFIG_TABLE, THRESHOLD_KEYS
from diffulex.errors import ConfigError
from diffulex.strategies.listing import owner_of, strategy_named
from diffulex_ext import _core

if TYPE_CHECKING:
    from diffulex.config.types import ConfigTree

__all__ = ["core_options"]

#: Field of the core -> section and name of its option.
_Fields = dict[str, tuple[str, str]]
# A key that every strategy reads is the core's field of the same name, if there is one.
_SHARED: _Fields = {
    key.name: (key.section, key.name)
    for key in CONFIG_TABLE.values()
    if hasattr(_core.EngineOptions, key.name) and owner_of(key.name) is None
}
_THRESHOLDS: _Fields = {
    name.removesuffix("_threshold"): (CONFIG_TABLE[name].section, name) for name in THRESHOLD_KEYS
}
# Fields of the core's options that are options under another name.
_OPTION_NAMES = {"strategy": "decoding_strategy", "stop_token_ids": "eos"}


def core_options(config: ConfigTree, strategy: str | None = None) -> _core.EngineOptions:
    """Options of the C++ core; validated there once more.

    Args:
        config: the resolved configuration.
        strategy: state machine of the core, for a strategy registered from outside that reuses
            one; None takes the configured name.

    Raises:
        ConfigError: the core refuses a value.
    """
    name = strategy or config.decoding.decoding_strategy
    options = _core.EngineOptions(
        **{
            **_values(config, _SHARED),
            "strategy": name,
            "vocab_size": config.model.spec.vocab_size,
            "stop_token_ids": list(config.model.eos),
            "thresholds": _core.Thresholds(**_values(config, _THRESHOLDS)),
            "cache_salt": _cache_salt(config),
            **_strategy_fields(config, name),
        }
    )
    try:
        options.validate()
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(_option_names(str(error))) from error
    return options


def _values(config: ConfigTree, fields: _Fields) -> dict[str, Any]:
    return {
        field: getattr(getattr(config, section), name) for field, (section, name) in fields.items()
    }


def _strategy_fields(config: ConfigTree, strategy: str) -> dict[str, Any]:
    """Fields of the core's options that not every strategy sets."""
    fields: dict[str, Any] = {}
    if config.decoding.sampling_mode == "edit":
        fields["is_editing"] = True
    record = strategy_named(strategy)
    # A dual cache shifts inside its blocks whatever the flag says.
    if config.model.spec.shift and not record.traits.has_dual_cache:
        fields["logits_shift"] = True
    return {**fields, **record.core_fields(config)}


def _cache_salt(config: ConfigTree) -> int:
    parts = (config.model.model_dir, config.decoding.decoding_strategy, config.model.dtype)
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _option_names(message: str) -> str:
    """A message of the core with the fields under the names of their options."""
    message = re.sub(r"\bEngineOptions\.thresholds\.(\w+)", r"\1_threshold", message)
    message = re.sub(r"\bEngineOptions(\.|(?=:))", lambda m: "" if m[1] else "options", message)
    for field, option in _OPTION_NAMES.items():
        message = re.sub(rf"\b{field}\b", option, message)
    return message
