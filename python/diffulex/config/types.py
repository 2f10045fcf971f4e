# SPDX-License-Identifier: Apache-2.0
"""The configuration as the packages below its resolution see it: partial and resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.config.table import CONFIG_TABLE
from diffulex.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.config.table import (
        CacheConfig,
        DecodingConfig,
        IgnoredConfig,
        KernelConfig,
        ModelConfig,
        ParallelConfig,
        SamplerConfig,
        SchedulerConfig,
    )
    from diffulex.families.spec import ModelSpec
    from diffulex.quantization.stored import StoredQuantization
    from diffulex_edge.bundle import Bundle

__all__ = ["ConfigTree", "ModelFacts", "PartialConfig"]

logger = get_logger(__name__)


def _count_devices() -> int:
    import torch  # noqa: PLC0415 (slow to import)

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the checkpoint directory and the machine say, as the resolution needs it."""

    model_name: str
    model_dir: Path
    spec: ModelSpec
    checkpoint_defaults: Mapping[str, Any]
    tokenizer_vocab_size: int | None = None
    #: The checkpoint's `Tokenizer`, which the engine goes on to use.
    tokenizer: Any = None
    #: `generation_config.json` as a whole; a family may read its own keys from it.
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    #: How the checkpoint's weights are in low precision; None: they are not.
    stored: StoredQuantization | None = None
    #: The directory's exported program, if that is to be run.
    program: Bundle | None = None
    #: CUDA devices that are visible.
    num_devices: int = field(default_factory=_count_devices)


class PartialConfig:
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


@dataclass(frozen=True, slots=True)
class ConfigTree:
    """Resolved values by section and what follows from them; never mutated."""

    model: ModelConfig
    decoding: DecodingConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    parallel: ParallelConfig
    kernel: KernelConfig
    sampler: SamplerConfig
    ignored: IgnoredConfig

    @property
    def local_spec(self) -> ModelSpec:
        """The description of the model with the heads of one rank."""
        return self.model.spec.per_rank(self.parallel.tensor_parallel_size)

    @property
    def decode_rows(self) -> int:
        """Rows of one request in a decode step."""
        return self.decoding.block_size * self.decoding.buffer_size

    @property
    def decode_logits_rows(self) -> int:
        """Most rows of one request in a decode step that the head takes: of a dual cache those of the
        current sub-block."""
        decoding = self.decoding
        return decoding.block_size if decoding.traits.has_dual_cache else self.decode_rows

    @property
    def pages_per_request(self) -> int:
        """Pages that cover max_model_len positions; a dual cache stores whole blocks."""
        return -(-self.max_context_len // self.cache.page_size)

    @property
    def max_context_len(self) -> int:
        """Most positions of a request that are cached at a time."""
        length = self.scheduler.max_model_len
        if self.decoding.traits.has_dual_cache:
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
    def forbidden_ids(self) -> tuple[int, ...]:
        """Ids that are never chosen where masks are filled, in rising order; ids from
        `tokenizer_vocab_size` on are not either."""
        return tuple(sorted({*self.sampler.suppress_token_ids, self.model.mask_token_id}))

    @property
    def att_block_size(self) -> int:
        """Positions that see each other: a block, or all sub-blocks of a dual cache."""
        decoding = self.decoding
        return self.decode_rows if decoding.traits.has_dual_cache else decoding.block_size
