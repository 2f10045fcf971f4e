# SPDX-License-Identifier: Apache-2.0
"""Every documented argument error of the expert ops, from the kernels and from the fakes alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import op_calls

Change = Callable[[Any], Any]


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half()


def long(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.long()


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def narrower(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :-1].contiguous()


def value(constant: Any) -> Change:
    return lambda _: constant


def scale(_: Any) -> torch.Tensor:
    return torch.ones(5)


# op, argument to change, change, what the message has to say after the argument
CASES: list[tuple[str, str, Change, str]] = [
    ("moe_permute", "topk_ids", long, "expected dtype int32, got int64"),
    ("moe_permute", "topk_ids", torch.flatten, "expected shape"),
    ("moe_permute", "expert_map", long, "expected dtype int32, got int64"),
    ("moe_permute", "sorted_slots", shorter, "expected shape"),
    ("moe_permute", "expert_offsets", shorter, "expected shape"),
    ("moe_permute", "tile_expert", lambda t: t[:3], "expected at least 6 entries"),
    ("moe_permute", "tile_start", shorter, "expected shape"),
    ("moe_permute", "counters", shorter, "expected at least 2 entries"),
    ("moe_permute", "num_local_experts", value(0), "expected 1 to 4096 local experts, got 0"),
    ("moe_permute", "tile", value(0), "expected a value >= 1, got 0"),
    ("fused_moe", "x", torch.Tensor.double, "expected dtype"),
    ("fused_moe", "x", narrower, "expected an even last dimension >= 2"),
    ("fused_moe", "w13", half, "expected dtype float32, got float16"),
    ("fused_moe", "w13", narrower, "expected shape"),
    ("fused_moe", "w13", lambda w: w[:, :-1], "expected gate and up rows of an even expert width"),
    ("fused_moe", "w2", half, "expected dtype float32, got float16"),
    ("fused_moe", "w2", shorter, "expected shape"),
    ("fused_moe", "w2", narrower, "expected shape"),
    ("fused_moe", "topk_weights", half, "expected dtype float32"),
    ("fused_moe", "topk_weights", narrower, "expected shape"),
    ("fused_moe", "topk_ids", long, "expected dtype int32"),
    ("fused_moe", "topk_ids", shorter, "expected shape"),
    ("fused_moe", "w13_scale", scale, r"expected none \(quantised experts are not supported\)"),
    ("fused_moe", "w2_scale", scale, r"expected none \(quantised experts are not supported\)"),
    ("fused_moe", "addend", half, "expected dtype float32"),
    ("fused_moe", "addend", shorter, "expected shape"),
    ("fused_moe", "out", half, "expected dtype float32"),
    ("fused_moe", "out", shorter, "expected shape"),
    ("fused_moe", "act", value(3), "expected 0"),
    ("fused_moe", "weight_on_input", value(True), "expected false unless K is 1, got K = 2"),
    ("fused_experts_packed", "x", narrower, "expected an even last dimension >= 2"),
    ("fused_experts_packed", "w13", half, "expected dtype float32"),
    ("fused_experts_packed", "w2", shorter, "expected shape"),
    ("fused_experts_packed", "expert_offsets", shorter, "expected shape"),
    ("fused_experts_packed", "expert_offsets", long, "expected dtype int32"),
    ("fused_experts_packed", "row_weights", shorter, "expected shape"),
    ("fused_experts_packed", "w13_scale", scale, "expected none"),
    ("fused_experts_packed", "out", shorter, "expected"),
    ("fused_experts_packed", "rows_per_expert", value(-1), "expected a value >= 0, got -1"),
    ("fused_experts_packed", "rows_per_expert", value(2), "expected shape"),
    ("moe_combine", "slot_out", shorter, "expected shape"),
    ("moe_combine", "topk_weights", narrower, "expected shape"),
    ("moe_combine", "topk_ids", long, "expected dtype int32"),
    ("moe_combine", "addend", narrower, "expected shape"),
    ("moe_combine", "out", half, "expected dtype float32"),
]


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize(("op", "argument", "change", "message"), CASES)
def test_argument_errors(op: str, argument: str, change: Change, message: str, where: str) -> None:
    tensors, numbers = op_calls.make(op, where)
    target = tensors if argument in tensors else numbers
    changed = change(target[argument])
    target[argument] = changed.to(where) if isinstance(changed, torch.Tensor) else changed
    # With rows per expert it is the form of x that is wrong.
    name = "(rows_per_expert|x)" if argument == "rows_per_expert" else argument
    with pytest.raises(RuntimeError, match=f"^diffulex::{op}: {name}: .*{message}"):
        op_calls.run(op, tensors, numbers)


@pytest.mark.parametrize("op", ["fused_moe", "fused_experts_packed", "moe_combine"])
def test_out_must_have_memory_of_its_own(op: str) -> None:
    tensors, numbers = op_calls.make(op, "cpu")
    if op == "moe_combine":
        tensors["out"] = tensors["addend"]
    else:
        tensors["out"] = tensors["x"]
    with pytest.raises(RuntimeError, match=f"^diffulex::{op}: out: expected memory of its own"):
        op_calls.run(op, tensors, numbers)


def _expect_data_error(op: str, argument: str, index: int, bad: int, message: str) -> None:
    tensors, numbers = op_calls.make(op, "cpu")
    written = {name: tensors[name].clone() for name in op_calls.written(op)}
    tensors[argument].view(-1)[index] = bad
    with pytest.raises(RuntimeError, match=message):
        op_calls.run(op, tensors, numbers)
    for name, before in written.items():
        if name != "workspace":
            assert torch.equal(tensors[name], before), "nothing is written before the check"


@pytest.mark.parametrize("op", ["moe_permute", "fused_moe"])
def test_ids_are_checked_on_the_cpu(op: str) -> None:
    message = rf"^diffulex::{op}: topk_ids\[3\]: expected an expert below 8, got 8"
    _expect_data_error(op, "topk_ids", 3, 8, message)
    message = rf"^diffulex::{op}: expert_map\[1\]: expected a local expert below 5, got 5"
    _expect_data_error(op, "expert_map", 1, 5, message)


def test_offsets_are_checked_on_the_cpu() -> None:
    where = r"^diffulex::fused_experts_packed: expert_offsets"
    _expect_data_error("fused_experts_packed", "expert_offsets", 0, 1, rf"{where}\[0\]: expected 0")
    _expect_data_error("fused_experts_packed", "expert_offsets", 3, 1, rf"{where}\[3\]: expected")
    _expect_data_error(
        "fused_experts_packed", "expert_offsets", 5, 7, rf"{where}\[5\]: .* at most 6"
    )


@pytest.mark.parametrize("bad", [-1, 10])
def test_counts_are_checked_on_the_cpu(bad: int) -> None:
    from diffulex import ops

    counts = torch.tensor([1, bad, 0], dtype=torch.int32)
    x, w13, w2 = torch.ones(3, 9, 4), torch.ones(3, 8, 4), torch.ones(3, 4, 4)
    message = rf"expert_offsets\[1\]: expected a count in \[0, 9\], got {bad}"
    with pytest.raises(RuntimeError, match=message):
        ops.fused_experts_packed(x, w13, w2, counts, rows_per_expert=9)


@pytest.mark.cuda
def test_wrong_data_is_skipped_on_cuda() -> None:
    """Ids and map entries outside their range mean no expert; offsets are clamped."""
    from diffulex import ops

    x = torch.randn(6, 16, device="cuda")
    w13 = torch.randn(3, 16, 16, device="cuda")
    w2 = torch.randn(3, 16, 8, device="cuda")
    weights = torch.ones(6, 2, device="cuda")
    ids = torch.tensor([[0, 99], [3, 1], [-7, 2], [1, 0], [2, 2], [1 << 30, -1]]).int().cuda()
    legal = torch.where(ids < 3, ids, -1)
    assert torch.equal(
        ops.fused_moe(x, w13, w2, weights, ids), ops.fused_moe(x, w13, w2, weights, legal)
    )
    expert_map = torch.tensor([0, 7, 2], dtype=torch.int32, device="cuda")
    clean_map = torch.tensor([0, -1, 2], dtype=torch.int32, device="cuda")
    assert torch.equal(
        ops.fused_moe(x, w13, w2, weights, legal, expert_map=expert_map),
        ops.fused_moe(x, w13, w2, weights, legal, expert_map=clean_map),
    )
    offsets = torch.tensor([0, 2, 4, 600], dtype=torch.int32, device="cuda")
    inside = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device="cuda")
    assert torch.equal(
        ops.fused_experts_packed(x, w13, w2, offsets), ops.fused_experts_packed(x, w13, w2, inside)
    )
