# SPDX-License-Identifier: Apache-2.0
"""Argument errors of the rewriting acceptance ops and of the filters, real kernels and fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import op_calls

Change = Callable[[Any], Any]


def wider(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], -1)


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], 0)


def value(constant: Any) -> Change:
    return lambda _: constant


_BLOCK_CASES: list[tuple[str, Change, str]] = [
    ("tokens", torch.Tensor.int, "expected dtype int64, got int32"),
    ("tokens", torch.flatten, "expected shape"),
    ("tokens", lambda t: t[:, :0], r"expected blocks of 1 to 1024 positions, got \[2, 0\]"),
    (
        "tokens",
        lambda t: t.repeat(1, 257),
        r"expected blocks of 1 to 1024 positions, got \[2, 1028",
    ),
    ("row_index", torch.Tensor.long, "expected dtype int32, got int64"),
    ("row_index", longer, "expected shape"),
    ("valid_len", longer, "expected shape"),
    ("valid_len", torch.Tensor.long, "expected dtype"),
    ("stats", wider, "expected shape"),
    ("write_ids", torch.Tensor.int, "expected dtype int64, got int32"),
    ("write_ids", longer, "expected shape"),
    ("confidence", torch.Tensor.double, "expected dtype float32, got float64"),
    ("confidence", wider, "expected shape"),
    ("flags", torch.Tensor.long, "expected dtype int32, got int64"),
    ("flags", longer, "expected shape"),
]
_GATED_CASES: list[tuple[str, Change, str]] = [
    ("editable_start", longer, "expected shape"),
    ("gate", torch.Tensor.int, "expected dtype uint8, got int32"),
    ("accept_threshold", torch.Tensor.half, "expected dtype"),
    ("open_steps", torch.Tensor.long, "expected dtype"),
    ("masks_left", longer, "expected shape"),
    ("same_token_ratio", torch.Tensor.double, "expected dtype"),
    ("mask_token_id", value(-1), "expected a value >= 0, got -1"),
]
CASES: list[tuple[str, str, Change, str]] = [
    *[
        (op, *case)
        for op in ("accept_edit", "accept_dmax", "accept_gemma")
        for case in _BLOCK_CASES
    ],
    *[(op, *case) for op in ("accept_edit", "accept_dmax") for case in _GATED_CASES],
    ("accept_edit", "edit_threshold", longer, "expected shape"),
    ("accept_edit", "post_edit_steps", torch.Tensor.long, "expected dtype int32, got int64"),
    ("accept_edit", "max_post_edit_steps", longer, "expected shape"),
    ("accept_edit", "confidence_kind", value(3), "expected"),
    ("accept_dmax", "argmax_ids", torch.Tensor.int, "expected dtype int64, got int32"),
    ("accept_dmax", "argmax_ids", longer, "expected shape"),
    ("accept_dmax", "topk_ids", longer, "expected shape"),
    ("accept_dmax", "topk_probs", value(None), "expected a tensor with topk_ids, got none"),
    ("accept_dmax", "topk_probs", wider, "expected shape"),
    ("accept_dmax", "merge_valid", torch.Tensor.int, "expected dtype uint8, got int32"),
    ("accept_dmax", "merge_ids", value(None), "expected a tensor with merge_valid, got none"),
    ("accept_dmax", "merge_ids", wider, "expected 1 to 2 entries per position .*, got 4"),
    ("accept_dmax", "merge_ids", lambda t: t[..., :0], "expected 1 to 2 entries .*, got 0"),
    ("accept_dmax", "merge_probs", wider, "expected shape"),
    ("accept_dmax", "merge_residual", longer, "expected shape"),
    ("accept_gemma", "prev_argmax", longer, "expected shape"),
    ("accept_gemma", "stable_run", torch.Tensor.long, "expected dtype"),
    ("accept_gemma", "steps_left", longer, "expected shape"),
    ("accept_gemma", "renoise_ids", torch.Tensor.int, "expected dtype"),
    ("accept_gemma", "argmax_ids", longer, "expected shape"),
    ("accept_gemma", "argmax", torch.Tensor.int, "expected dtype"),
    ("accept_gemma", "entropy_bound", value(float("nan")), "expected a number"),
    ("accept_gemma", "stability_threshold", value(-1), "expected a value >= 0, got -1"),
    ("accept_gemma", "confidence_threshold", value(float("nan")), "expected a number"),
    ("sample_filtered", "logits", torch.Tensor.double, "expected dtype"),
    ("sample_filtered", "logits", torch.flatten, "expected shape"),
    ("sample_filtered", "extra_logits", torch.Tensor.half, "expected dtype float32, got float16"),
    ("sample_filtered", "row_index", torch.Tensor.float, "expected dtype"),
    ("sample_filtered", "inv_temperature", torch.Tensor.double, "expected dtype"),
    ("sample_filtered", "uniforms", torch.Tensor.float, "expected dtype float64, got float32"),
    ("sample_filtered", "top_k", torch.Tensor.long, "expected dtype int32, got int64"),
    ("sample_filtered", "top_p", torch.Tensor.half, "expected dtype float32, got float16"),
    ("sample_filtered", "min_p", longer, "expected shape"),
    ("sample_filtered", "forbidden_ids", lambda t: t.repeat(9), "expected at most 8 ids, got 9"),
    ("sample_filtered", "ids", torch.Tensor.int, "expected dtype"),
    ("sample_filtered", "stats", wider, "expected shape"),
    ("sample_filtered", "vocab_limit", value(-2), "expected a value >= -1, got -2"),
    ("sample_filtered", "softcap", value(-1.0), "expected"),
    ("sample_filtered", "exclusion", value(3), "expected"),
    ("sample_filtered", "filter_order", value(2), "expected"),
    ("sample_filtered", "confidence_space", value(2), "expected"),
    ("entropy_bound_mask", "entropy", torch.Tensor.double, "expected dtype float32, got float64"),
    ("entropy_bound_mask", "segments", torch.Tensor.long, "expected dtype int32, got int64"),
    ("entropy_bound_mask", "segments", lambda t: t[:0], "expected at least one offset"),
    ("entropy_bound_mask", "mask", longer, "expected shape"),
    ("entropy_bound_mask", "bound", value(float("nan")), "expected a number"),
]


@pytest.mark.parametrize("where", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("op", "argument", "change", "text"),
    CASES,
    ids=[f"{op}-{argument}-{index}" for index, (op, argument, _, _) in enumerate(CASES)],
)
def test_argument_errors(where: str, op: str, argument: str, change: Change, text: str) -> None:
    tensors, numbers = op_calls.make(op, where)
    before = {name: t.clone() for name, t in tensors.items() if t is not None}
    holder = tensors if argument in tensors else numbers
    holder[argument] = change(holder[argument])
    with pytest.raises(RuntimeError, match=rf"^diffulex::{op}: {argument}: {text}"):
        op_calls.run(op, tensors, numbers)
    if where != "meta":
        for name in op_calls.written(op):
            if name != argument and name in before and name != "workspace":
                assert torch.equal(tensors[name], before[name]), f"{name} was written"


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_an_argmax_of_its_own_needs_the_lists(where: str) -> None:
    tensors, numbers = op_calls.make("accept_dmax", where)
    tensors["topk_ids"] = tensors["topk_probs"] = None
    with pytest.raises(RuntimeError, match="accept_dmax: topk_ids: expected a tensor with argmax"):
        op_calls.run("accept_dmax", tensors, numbers)
