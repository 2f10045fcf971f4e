# SPDX-License-Identifier: Apache-2.0
"""A tiny DiffusionGemma checkpoint, engines over it, and its oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.config.config import Config
from diffulex.config.types import ModelFacts
from diffulex.engine.engine import Diffulex
from fixtures.gemma import GemmaOracle

MAX_MODEL_LEN = 64


class TinyGemma:
    """Loads once; `engine` builds an engine around the shared weights.

    Args:
        text: changes of the text configuration.
    """

    def __init__(self, directory: Path, device: str, dtype: str = "float32", **text: Any) -> None:
        self.oracle = GemmaOracle(**text)
        self.oracle.write(directory)
        self.directory, self.device, self.dtype = directory, device, dtype
        name, spec, info = detect(directory)
        self.facts = ModelFacts(name, directory, spec, info.engine_defaults)
        self.model = load_model(name, spec, directory, getattr(torch, dtype), device)

    def engine(self, **settings: Any) -> Diffulex:
        """An engine without a tokenizer."""
        defaults: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "max_model_len": MAX_MODEL_LEN,
            "num_pages": 64,
            "page_size": 8,
        }
        config = Config.resolve(str(self.directory), self.facts, {**defaults, **settings})
        return Diffulex.from_components(config, self.model, None)

    def denoise(
        self, canvas: list[int], to_encode: list[int] | None, signal: torch.Tensor | None
    ) -> torch.Tensor:
        """One step of the oracle; see `brute_force.canvas.Denoise`."""
        return self.oracle.denoise(canvas, to_encode, signal).float()

    def forget(self) -> None:
        """Empties the oracle's cache for the next request."""
        self.oracle.forget()
