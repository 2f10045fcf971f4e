# SPDX-License-Identifier: Apache-2.0
"""Caches of e4m3 codes with a scale byte per slot and head, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import op_calls
from attention_cases import poison, random_case
from diffulex import ops
from reference import quantize as reference
from scaled_caches import CODED, NEVER, OPS, coded, coded_caches, oracle, with_scales

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def slots_of(cache: torch.Tensor, scale: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes [slots, heads, D] and scale bytes [slots, heads]."""
    codes = cache.view(torch.uint8).flatten(0, 1).numpy()
    return codes, scale.permute(0, 2, 1).flatten(0, 1).numpy()


def store(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scale bytes and values read back of rows [N, D] as keys of one head."""
    num_rows, dim = rows.shape
    caches = coded_caches(-(-num_rows // 16), 16, 1, dim)
    k = rows[:, None].contiguous()
    ops.store_kv_cache(k, k.flip(0), slot_mapping=torch.arange(num_rows), **caches)
    codes, scales = slots_of(caches["k_cache"], caches["k_scale"])
    table = torch.arange(caches["k_cache"].shape[0], dtype=torch.int32)[None]
    ends = torch.tensor([0, num_rows], dtype=torch.int32)
    k_out, _ = ops.load_kv_cache(
        caches["k_cache"],
        caches["v_cache"],
        torch.empty(0, 1, dim, dtype=rows.dtype),
        torch.empty(0, 1, dim, dtype=rows.dtype),
        table,
        ends[1:],
        torch.zeros(2, dtype=torch.int32),
        ends,
        num_rows,
        k_scale=caches["k_scale"],
        v_scale=caches["v_scale"],
    )
    return codes[:num_rows, 0], scales[:num_rows, 0], k_out[:, 0].float().numpy()


def test_codec_of_special_heads() -> None:
    tiny = 2.0**-149
    heads = torch.zeros(12, 8)
    heads[1, 3] = torch.nan
    heads[2, :3] = torch.tensor([torch.inf, -torch.inf, 1.0])
    heads[3, :2] = torch.tensor([57344.0, -57344.0])
    heads[4, :2] = torch.tensor([1e6, -3e38])  # saturates
    heads[5, :2] = torch.tensor([448 * 2.0**-100, tiny])
    heads[6, :2] = torch.tensor([448 * 2.0**-101, -(2.0**-108)])  # e stays -100
    heads[7, 0] = tiny
    heads[8, :2] = torch.tensor([448.0, -448.0])
    heads[9, 0] = np.nextafter(np.float32(448), np.float32(500)).item()
    heads[10, :3] = torch.tensor([1.0, 1.0625, -0.0])  # a tie
    heads[11] = -0.0
    codes, scales, values = store(heads)
    want_codes, want_scales = oracle(heads)
    assert scales.tolist() == want_scales.tolist()
    assert scales.tolist() == [0, 255, 134, 134, 134, 27, 27, 27, 127, 128, 119, 0]
    assert np.array_equal(codes, want_codes)
    assert np.isnan(values[1]).all()
    others = np.arange(12) != 1
    assert np.array_equal(values[others], reference.kv_values(codes, scales)[others])
    assert values[2, :3].tolist() == [57344.0, -57344.0, 1.0]
    assert values[4, :2].tolist() == [57344.0, -57344.0]


@DTYPES
def test_codec_of_random_heads(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    heads = torch.randn(4096, 16, generator=generator)
    heads *= 2.0 ** torch.randint(-130, 20, (4096, 1), generator=generator).float()
    heads *= 2.0 ** torch.randint(-20, 1, heads.shape, generator=generator).float()
    heads = heads.to(dtype)
    heads[torch.isinf(heads)] = 3.0
    codes, scales, values = store(heads)
    want_codes, want_scales = oracle(heads)
    assert np.array_equal(scales, want_scales)
    assert np.array_equal(codes, want_codes)
    assert np.array_equal(values, reference.kv_values(codes, scales))


def test_every_code_reads_as_its_value() -> None:
    """Below every scale that a store gives, in the dtypes that hold all of these values."""
    legal = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    scales = np.arange(27, 135, dtype=np.uint8)
    pages = torch.from_numpy(np.tile(legal, (108, 1))).view(27, 4, 1, 254)
    by_page = torch.from_numpy(scales).view(27, 1, 4)
    ends = torch.tensor([0, 108], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        k_out, v_out = ops.load_kv_cache(
            pages.view(CODED),
            pages.view(CODED).clone(),
            torch.empty(0, 1, 254, dtype=dtype),
            torch.empty(0, 1, 254, dtype=dtype),
            torch.arange(27, dtype=torch.int32)[None],
            ends[1:],
            torch.zeros(2, dtype=torch.int32),
            ends,
            108,
            k_scale=by_page,
            v_scale=by_page.clone(),
        )
        want = reference.kv_values(np.tile(legal, (108, 1)), scales)
        for out in (k_out, v_out):
            assert np.array_equal(out[:, 0].double().numpy(), want)


def test_store_writes_its_slots_alone() -> None:
    k, v = (torch.randn(6, 3, 64) for _ in range(2))
    caches = coded_caches(5, 4, 3, 64)
    slots = torch.tensor([7, -1, 0, 19, -1, 12])
    ops.store_kv_cache(k, v, slot_mapping=slots, **caches)
    for rows, name in ((k, "k"), (v, "v")):
        codes, scales = slots_of(caches[f"{name}_cache"], caches[f"{name}_scale"])
        want_codes, want_scales = np.full_like(codes, NEVER), np.full_like(scales, NEVER)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want_codes[slot], want_scales[slot] = oracle(rows[row])
        assert np.array_equal(codes, want_codes)
        assert np.array_equal(scales, want_scales)


@DTYPES
@pytest.mark.parametrize("from_raw_k", [False, True])
def test_rows_that_are_stored_hold_the_stored_values(dtype: torch.dtype, from_raw_k: bool) -> None:
    num_q, num_kv, dim, num_rows = 4, 2, 32, 9
    packed = torch.randn(num_rows, (num_q + (1 if from_raw_k else 2) * num_kv) * dim).to(dtype)
    angle = torch.arange(num_rows)[:, None] * torch.logspace(0, -2, dim // 2)[None]
    angles = torch.cat([angle.cos(), angle.sin()], 1)
    weight = torch.rand(dim).to(dtype)
    shared: dict[str, Any] = {
        "num_q_heads": num_q,
        "num_kv_heads": num_kv,
        "head_dim": dim,
        "eps": 1e-6,
        "norm_v": True,
        "v_from_raw_k": from_raw_k,
    }

    # Heads of v_out with a gap between them.
    def new_v() -> torch.Tensor | None:
        return (
            torch.zeros(num_rows, num_kv, dim + 8, dtype=dtype)[..., :dim] if from_raw_k else None
        )

    exact, exact_v = packed.clone(), new_v()
    ops.qk_norm_rope(exact, torch.arange(num_rows), angles, weight, weight, v_out=exact_v, **shared)
    found, found_v = packed.clone(), new_v()
    slots = torch.tensor([3, -1, 0, 17, -1, 8, 9, 10, -1])
    caches = coded_caches(5, 4, num_kv, dim)
    ops.qk_norm_rope_store(
        found,
        torch.arange(num_rows),
        angles,
        weight,
        weight,
        slot_mapping=slots,
        v_out=found_v,
        **caches,
        **shared,
    )
    by_head = [each.view(num_rows, -1, dim) for each in (exact, found)]
    assert torch.equal(by_head[0][:, :num_q], by_head[1][:, :num_q])
    keys = [each[:, num_q : num_q + num_kv] for each in by_head]
    values = [exact_v, found_v] if from_raw_k else [each[:, num_q + num_kv :] for each in by_head]
    for (before, after), name in ((keys, "k"), (values, "v")):
        assert before is not None
        assert after is not None
        codes, scales = slots_of(caches[f"{name}_cache"], caches[f"{name}_scale"])
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                assert torch.equal(before[row], after[row])
                continue
            want_codes, want_scales = oracle(before[row])
            assert np.array_equal(codes[slot], want_codes)
            assert np.array_equal(scales[slot], want_scales)
            stored = reference.kv_values(codes[slot], scales[slot])
            assert np.array_equal(after[row].double().numpy(), stored)


@pytest.mark.every(5)
@pytest.mark.parametrize("seed", range(40))
def test_attention_has_the_bits_of_the_dequantised_cache(seed: int) -> None:
    case = random_case(seed, "cpu", layout=0)
    with_codes, with_values = coded(case)
    for found, want in zip(with_codes.run(), with_values.run()):
        assert torch.equal(found, want)


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", range(12))
def test_unseen_codes_and_scales_do_not_matter(seed: int) -> None:
    case = random_case(seed, "cpu", layout=0)
    clean = coded(poison(case, 0.5))[0]
    poisoned = coded(poison(case, torch.nan))[0]
    scales = poisoned.tensors["k_scale"]
    assert scales is not None
    assert (scales == NEVER).any()
    for found, want in zip(poisoned.run(), clean.run()):
        assert torch.equal(found, want)


def test_pages_are_copied_with_their_scales() -> None:
    caches = coded_caches(6, 4, 2, 32)
    for part in caches.values():
        part.view(torch.uint8).copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
    before = {name: part.view(torch.uint8).clone() for name, part in caches.items()}
    pairs = torch.tensor([[0, 3], [-1, 4], [2, -1], [5, 1]], dtype=torch.int32)
    ops.copy_kv_pages(src_dst=pairs, **caches)
    for name, part in caches.items():
        assert torch.equal(part.view(torch.uint8), before[name][[0, 5, 2, 0, 4, 5]])


BAD: list[tuple[str, Any, str]] = [
    ("k_scale", lambda s: s.float(), "k_scale: expected dtype uint8, got float32"),
    ("v_scale", lambda s: s.float(), "v_scale: expected dtype uint8, got float32"),
    ("v_scale", lambda _: None, "v_scale: expected a tensor with k_scale, got none"),
    ("k_scale", lambda _: None, "v_scale: expected none without k_scale, got a tensor"),
    ("k_scale", lambda s: s[:, :1], "k_scale: expected shape"),
    ("v_scale", lambda s: s[:-1], "v_scale: expected shape"),
    ("k_cache", lambda c: c.view(torch.uint8), "k_cache: expected dtype float8_e4m3fn, got uint8"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("op", OPS)
def test_legal_and_illegal_scales(op: str, device: str) -> None:
    op_calls.run(op, *with_scales(op, device))
    for name, change, message in BAD:
        tensors, numbers = with_scales(op, device)
        tensors[name] = change(tensors[name])
        with pytest.raises(RuntimeError, match=rf"^diffulex::{op}: {message}"):
            op_calls.run(op, tensors, numbers)
    if op != "copy_kv_pages":
        tensors, numbers = with_scales(op, device)
        with pytest.raises(
            RuntimeError, match=r"kv_layout: expected 0 \(unified\) with k_scale, got 1"
        ):
            op_calls.run(op, tensors, {**numbers, "kv_layout": 1})
