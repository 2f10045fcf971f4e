# SPDX-License-Identifier: Apache-2.0
"""The small vocabulary of the published vectors, and one step over it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diffulex.config.config import Config
from diffulex.config.types import ModelFacts
from diffulex.families.spec import ModelSpec
from diffulex.samplers.inputs import SamplerInputs
from diffulex.samplers.selection import make_sampler

VOCAB, BLOCK, MASK = 8, 4, 7
R0 = (0.02, 0.92, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01)
R1 = (0.05, 0.10, 0.60, 0.05, 0.05, 0.05, 0.05, 0.05)
R2 = (0.005, 0.005, 0.005, 0.96, 0.005, 0.005, 0.005, 0.01)
R3 = (0.05, 0.05, 0.05, 0.05, 0.25, 0.10, 0.05, 0.40)
CARRY = (0.9, 0.02, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01)

COMMITTABLE, SAME, CONFIDENT, PROGRESSED = 1, 2, 4, 8
TIMED_OUT, BAD, SKIPPED, CONVERGED = 16, 32, 64, 128


def config_of(model_name: str, device: str = "cpu", **settings: Any) -> Config:
    """A resolved configuration of a family with eight tokens."""
    spec = ModelSpec(
        model_name, VOCAB, 8, 8, 1, 1, 1, 8, 64, 1e-6, 1e4, 8, block_size=BLOCK, mask_token_id=MASK
    )
    facts = ModelFacts(model_name, Path("/x"), spec, {}, tokenizer_vocab_size=VOCAB)
    values = {"block_size": BLOCK, "page_size": 4, "max_model_len": 32, **settings}
    return Config.resolve("x", facts, {"device": device, **values})


def sampler_of(model_name: str, device: str = "cpu", **settings: Any) -> Any:
    """The sampler that the configuration selects."""
    return make_sampler(config_of(model_name, device, **settings))


def logits_of(*rows: tuple[float, ...], device: str = "cpu") -> torch.Tensor:
    """Logits whose softmax has the given values."""
    return torch.tensor([[math.log(p) for p in row] for row in rows], device=device)


@dataclass
class Step:
    """Inputs of one block and what the sampler wrote."""

    logits: torch.Tensor
    tokens: list[int]
    rows: list[int]
    threshold: float = 0.9
    gate: int = 1
    editable_start: int = 0
    open_steps: int = 0
    total_steps: int = 1
    temperature: float = 0.0
    uniforms: list[float] | None = None
    parts: dict[str, Any] = field(default_factory=dict)

    def run(self, sampler: Any) -> Step:
        """Calls the sampler."""
        device, count = self.logits.device, self.logits.size(0)

        def tensor(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        is_sampled = self.temperature > 0
        inverse = torch.full((count,), 1 / self.temperature, device=device) if is_sampled else None
        self.inputs = SamplerInputs(
            logits=self.logits,
            inv_temperature=inverse,
            uniforms=tensor(self.uniforms or [0.5] * count, torch.float64) if is_sampled else None,
            tokens=tensor([self.tokens], torch.int64),
            row_index=tensor([self.rows]),
            editable_start=tensor([self.editable_start]),
            valid_len=tensor([BLOCK]),
            gate=tensor([self.gate], torch.uint8),
            accept_threshold=tensor([self.threshold], torch.float32),
            open_steps=tensor([self.open_steps]),
            total_steps=tensor([self.total_steps]),
            write_ids=tensor([[-2] * BLOCK], torch.int64),
            confidence=tensor([[0.0] * BLOCK], torch.float32),
            masks_left=tensor([-1]),
            flags=tensor([0]),
            same_token_ratio=tensor([-1.0], torch.float32),
            **self.parts,
        )
        sampler(self.inputs)
        return self

    @property
    def writes(self) -> dict[int, int]:
        """Position -> token of what changed."""
        ids = self.inputs.write_ids[0].tolist()
        return {i: token for i, token in enumerate(ids) if token >= 0}

    @property
    def flags(self) -> int:
        """Flags of the block."""
        return int(self.inputs.flags[0])

    @property
    def ratio(self) -> float:
        """same_token_ratio of the block."""
        assert self.inputs.same_token_ratio is not None
        return float(self.inputs.same_token_ratio[0])
