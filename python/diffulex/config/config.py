# SPDX-License-Identifier: Apache-2.0
"""The configuration: keyword arguments in, one immutable tree out, in two phases.

Options are parsed once (`diffulex.config.parse`), the facts of checkpoint and devices are read once
(`diffulex.config.facts`), and then every key is resolved once (`diffulex.config.resolve`).

Precedence of a key: explicit value, `generation_config.json` of the checkpoint (object
`diffulex`), model family, table default. Every automatic change is logged with old value, new
value and reason. Validation happens here, once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.config.facts import read_facts
from diffulex.config.parse import Options
from diffulex.config.resolve import resolve_sections
from diffulex.config.types import ConfigTree, ModelFacts
from diffulex.distributed.layout import Sizes, rank_devices
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex_ext import _core

__all__ = ["Config", "read_model_facts"]


@dataclass(frozen=True, slots=True)
class Config(ConfigTree):
    """The resolved configuration. Built by `from_kwargs`; never mutated."""

    @classmethod
    def from_kwargs(cls, model: str = "demo", **flat: Any) -> Config:
        """Parses options, reads the checkpoint's facts and resolves every key.

        Raises:
            ConfigError: unknown key, illegal value, unsupported value or contradiction.
            CheckpointError: the model cannot be found or read.
        """
        options = Options.parse(model, flat)
        return cls.of(options, read_facts(options))

    @classmethod
    def of(cls, options: Options, facts: ModelFacts) -> Config:
        """The second phase: resolves every key, once, from parsed options and facts.

        Raises:
            ConfigError: a contradiction between keys, or between a key and the facts.
        """
        return cls(**resolve_sections(options, facts))

    @classmethod
    def resolve(cls, model: str, facts: ModelFacts, flat: Mapping[str, Any]) -> Config:
        """`from_kwargs` without reading files."""
        return cls.of(Options.parse(model, flat), facts)

    def with_num_pages(self, num_pages: int) -> Config:
        """The same configuration with the size of the page pool decided."""
        if num_pages < 1:
            raise ConfigError(f"num_pages: expected >= 1, got {num_pages}")
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, num_pages=num_pages))

    def of_rank(self, rank: int) -> Config:
        """The same configuration with the device of another of the ranks that share weights, among which
        are those of replicas that share the experts."""
        parallel = self.parallel
        if rank == 0 or self.model.device == "cpu":
            return self
        devices = rank_devices(
            Sizes.of_weights(parallel), parallel.device_ids, parallel.device_start
        )
        model = dataclasses.replace(self.model, device=f"cuda:{devices[rank]}")
        return dataclasses.replace(self, model=model)

    def to_core(self, strategy: str | None = None) -> _core.EngineOptions:
        """Options of the C++ core; validated there once more.

        Args:
            strategy: state machine of the core, for a strategy registered from outside that reuses
                one; None takes the configured name.
        """
        from diffulex.strategies.core_options import core_options  # noqa: PLC0415 (loads the core)

        return core_options(self, strategy)


def read_model_facts(model: str, flat: Mapping[str, Any]) -> ModelFacts:
    """`read_facts` of options that are not parsed yet."""
    return read_facts(Options.parse(model, flat))
