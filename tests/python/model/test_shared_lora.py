# SPDX-License-Identifier: Apache-2.0
"""Adapters on several ranks, merged into the weights or beside them: what one rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.distributed.shard import ONE_RANK, Shard
from diffulex.errors import CheckpointError
from fixtures.adapters import LLADA_TARGETS, QWEN_TARGETS, AdapterBuilder
from fixtures.families import family_builder
from fixtures.moe_families import moe_builder
from fixtures.paged_batch import PagedRunner, Rows
from fixtures.thread_comm import ThreadComm, run_ranks

MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = {
    "sdar": (*QWEN_TARGETS, *MLP),
    "dream": (*QWEN_TARGETS, *MLP),  # with biases
    "llada": (*LLADA_TARGETS, "ff_proj", "up_proj"),
    "llada2": ("query_key_value", "dense"),  # one tensor for q, k and v
}


def write(family: str, root: Path, targets: tuple[str, ...]) -> tuple[Path, Path]:
    builder = moe_builder(family) if family == "llada2" else family_builder(family)
    base = builder.write(root / "base")
    AdapterBuilder(targets).write(root / "adapter", base)
    return root / "base", root / "adapter"


def logits_of(model: Any) -> torch.Tensor:
    runner = PagedRunner(model, 4)
    tokens = torch.randint(0, 250, (16,), generator=torch.Generator().manual_seed(2)).tolist()
    return runner.forward([Rows(runner.sequence(tokens), 16, should_store=False)])[0]


@pytest.mark.every(3)
@pytest.mark.parametrize("is_merged", [True, False], ids=["merged", "beside"])
@pytest.mark.parametrize("family", TARGETS)
def test_ranks_compute_what_one_computes(tmp_path: Path, family: str, is_merged: bool) -> None:
    base, adapter = write(family, tmp_path, TARGETS[family])
    name, spec, _ = detect(base, family)

    def load(shard: Shard, path: Path | None = adapter) -> Any:
        options = {"lora_path": path, "merge_lora": is_merged, "shard": shard}
        return load_model(name, spec, base, torch.float32, "cpu", **options)

    expected = logits_of(load(ONE_RANK))
    assert (expected - logits_of(load(ONE_RANK, None))).abs().max() > 0.05

    def work(comm: ThreadComm) -> torch.Tensor:
        model = load(Shard(comm.rank, comm.size))
        model.comm = comm
        widths = torch.empty(comm.size, 1, 1, dtype=torch.int32)
        comm.gather_records(torch.tensor([[len(model.vocabulary)]], dtype=torch.int32), widths)
        return comm.gather_columns(logits_of(model), tuple(widths.flatten().tolist()))

    for actual in run_ranks(2, work):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def test_merged_weights_are_cut_from_those_of_one_rank(tmp_path: Path) -> None:
    base, adapter = write("sdar", tmp_path, TARGETS["sdar"])
    name, spec, _ = detect(base)
    options: dict[str, Any] = {"lora_path": adapter, "merge_lora": True}
    whole: Any = load_model(name, spec, base, torch.float32, "cpu", **options)
    tables = []
    for rank in range(2):
        part: Any = load_model(
            name, spec, base, torch.float32, "cpu", shard=Shard(rank, 2), **options
        )
        tables.append(part.weight_table())
    prefix = spec.names.layer.format(1)
    for key, dim in ((spec.names.q, 0), (spec.names.o, 1), (spec.names.down, 1)):
        joined = torch.cat([table[f"{prefix}{key}.weight"] for table in tables], dim)
        assert torch.equal(joined, whole.weight_table()[f"{prefix}{key}.weight"])


def test_misshapen_factors_are_compared_with_the_whole(tmp_path: Path) -> None:
    base, adapter = write("sdar", tmp_path, ("q_proj",))

    def narrow(stored: dict[str, torch.Tensor]) -> None:
        for key in stored:
            if "lora_B" in key:  # as if a rank's part were all
                stored[key] = stored[key][: stored[key].size(0) // 2].clone()

    stored_base = family_builder("sdar").write(tmp_path / "again")
    AdapterBuilder(("q_proj",), edit=narrow).write(adapter, stored_base)
    name, spec, _ = detect(base)
    with pytest.raises(CheckpointError, match=r"expected a product of shape \[\d+, \d+\], got"):
        load_model(name, spec, base, torch.float32, "cpu", lora_path=adapter, shard=Shard(0, 2))
