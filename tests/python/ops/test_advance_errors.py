# SPDX-License-Identifier: Apache-2.0
"""Arrays of `advance_decode` that exclude each other, and numbers out of range."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import decode_calls
import op_calls
from decode_calls import B, N, R, T

_MERGES = ("merge_valid", "merge_ids", "merge_probs", "merge_residual")
_OPTIONAL = (
    *_MERGES,
    *(f"row_{name}" for name in ("merge_mask", "merge_ids", "merge_probs", "merge_residual")),
    "last_row_index",
    "logits_source",
)
INT32_MAX = torch.iinfo(torch.int32).max

devices = pytest.mark.parametrize(
    "device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.cuda)]
)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def dual_cache() -> dict[str, torch.Tensor]:
    return {
        "seed_row": ints(R),
        "mask_kinds": ints(R),
        "pending_next_token": torch.zeros(R, dtype=torch.int64),
    }


def canvas() -> dict[str, torch.Tensor]:
    """Arrays of one canvas for each request."""
    wide = torch.zeros(R * N, B, dtype=torch.int64)
    return {
        "mask_kinds": ints(R),
        "prev_argmax": wide,
        "canvas_argmax": wide.clone(),
        "renoise_ids": wide.clone(),
        "stable_run": ints(R * N),
        "steps_left": ints(R * N),
        "block_slot": ints(R * N),
        "row_pass_kind": torch.zeros(T, dtype=torch.uint8),
        "row_self_cond": ints(T),
    }


def call(device: str, extra: dict[str, torch.Tensor], *kept: str) -> Any:
    """The legal call without the arrays of merges and shifted logits but those `kept`."""
    tensors, numbers = decode_calls.advance_decode()
    tensors.update({name: None for name in _OPTIONAL if name not in kept})
    tensors.update(extra)
    return {k: None if t is None else t.to(device) for k, t in tensors.items()}, numbers


@devices
@pytest.mark.parametrize("name", ["merge_valid", "last_row_index", "mask_kinds", "prev_argmax"])
def test_a_dual_cache_has_no_other_arrays(device: str, name: str) -> None:
    extra = dual_cache()
    kept = {"merge_valid": _OPTIONAL[:8], "last_row_index": _OPTIONAL[8:]}.get(name, ())
    if name == "mask_kinds":
        del extra[name]
    if name == "prev_argmax":
        extra |= canvas()
    tensors, numbers = call(device, extra, *kept)
    with pytest.raises(RuntimeError, match=rf"^diffulex::advance_decode: {name}: expected"):
        op_calls.run("advance_decode", tensors, numbers)


@devices
@pytest.mark.parametrize("name", ["merge_valid", "last_row_index", "mask_kinds", "tokens"])
def test_a_canvas_has_no_other_arrays_and_one_block(device: str, name: str) -> None:
    """The call has two blocks for each request, which is what is blamed last."""
    extra = canvas()
    kept = {"merge_valid": _OPTIONAL[:8], "last_row_index": _OPTIONAL[8:]}.get(name, ())
    if name == "mask_kinds":
        extra = {name: extra[name]}
    tensors, numbers = call(device, extra, *kept)
    with pytest.raises(RuntimeError, match=rf"^diffulex::advance_decode: {name}: expected"):
        op_calls.run("advance_decode", tensors, numbers)


@devices
@pytest.mark.parametrize("first", [T - 1, INT32_MAX - R + 1, INT32_MAX])
def test_rows_of_slots_are_behind_the_others_and_have_indices(device: str, first: int) -> None:
    tensors, numbers = call(device, {}, *_OPTIONAL)
    numbers["first_saved_row"] = first
    match = rf"^diffulex::advance_decode: first_saved_row: expected {T} to {INT32_MAX - R}, got"
    with pytest.raises(RuntimeError, match=match):
        op_calls.run("advance_decode", tensors, numbers)


def test_requests_without_a_slot() -> None:
    """Where something is kept for it; nothing is written then."""
    tensors, numbers = call("cpu", {}, *_OPTIONAL)
    tensors["requests"][1] = no_slot(tensors["requests"][1])
    before = tensors["input_ids"].clone()
    match = r"^diffulex::advance_decode: requests: expected a slot of 0 to \d+, got -1 in request 1"
    with pytest.raises(RuntimeError, match=match):
        op_calls.run("advance_decode", tensors, numbers)
    assert torch.equal(tensors["input_ids"], before)
    tensors.update(dict.fromkeys(_OPTIONAL))
    op_calls.run("advance_decode", tensors, numbers)


def no_slot(request: torch.Tensor) -> torch.Tensor:
    """The bytes of a request with slot -1: the field in front of carry_pos, the last one that is -1."""
    words = request.clone().view(torch.int32)
    (places,) = torch.where(words == -1)
    words[int(places[-1]) - 1] = -1
    return words.view(torch.uint8)
