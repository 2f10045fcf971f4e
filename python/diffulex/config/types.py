# SPDX-License-Identifier: Apache-2.0
"""Resolution of the configuration: keyword arguments in, one immutable tree out.

Precedence of a key: explicit value, `generation_config.json` of the checkpoint (object
`diffulex`), model family, table default. Every automatic change is logged with old value, new
value and reason. Validation happens here, once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.config.parse import ModelFacts, normalise
from diffulex.config.resolve import resolve_sections
from diffulex.config.table import (
    CONFIG_TABLE,
    THRESHOLD_KEYS,
    CacheConfig,
    ConfigKey,
    DecodingConfig,
    KernelConfig,
    ModelConfig,
    ParallelConfig,
    SamplerConfig,
    SchedulerConfig,
)
from diffulex.errors import ConfigError
from diffulex.log import get_logger, warn_once
from diffulex.strategies.rules import STRATEGIES, rules_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex_edge.bundle import Bundle
    from diffulex_ext import _core

__all__ = [
    "CONFIG_TABLE",
    "CacheConfig",
    "Config",
    "ConfigKey",
    "DecodingConfig",
    "KernelConfig",
    "ModelConfig",
    "ModelFacts",
    "ParallelConfig",
    "SamplerConfig",
    "SchedulerConfig",
]

logger = get_logger(__name__)

# Fields of the core's options that are options under another name.
_OPTION_NAMES = {"strategy": "decoding_strategy", "stop_token_ids": "eos"}


@dataclass(frozen=True, slots=True)
class Config:
    """The resolved configuration. Built by `from_kwargs`; never mutated."""

    model: ModelConfig
    decoding: DecodingConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    parallel: ParallelConfig
    kernel: KernelConfig
    sampler: SamplerConfig

    @classmethod
    def from_kwargs(cls, model: str = "demo", **flat: Any) -> Config:
        """Reads the checkpoint's facts and resolves every key.

        Raises:
            ConfigError: unknown key, illegal value, unsupported value or contradiction.
            CheckpointError: the model cannot be found or read.
        """
        return cls.resolve(model, read_model_facts(model, flat), flat)

    @classmethod
    def resolve(cls, model: str, facts: ModelFacts, flat: Mapping[str, Any]) -> Config:
        """`from_kwargs` without reading files."""
        for name in THRESHOLD_KEYS:
            if flat.get(name) is not None:
                text = "%s: deprecated as a flat key, use decoding_thresholds={'%s': ...}"
                warn_once(logger, f"flat {name}", text, name, name)
        return cls(**resolve_sections(model, facts, normalise(flat, where="")))

    def with_num_pages(self, num_pages: int) -> Config:
        """The same configuration with the size of the page pool decided."""
        if num_pages < 1:
            raise ConfigError(f"num_pages: expected >= 1, got {num_pages}")
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, num_pages=num_pages))

    @property
    def decode_rows(self) -> int:
        """Rows of one request in a decode step."""
        return self.decoding.block_size * self.decoding.buffer_size

    @property
    def pages_per_request(self) -> int:
        """Pages that cover max_model_len positions; fast_dllm_v2 stores whole blocks."""
        return -(-self.max_context_len // self.cache.page_size)

    @property
    def max_context_len(self) -> int:
        """Most positions of a request that are cached at a time."""
        length = self.scheduler.max_model_len
        if self.decoding.decoding_strategy == "fast_dllm_v2":
            return -(-length // self.decode_rows) * self.decode_rows
        return length

    @property
    def longest_whole_prompt(self) -> int | None:
        """Most tokens of a prompt whose rows see each other in one call of an exported program; None:
        prompts are cut into as many calls as they need."""
        program = self.model.program
        is_whole = program is not None and self.decoding.multi_block_prefix_full
        return program.max_rows if program is not None and is_whole else None

    @property
    def att_block_size(self) -> int:
        """Positions that see each other: a block, or all sub-blocks of fast_dllm_v2."""
        is_dual = self.decoding.decoding_strategy == "fast_dllm_v2"
        return self.decode_rows if is_dual else self.decoding.block_size

    def to_core(self, strategy: str | None = None) -> _core.EngineOptions:
        """Options of the C++ core; validated there once more.

        Args:
            strategy: state machine of the core, for a strategy registered from outside that reuses
                one; None takes the configured name.
        """
        from diffulex_ext import _core  # noqa: PLC0415

        decoding, scheduler, cache = self.decoding, self.scheduler, self.cache
        options = _core.EngineOptions(
            strategy=strategy or decoding.decoding_strategy,
            block_size=decoding.block_size,
            buffer_size=decoding.buffer_size,
            page_size=cache.page_size,
            num_pages=cache.num_pages,
            max_num_reqs=scheduler.max_num_reqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=scheduler.max_model_len,
            mask_token_id=self.model.mask_token_id,
            vocab_size=self.model.spec.vocab_size,
            stop_token_ids=list(self.model.eos),
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
            cache_salt=self._cache_salt(),
            seed=self.sampler.seed,
            **self._strategy_fields(strategy or decoding.decoding_strategy),
        )
        try:
            options.validate()
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(_option_names(str(error))) from error
        return options

    def _strategy_fields(self, strategy: str) -> dict[str, Any]:
        """Fields of the core's options that not every strategy sets."""
        fields: dict[str, Any] = {}
        if self.decoding.sampling_mode == "edit":
            fields["is_editing"] = True
        # fast_dllm_v2 shifts inside its blocks whatever the flag says.
        if self.model.spec.shift and strategy != "fast_dllm_v2":
            fields["logits_shift"] = True
        if strategy in STRATEGIES:
            fields.update(rules_of(strategy).core_fields(self))
        return fields

    def _cache_salt(self) -> int:
        parts = (self.model.model_dir, self.decoding.decoding_strategy, self.model.dtype)
        digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
        return int.from_bytes(digest[:8], "little")


def _option_names(message: str) -> str:
    """A message of the core with the fields under the names of their options."""
    message = re.sub(r"\bEngineOptions\.thresholds\.(\w+)", r"\1_threshold", message)
    message = re.sub(r"\bEngineOptions(\.|(?=:))", lambda m: "" if m[1] else "options", message)
    for field, option in _OPTION_NAMES.items():
        message = re.sub(rf"\b{field}\b", option, message)
    return message


def read_model_facts(model: str, flat: Mapping[str, Any]) -> ModelFacts:
    """Finds the checkpoint and reads its configuration and tokenizer files.

    Raises:
        ConfigError: bad keys in `flat`; reported before anything is read or downloaded.
        CheckpointError: the model cannot be found or read.
    """
    from diffulex.checkpoint.auto_model import detect  # noqa: PLC0415
    from diffulex.checkpoint.resolve import resolve_model  # noqa: PLC0415
    from diffulex.engine.tokenizer import Tokenizer  # noqa: PLC0415
    from diffulex.families.spec.reader import read_optional_json  # noqa: PLC0415

    explicit = normalise(flat, where="")
    model_dir = resolve_model(model, explicit.get("revision"))
    name, spec, info = detect(
        model_dir, explicit.get("model_name"), mask_token_id=explicit.get("mask_token_id")
    )
    tokenizer = Tokenizer.from_dir(model_dir)
    return ModelFacts(
        model_name=name,
        model_dir=model_dir,
        spec=spec,
        checkpoint_defaults=info.engine_defaults,
        tokenizer_vocab_size=tokenizer.tokenizer_vocab_size,
        tokenizer=tokenizer,
        generation_config=read_optional_json(model_dir / "generation_config.json"),
        program=_exported_program(model_dir, explicit.get("load_format", "auto")),
    )


def _exported_program(model_dir: Path, load_format: str) -> Bundle | None:
    """What the directory says about its exported program, if that is to be run."""
    has_program = (model_dir / "model.pte").is_file()
    is_chosen = load_format == "auto" and has_program and not any(model_dir.glob("*.safetensors"))
    if not is_chosen and load_format != "pte":
        return None
    from diffulex_edge.bundle import read_bundle  # noqa: PLC0415 (exported programs only)

    return read_bundle(model_dir)
