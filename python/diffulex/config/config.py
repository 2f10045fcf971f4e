# SPDX-License-Identifier: Apache-2.0
"""Resolution of the configuration: keyword arguments in, one immutable tree out.

Precedence of a key: explicit value, `generation_config.json` of the checkpoint (object
`diffulex`), model family, table default. Every automatic change is logged with old value, new
value and reason. Validation happens here, once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.config.parse import normalise
from diffulex.config.resolve import resolve_sections
from diffulex.config.table import THRESHOLD_KEYS
from diffulex.config.types import ConfigTree, ModelFacts
from diffulex.errors import ConfigError
from diffulex.log import get_logger, warn_once

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex_edge.bundle import Bundle
    from diffulex_ext import _core

__all__ = ["Config", "read_model_facts"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Config(ConfigTree):
    """The resolved configuration. Built by `from_kwargs`; never mutated."""

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

    def to_core(self, strategy: str | None = None) -> _core.EngineOptions:
        """Options of the C++ core; validated there once more.

        Args:
            strategy: state machine of the core, for a strategy registered from outside that reuses
                one; None takes the configured name.
        """
        from diffulex.strategies.core_options import core_options  # noqa: PLC0415 (loads the core)

        return core_options(self, strategy)


def read_model_facts(model: str, flat: Mapping[str, Any]) -> ModelFacts:
    """Finds the checkpoint and reads its configuration and tokenizer files.

    Raises:
        ConfigError: bad keys in `flat`; reported before anything is read or downloaded.
        CheckpointError: the model cannot be found or read.
    """
    from diffulex.checkpoint.auto_model import detect  # noqa: PLC0415
    from diffulex.checkpoint.resolve import resolve_model  # noqa: PLC0415
    from diffulex.checkpoint.tokenizer import Tokenizer  # noqa: PLC0415
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
