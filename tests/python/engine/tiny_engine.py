# SPDX-License-Identifier: Apache-2.0
"""One tiny checkpoint, its loaded model, and engines over it that differ in their settings."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch

from diffulex.checkpoint.auto_model import load_model
from diffulex.config.config import Config, read_model_facts
from diffulex.engine.engine import Diffulex
from fixtures.checkpoints import CheckpointBuilder, Tensors, tiny_config

#: Random weights give flat distributions; a larger head spreads confidences over (0, 1).
HEAD_SCALE = 6.0


def _scale_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] *= HEAD_SCALE


class TinyModel:
    """Loads once; `engine` builds an engine around the shared weights.

    Args:
        directory: where to write the checkpoint.
        device: of the weights and of the engines.
        dtype: of the weights and of the engines.
        overrides: keys of config.json that differ from those of `tiny_config`.
    """

    def __init__(
        self, directory: Path, device: str, dtype: str = "float32", **overrides: Any
    ) -> None:
        self.directory = directory
        self.device = device
        self.dtype = dtype
        self.hf_config = tiny_config(**overrides)
        self.tensors = CheckpointBuilder(config=self.hf_config, edit=_scale_head).write(directory)
        self.facts = read_model_facts(str(directory), {})
        self.model = load_model(
            self.facts.model_name, self.facts.spec, directory, getattr(torch, dtype), device
        )

    def under(self, model_name: str, **spec: Any) -> TinyModel:
        """The same network decoded as another family: name and description are exchanged."""
        other = copy.copy(self)
        description = dataclasses.replace(self.facts.spec, **spec)
        other.facts = dataclasses.replace(self.facts, model_name=model_name, spec=description)
        return other

    def config(self, **settings: Any) -> Config:
        """A resolved configuration with small limits."""
        defaults: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "max_model_len": 128,
            "max_num_reqs": 8,
            "num_pages": 128,
        }
        return Config.resolve(str(self.directory), self.facts, {**defaults, **settings})

    def engine(self, *, has_tokenizer: bool = True, **settings: Any) -> Diffulex:
        """An engine over the shared weights."""
        tokenizer = self.facts.tokenizer if has_tokenizer else None
        return Diffulex.from_components(self.config(**settings), self.model, tokenizer)
