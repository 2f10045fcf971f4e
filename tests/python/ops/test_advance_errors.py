# SPDX-License-Identifier: Apache-2.0
"""Arenas and layouts that `advance_decode` refuses, and what it does with the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import decode_calls
import op_calls
from decode_calls import B, N, R
from diffulex.runner.batch import ArenaViews
from diffulex_ext import _core

INT32_MAX = torch.iinfo(torch.int32).max

devices = pytest.mark.parametrize(
    "device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.cuda)]
)
kernels = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def changed(layout: list[int], **values: int) -> list[int]:
    """The layout with other numbers at these places."""
    places = {"version": 0, "block_size": 1, "buffer_size": 2, "page_size": 3}
    places |= {
        "max_pages_per_req": 4,
        "max_num_reqs": 5,
        "max_num_rows": 6,
        "merge_top_k": 8,
        "has_saved_rows": 9,
    }
    places |= {"has_dual_cache": 11, "has_canvas": 12}
    ints = list(layout)
    for name, value in values.items():
        ints[places[name]] = value
    return ints


def run(device: str, **numbers: Any) -> None:
    tensors, defaults = op_calls.make("advance_decode", device)
    op_calls.run("advance_decode", tensors, defaults | numbers)


@devices
def test_other_lists_of_arrays_are_refused(device: str) -> None:
    """The library and its caller must agree about every array."""
    layout = _core.plan_layout(decode_calls.options())
    expected = rf"^diffulex::advance_decode: layout: expected {len(layout)} numbers of version"
    for other in (changed(layout, version=layout[0] + 1), layout[:-1], []):
        with pytest.raises(RuntimeError, match=expected):
            run(device, layout=other)


@devices
@pytest.mark.parametrize("values", [{"page_size": -1}, {"max_num_reqs": 2**31}])
def test_numbers_out_of_range(device: str, values: dict[str, int]) -> None:
    layout = changed(_core.plan_layout(decode_calls.options()), **values)
    match = rf"^diffulex::advance_decode: layout: expected numbers of 0 to {INT32_MAX}, got"
    with pytest.raises(RuntimeError, match=match):
        run(device, layout=layout)


@devices
@pytest.mark.parametrize(
    "values",
    [
        {"max_num_reqs": 2**29},
        {"block_size": 2**31 - 1},
        {"buffer_size": 2**31 - 1},
        {"block_size": 2**30, "buffer_size": 32, "max_num_reqs": 0},
    ],
)
def test_rows_and_records_have_32_bit_indices(device: str, values: dict[str, int]) -> None:
    layout = changed(_core.plan_layout(decode_calls.options()), **values)
    with pytest.raises(RuntimeError, match=r"layout: expected at most \d+ rows and records, got"):
        run(device, layout=layout)


@devices
@pytest.mark.parametrize(
    "values",
    [
        {"max_pages_per_req": 2**31 - 1, "max_num_reqs": 2**25},
        {"merge_top_k": 2**31 - 1, "max_num_rows": 2**31 - 1},
    ],
)
def test_sizes_in_bytes_do_not_overflow(device: str, values: dict[str, int]) -> None:
    """An overflown size would let a small arena pass for one that holds its arrays."""
    layout = changed(_core.plan_layout(decode_calls.options()), **values)
    with pytest.raises(RuntimeError, match=r"layout: expected arrays of at most \d+ entries, got"):
        run(device, layout=layout)


@kernels
@pytest.mark.parametrize(
    "values",
    [
        {"page_size": 0},
        {"buffer_size": 33},
        {"max_num_rows": R * N * B - 1},
        {"has_dual_cache": 1, "merge_top_k": 2},
        {"has_dual_cache": 1, "has_saved_rows": 1},
        {"has_canvas": 1, "merge_top_k": 2},
        {"has_canvas": 1},
    ],
)
def test_layouts_of_no_strategy(device: str, values: dict[str, int]) -> None:
    layout = changed(_core.plan_layout(decode_calls.options()), **values)
    with pytest.raises(RuntimeError, match=r"^diffulex::advance_decode: layout: expected"):
        run(device, layout=layout)


@devices
@pytest.mark.parametrize("name", ["plan", "output", "batch"])
def test_small_arenas(device: str, name: str) -> None:
    tensors, numbers = op_calls.make("advance_decode", device)
    num_bytes = tensors[name].numel()
    tensors[name] = tensors[name][:-1].clone()
    match = rf"^diffulex::advance_decode: {name}: expected at least {num_bytes} bytes, got"
    with pytest.raises(RuntimeError, match=match):
        op_calls.run("advance_decode", tensors, numbers)


@kernels
@pytest.mark.parametrize("name", ["plan", "output", "batch"])
def test_arenas_at_odd_addresses(device: str, name: str) -> None:
    tensors, numbers = op_calls.make("advance_decode", device)
    odd = torch.zeros(tensors[name].numel() + 1, dtype=torch.uint8, device=device)[1:]
    tensors[name] = odd
    match = rf"^diffulex::advance_decode: {name}: expected memory aligned to 8 bytes"
    with pytest.raises(RuntimeError, match=match):
        op_calls.run("advance_decode", tensors, numbers)


@devices
def test_numbers_of_requests(device: str) -> None:
    counts = (-1,) if device == "meta" else (-1, R + 1)
    for num_reqs in counts:
        with pytest.raises(RuntimeError, match=r"^diffulex::advance_decode: num_reqs: expected"):
            run(device, num_reqs=num_reqs)


def test_requests_without_a_slot() -> None:
    """Where something is kept for it; nothing is written then."""
    opts = decode_calls.options(logits_shift=True)
    tensors, numbers = decode_calls.advance_decode(logits_shift=True)
    requests = ArenaViews(tensors["batch"], _core.DecodeBatch(opts).fields()).requests
    requests[1] = no_slot(requests[1])
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    match = r"^diffulex::advance_decode: requests: expected a slot of 0 to \d+, got -1 in request 1"
    with pytest.raises(RuntimeError, match=match):
        op_calls.run("advance_decode", tensors, numbers)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    tensors, numbers = decode_calls.advance_decode()
    requests = ArenaViews(
        tensors["batch"], _core.DecodeBatch(decode_calls.options()).fields()
    ).requests
    requests[1] = no_slot(requests[1])
    op_calls.run("advance_decode", tensors, numbers)


def no_slot(request: torch.Tensor) -> torch.Tensor:
    """The bytes of a request without a slot: the field before carry_pos, the last -1 of an idle one."""
    opts = decode_calls.options()
    batch, memory = decode_calls.arena(_core.DecodeBatch, opts)
    idle = ArenaViews(memory, batch.fields()).requests[0].view(torch.int32)
    words = request.clone().view(torch.int32)
    words[torch.where(idle == -1)[0][-1] - 1] = -1
    return words.view(torch.uint8)
