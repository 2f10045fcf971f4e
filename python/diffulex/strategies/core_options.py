# SPDX-License-Identifier: Apache-2.0
"""A resolved configuration as the options of the C++ core."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.strategies.rules import STRATEGIES, rules_of
from diffulex_ext import _core

if TYPE_CHECKING:
    from diffulex.config.types import ConfigTree

__all__ = ["core_options"]

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
    decoding, scheduler, cache = config.decoding, config.scheduler, config.cache
    options = _core.EngineOptions(
        strategy=strategy or decoding.decoding_strategy,
        block_size=decoding.block_size,
        buffer_size=decoding.buffer_size,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        max_num_reqs=scheduler.max_num_reqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=scheduler.max_model_len,
        mask_token_id=config.model.mask_token_id,
        vocab_size=config.model.spec.vocab_size,
        stop_token_ids=list(config.model.eos),
        thresholds=_core.Thresholds(
            add_block=decoding.add_block_threshold,
            semi_complete=decoding.semi_complete_threshold,
            accept=decoding.accept_threshold,
            edit=decoding.edit_threshold,
            remask=decoding.remask_threshold,
            token_stability=decoding.token_stability_threshold,
        ),
        enable_prefix_caching=cache.enable_prefix_caching,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        decode_headroom=scheduler.decode_headroom,
        auto_max_nfe=scheduler.auto_max_nfe,
        auto_max_nfe_warmup_steps=scheduler.auto_max_nfe_warmup_steps,
        auto_max_nfe_tpf_floor=scheduler.auto_max_nfe_tpf_floor,
        max_consecutive_prefill_batches=scheduler.max_consecutive_prefill_batches,
        cache_salt=_cache_salt(config),
        seed=config.sampler.seed,
        **_strategy_fields(config, strategy or decoding.decoding_strategy),
    )
    try:
        options.validate()
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(_option_names(str(error))) from error
    return options


def _strategy_fields(config: ConfigTree, strategy: str) -> dict[str, Any]:
    """Fields of the core's options that not every strategy sets."""
    fields: dict[str, Any] = {}
    if config.decoding.sampling_mode == "edit":
        fields["is_editing"] = True
    # fast_dllm_v2 shifts inside its blocks whatever the flag says.
    if config.model.spec.shift and strategy != "fast_dllm_v2":
        fields["logits_shift"] = True
    if strategy in STRATEGIES:
        fields.update(rules_of(strategy).core_fields(config))
    return fields


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
