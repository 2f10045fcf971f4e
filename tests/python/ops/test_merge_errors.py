# SPDX-License-Identifier: Apache-2.0
"""Argument errors of the embedding mixes, from the real kernels and from the fakes alike."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import merge_calls
import op_calls

NAN = float("nan")


def wider(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], -1)


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], 0)


def value(constant: Any) -> Callable[[Any], Any]:
    return lambda _: constant


CASES: list[tuple[str, str, Callable[[Any], Any], str]] = [
    ("token_merge_embed", "hidden", torch.Tensor.double, "expected dtype"),
    ("token_merge_embed", "hidden", torch.flatten, "expected shape"),
    ("token_merge_embed", "embedding", torch.Tensor.half, "expected dtype float32, got float16"),
    ("token_merge_embed", "embedding", wider, "expected shape"),
    ("token_merge_embed", "merge_mask", torch.Tensor.int, "expected dtype uint8"),
    ("token_merge_embed", "merge_mask", longer, "expected shape"),
    ("token_merge_embed", "topk_ids", torch.Tensor.int, "expected dtype int64, got int32"),
    ("token_merge_embed", "topk_ids", longer, "expected shape"),
    ("token_merge_embed", "topk_ids", lambda t: t[:, :0], "expected 1 to 16 columns, got 0"),
    ("token_merge_embed", "topk_ids", lambda t: t.repeat(1, 9), "expected 1 to 16 columns, got 18"),
    ("token_merge_embed", "topk_probs", torch.Tensor.double, "expected dtype float32, got float64"),
    ("token_merge_embed", "topk_probs", wider, "expected shape"),
    ("token_merge_embed", "residual_probs", lambda t: t[:, None], "expected shape"),
    ("token_merge_embed", "mask_token_id", value(-1), "expected a value"),
    ("token_merge_embed", "mask_token_id", value(40), r"expected a value in \[0, 40\), got 40"),
    ("token_merge_embed", "merge_kind", value(2), "expected 0 or 1, got 2"),
    ("token_merge_embed", "weight", value(NAN), "expected a finite number"),
    ("token_merge_partial", "embedding", torch.Tensor.long, "expected dtype"),
    ("token_merge_partial", "partial", torch.Tensor.half, "expected dtype float32, got float16"),
    ("token_merge_partial", "partial", lambda t: t[:, 1:].contiguous(), "expected shape"),
    ("token_merge_partial", "merge_mask", longer, "expected shape"),
    ("token_merge_partial", "vocab_start", value(-1), "expected a value >= 0, got -1"),
    ("token_merge_partial", "mask_token_id", value(-2), "expected a value >= 0, got -2"),
    ("token_merge_partial", "merge_kind", value(-1), "expected 0 or 1, got -1"),
    ("token_merge_finalize", "partial", torch.Tensor.double, "expected dtype float32, got float64"),
    ("token_merge_finalize", "partial", longer, "expected shape"),
    ("token_merge_finalize", "merge_mask", torch.Tensor.long, "expected dtype uint8"),
    ("token_merge_finalize", "hidden", torch.Tensor.int, "expected dtype"),
    ("token_merge_finalize", "merge_kind", value(3), "expected 0 or 1, got 3"),
    ("token_merge_finalize", "weight", value(float("inf")), "expected a finite number"),
    ("soft_probabilities", "logits", torch.flatten, "expected shape"),
    ("soft_probabilities", "lse", longer, "expected shape"),
    ("soft_probabilities", "inv_temperature", longer, "expected shape"),
    ("soft_probabilities", "row_valid", torch.Tensor.float, "expected dtype uint8"),
    ("soft_probabilities", "out", torch.Tensor.int, "expected dtype"),
    ("soft_probabilities", "out", wider, "expected shape"),
    ("soft_probabilities", "softcap", value(-1.0), "expected a finite number >= 0"),
    ("soft_probabilities", "vocab_limit", value(-2), "expected a value >= -1, got -2"),
    ("soft_probabilities", "vocab_start", value(-1), "expected a value >= 0, got -1"),
    ("soft_embedding", "logits", torch.flatten, "expected shape"),
    ("soft_embedding", "logits", torch.Tensor.double, "expected dtype"),
    ("soft_embedding", "lse", longer, "expected shape"),
    ("soft_embedding", "lse", torch.Tensor.half, "expected dtype float32, got float16"),
    ("soft_embedding", "inv_temperature", longer, "expected shape"),
    ("soft_embedding", "inv_temperature", torch.Tensor.double, "expected dtype float32"),
    ("soft_embedding", "embedding", longer, "expected shape"),
    ("soft_embedding", "embedding", torch.Tensor.int, "expected dtype"),
    ("soft_embedding", "row_valid", longer, "expected shape"),
    ("soft_embedding", "row_valid", torch.Tensor.float, "expected dtype uint8"),
    ("soft_embedding", "out", torch.Tensor.half, "expected dtype float32, got float16"),
    ("soft_embedding", "out", wider, "expected shape"),
    ("soft_embedding", "normalizer", value(NAN), "expected a finite number"),
    ("soft_embedding", "softcap", value(-1.0), "expected a finite number >= 0"),
    ("soft_embedding", "vocab_limit", value(-2), "expected a value >= -1, got -2"),
    ("soft_embedding", "vocab_start", value(-1), "expected a value >= 0, got -1"),
]


@pytest.mark.parametrize(("op", "argument", "change", "text"), CASES)
@pytest.mark.parametrize("where", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_argument_errors(
    where: str, op: str, argument: str, change: Callable[[Any], Any], text: str
) -> None:
    tensors, numbers = op_calls.make(op, where)
    holder = tensors if argument in tensors else numbers
    holder[argument] = change(holder[argument])
    with pytest.raises(RuntimeError, match=rf"^diffulex::{op}: {argument}: {text}"):
        op_calls.run(op, tensors, numbers)


@pytest.mark.parametrize("op", sorted(merge_calls.CALLS))
def test_empty_inputs_are_legal(device: str, op: str) -> None:
    tensors, numbers = op_calls.make(op, device)
    for name, tensor in tensors.items():
        if tensor is not None and name not in ("embedding", "workspace"):
            tensors[name] = tensor[:0]
    op_calls.run(op, tensors, numbers)


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        ("token_merge_embed", "hidden"),
        ("token_merge_embed", "embedding"),
        ("token_merge_partial", "partial"),
        ("token_merge_finalize", "hidden"),
        ("soft_probabilities", "logits"),
        ("soft_probabilities", "out"),
        ("soft_embedding", "logits"),
        ("soft_embedding", "embedding"),
        ("soft_embedding", "out"),
    ],
)
def test_last_dimension_has_to_be_contiguous(device: str, op: str, argument: str) -> None:
    tensors, numbers = op_calls.make(op, device)
    tensor = tensors[argument]
    spaced = torch.empty(*tensor.shape, 2, dtype=tensor.dtype, device=device)[..., 0]
    tensors[argument] = spaced.copy_(tensor)
    with pytest.raises(RuntimeError, match=rf"^diffulex::{op}: {argument}: expected .*contiguous"):
        op_calls.run(op, tensors, numbers)


CHECKED = """
import torch
from diffulex import ops
table = torch.zeros(4, 8, device="cuda")
ops.token_merge_embed(
    torch.zeros(1, 8, device="cuda"), table, torch.ones(1, dtype=torch.uint8, device="cuda"),
    torch.tensor([[4]], device="cuda"), torch.ones(1, 1, device="cuda"),
    torch.zeros(1, device="cuda"), mask_token_id=0)
torch.cuda.synchronize()
"""


@pytest.mark.cuda
@pytest.mark.parametrize("switch", ["0", "1"])
def test_ids_are_checked_on_request(switch: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECKED],
        env={**os.environ, "DIFFULEX_CHECK": switch},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == int(switch), done.stderr
    if switch == "1":
        assert "RuntimeError: diffulex::token_merge_embed: topk_ids: expected" in done.stderr
