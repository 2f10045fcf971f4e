# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma on several ranks: together they compute what one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.distributed.shard import ExpertShard, Shard
from fixtures.gemma import CANVAS, GemmaOracle
from fixtures.paged_batch import CAUSAL, FULL, PagedRunner, Rows
from fixtures.thread_comm import ThreadComm, run_ranks

PROMPT = [7, 50, 3, 21, 80, 9, 33, 60, 12, 4]
DRAFT = [5, 66, 17, 90, 2, 41]
DECODER = 1


def cut(size: int, mode: str) -> list[Shard]:
    return [Shard(rank, size, ExpertShard(rank, size, mode)) for rank in range(size)]


def alone(size: int) -> list[Shard]:
    """Ranks that share the experts and nothing else."""
    return [Shard(0, 1, ExpertShard(rank, size, "expert")) for rank in range(size)]


def canvas_logits(model: Any) -> list[torch.Tensor]:
    """Of a canvas without a signal, and of one with some."""
    runner = PagedRunner(model, CANVAS)
    sequence = runner.sequence([*PROMPT, *DRAFT])
    runner.forward([Rows(sequence, len(PROMPT), should_store=True, mask_kind=CAUSAL)])
    generator = torch.Generator().manual_seed(1)
    signals = torch.randn(CANVAS, model.spec.hidden_size, generator=generator)
    found = []
    for first in (-1, 0):
        rows = Rows(
            sequence, len(PROMPT) + CANVAS, should_store=False, tokens=DRAFT, mask_kind=FULL
        )
        found += runner.forward(
            [rows],
            row_pass_kind=torch.full((CANVAS,), DECODER, dtype=torch.uint8),
            row_self_cond=torch.arange(CANVAS, dtype=torch.int32)
            if first == 0
            else torch.full((CANVAS,), -1, dtype=torch.int32),
            self_cond=signals,
        )
    return found


@pytest.mark.parametrize(
    "shards",
    [cut(2, "width"), cut(2, "expert"), cut(4, "expert"), alone(3)],
    ids=["width", "expert", "one KV head on four ranks", "experts alone"],
)
def test_canvas_of_all_ranks(tmp_path: Path, shards: list[Shard]) -> None:
    GemmaOracle(moe_intermediate_size=32).write(tmp_path)
    name, spec, _ = detect(tmp_path)
    expected = canvas_logits(load_model(name, spec, tmp_path, torch.float32, "cpu"))
    assert (expected[0] - expected[1]).abs().max() > 0.01

    def work(comm: ThreadComm) -> list[torch.Tensor]:
        shard = shards[comm.rank]
        model: Any = load_model(name, spec, tmp_path, torch.float32, "cpu", shard=shard)
        model.comm = comm
        logits = canvas_logits(model)
        if shard.size == 1:
            return logits
        widths = torch.empty(comm.size, 1, 1, dtype=torch.int32)
        comm.gather_records(torch.tensor([[len(model.vocabulary)]], dtype=torch.int32), widths)
        assert max(part.size(1) for part in logits) < spec.vocab_size
        return [comm.gather_columns(part, tuple(widths.flatten().tolist())) for part in logits]

    for result in run_ranks(len(shards), work):
        for actual, other in zip(result, expected, strict=True):
            torch.testing.assert_close(actual, other, atol=2e-5, rtol=1e-5)
