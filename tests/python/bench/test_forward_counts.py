# SPDX-License-Identifier: Apache-2.0
"""Forwards that trained checkpoints need on held-out problems: regressions cost speed, not tokens."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import diffulex
from diffulex import SamplingParams
from diffulex.bench.evaluate import read_problems

ZOO = Path(__file__).resolve().parents[3] / "examples" / "zoo"
NUM_PROMPTS = 8


def decode_aligned(model: str, **settings: Any) -> list[Any]:
    """Outputs for held-out questions whose prompts are whole blocks."""
    with diffulex.Diffulex(model=model, device="cpu", max_model_len=256, **settings) as engine:
        tokenizer, block = engine.tokenizer, engine.config.decoding.block_size
        assert tokenizer is not None
        prompts = (
            tokenizer.apply_chat_template([{"role": "user", "content": problem.question}])
            for problem in read_problems(ZOO / "heldout.jsonl")
        )
        aligned = list(islice((ids for ids in prompts if len(ids) % block == 0), NUM_PROMPTS))
        assert len(aligned) == NUM_PROMPTS
        return list(engine.generate(aligned, SamplingParams(), summary=False))


# With a forward of its own for the prompt the means are 4.1, 4.1, 3.9 and 3.
@pytest.mark.parametrize(
    ("model", "settings", "most"),
    [
        (str(ZOO / "d2f_llada"), {"d2f_block_grid": False}, 3.6),
        (str(ZOO / "d2f_llada"), {"d2f_block_grid": True}, 3.6),
        ("demo", {"buffer_size": 4}, 3.4),
        (str(ZOO / "edit_llada2"), {"buffer_size": 1}, 2.5),
    ],
)
def test_prompt_and_first_block_share_a_forward(
    model: str, settings: dict[str, Any], most: float
) -> None:
    outputs = decode_aligned(model, **settings)
    assert all(output.metrics.new_tokens_per_step[0] > 0 for output in outputs)
    assert sum(output.metrics.nfe for output in outputs) / NUM_PROMPTS <= most
