# SPDX-License-Identifier: Apache-2.0
"""`advance_decode` with packed rows says what it says with whole ones, at other places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import decode_calls
import op_calls
from decode_calls import MASK, B, N, R
from diffulex.runner.batch import ArenaViews
from diffulex_ext import _core

Q = B * N
kernels = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"logits_shift": True},
    {"strategy": "d2f"},
    {"strategy": "dmax", "token_merge_top_k": 2},
]
#: Arrays of rows, which packed ones have at other places.
ROWS = ("input_ids", "positions", "slot_mapping")
MERGES = ("merge_mask", "merge_topk_ids", "merge_topk_probs", "merge_residual")
ENTRIES = ("row_inv_temperature", "row_uniforms", "row_top_k", "row_top_p", "row_min_p")
BLOCKS = (
    *("blk_tokens", "blk_editable_start", "blk_valid_len", "blk_force_top1", "blk_open_steps"),
    *("blk_accept_threshold", "blk_total_steps", "blk_post_edit_steps"),
)
POISON = 0xA5

Arrays = dict[str, np.ndarray[Any, Any]]


def arrays_of(kind: Any, options: dict[str, Any], memory: torch.Tensor) -> Arrays:
    obj = decode_calls.arena(kind, decode_calls.options(**options))[0]
    views = ArenaViews(memory, obj.fields())
    return {field.name: getattr(views, field.name).numpy().copy() for field in obj.fields()}


def advanced(
    device: str, options: dict[str, Any], *, packs_rows: bool, is_entry: bool
) -> tuple[Arrays, Arrays, torch.Tensor]:
    """The arrays of plan and batch after a call over poisoned plans, and the bytes of the plan."""
    tensors, numbers = decode_calls.advance_decode(**options)
    plan = decode_calls.arena(_core.StepPlan, decode_calls.options(**options))[0]
    for field in plan.fields():
        if field.name != "page_tables" and not (is_entry and field.name in MERGES):
            tensors["plan"][field.offset : field.offset + field.nbytes] = POISON
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    op_calls.run(
        "advance_decode", tensors, numbers | {"packs_rows": packs_rows, "is_entry": is_entry}
    )
    plan_memory, batch_memory = tensors["plan"].cpu(), tensors["batch"].cpu()
    aligned = decode_calls.arena(_core.StepPlan, decode_calls.options(**options))[1]
    aligned.copy_(plan_memory)
    return (
        arrays_of(_core.StepPlan, options, aligned),
        arrays_of(_core.DecodeBatch, options, batch_memory),
        aligned,
    )


@kernels
@pytest.mark.parametrize("is_entry", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_rows_are_those_of_whole_ones(
    device: str, options: dict[str, Any], is_entry: bool
) -> None:
    whole, _, _ = advanced(device, options, packs_rows=False, is_entry=is_entry)
    packed, batch, _ = advanced(device, options, packs_rows=True, is_entry=is_entry)
    is_shifted, has_merges = "logits_shift" in options, "token_merge_top_k" in options
    num_rows = whole["valid_slices"][:R] - np.arange(R) * Q
    ends = np.concatenate([[0], np.cumsum(num_rows)])
    assert 0 < ends[-1] < R * Q  # there are void rows, and a request that does not run
    assert num_rows[R - 1] == 0
    assert packed["cu_seqlens_q"][: R + 1].tolist() == ends.tolist()
    assert packed["valid_slices"][:R].tolist() == ends[1:].tolist()
    assert batch["num_rows"].tolist() == num_rows.tolist()
    assert packed["context_lens"][:R].tolist() == whole["context_lens"][:R].tolist()
    for name in BLOCKS:
        np.testing.assert_array_equal(packed[name][: R * N], whole[name][: R * N], name)
    merges = MERGES if has_merges and not is_entry else ()
    for r in range(R):
        mine, theirs = slice(ends[r], ends[r + 1]), slice(r * Q, r * Q + num_rows[r])
        for name in (*ROWS, *merges):
            np.testing.assert_array_equal(packed[name][mine], whole[name][theirs], name)
    void = slice(ends[-1], R * Q)
    assert set(packed["slot_mapping"][void]) == {-1}
    assert set(packed["positions"][void]) == {0}
    assert set(packed["input_ids"][void]) <= {0, MASK}
    if has_merges:
        assert set(packed["merge_mask"][void]) == {0}

    # Entries that are read: those of a request one after another, in the order of its rows.
    is_read = whole["logits_rows"][: R * Q] >= 0
    per_request = is_read.reshape(R, Q).sum(1)
    starts = np.concatenate([[0], np.cumsum(per_request)])
    assert batch["num_logits_rows"].tolist() == per_request.tolist()
    assert 0 < starts[-1] < R * Q
    places = np.flatnonzero(is_read)
    own = places // Q
    rows = np.minimum(places % Q, num_rows[own] - 1)
    rows = np.where(places % Q < num_rows[own], rows, 0) + ends[own]
    assert packed["logits_rows"][: starts[-1]].tolist() == rows.tolist()
    assert set(packed["logits_rows"][starts[-1] : R * Q]) == {0}
    for name in ENTRIES:
        np.testing.assert_array_equal(packed[name][: len(places)], whole[name][places], name)
    assert set(packed["row_inv_temperature"][starts[-1] : R * Q]) == {0.0}
    entry_of = np.full(R * Q, -1)
    entry_of[places] = np.arange(len(places))
    index = whole["blk_row_index"][: R * N].ravel()
    is_record = index >= R * Q
    wanted = np.where(is_record | (index < 0), index, entry_of[np.clip(index, 0, R * Q - 1)])
    assert packed["blk_row_index"][: R * N].ravel().tolist() == wanted.tolist()
    if is_shifted:
        last = whole["last_row_index"][:R]
        wanted = np.where(last < 0, -1, entry_of[np.clip(last, 0, None)])
        assert packed["last_row_index"][:R].tolist() == wanted.tolist()
        source = whole["logits_source"][places]
        assert packed["logits_source"][: len(places)].tolist() == source.tolist()
        assert set(packed["logits_source"][starts[-1] : R * Q]) <= {-1}


@kernels
def test_nothing_behind_the_rows_is_written(device: str) -> None:
    """Of a call of fewer requests than there is room for."""
    plan, _, _ = advanced(device, {"max_num_reqs": R + 2}, packs_rows=True, is_entry=False)
    for name in (*ROWS, "logits_rows", *ENTRIES):
        rest = plan[name][R * Q :].view(np.uint8)
        assert len(rest) > 0
        assert set(rest.ravel()) == {POISON}, name
    assert set(plan["cu_seqlens_q"][R + 1 :].view(np.uint8)) == {POISON}


@kernels
@pytest.mark.parametrize("place", [11, 12])
def test_other_rules_do_not_pack(device: str, place: int) -> None:
    layout = _core.plan_layout(decode_calls.options(buffer_size=1 if place == 12 else N))
    layout[place] = 1  # has_dual_cache, has_canvas
    tensors, numbers = op_calls.make("advance_decode", device)
    with pytest.raises(RuntimeError, match="expected block buffers alone with packs_rows, got"):
        op_calls.run("advance_decode", tensors, numbers | {"layout": layout, "packs_rows": True})
