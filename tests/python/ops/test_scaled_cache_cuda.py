# SPDX-License-Identifier: Apache-2.0
"""Caches of e4m3 codes on CUDA: the bits of the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import op_calls
from attention_cases import AttentionCase, poison, random_case
from diffulex import ops
from scaled_caches import CODED, OPS, coded, coded_caches, with_scales

pytestmark = pytest.mark.cuda

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
DIMS = pytest.mark.parametrize("dim", [64, 128, 256, 512, 80, 34])
TINY = 2.0**-149


def moved(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in tensors.items()}


def assert_same(found: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, NaN included."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.element_size()]
    assert torch.equal(found.cpu().view(width), want.view(width))


def random_rows(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Heads of every magnitude, with zeros, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator)
    rows *= 2.0 ** torch.randint(-130, 20, (*shape[:-1], 1), generator=generator).float()
    rows *= 2.0 ** torch.randint(-20, 1, shape, generator=generator).float()
    rows = rows.to(dtype)
    flat = rows.view(-1, shape[-1])
    flat[0] = 0.0
    flat[1, 3] = torch.nan
    flat[2, :3] = torch.tensor([torch.inf, -torch.inf, 1.0]).to(dtype)
    flat[3] = -0.0
    flat[4] = torch.tensor(TINY).to(dtype)
    flat[5, :3] = torch.tensor([1.0, 1.0625, -0.0]).to(dtype)  # a tie
    return rows


@DTYPES
@DIMS
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_store(dtype: torch.dtype, dim: int, index: torch.dtype) -> None:
    """Codes and scales of the CPU, and nothing beside the slots."""
    k, v = (random_rows(700, 3, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    slots = torch.randperm(1000, generator=torch.Generator().manual_seed(3))[:700].to(index)
    slots[::7] = -1
    want = coded_caches(63, 16, 4, dim + 6)
    found = moved(want)
    ops.store_kv_cache(k, v, slot_mapping=slots, **want)
    ops.store_kv_cache(k.cuda(), v.cuda(), slot_mapping=slots.cuda(), **found)
    for name, part in want.items():
        assert_same(found[name], part)


def test_every_rounding_of_a_store() -> None:
    """2^20 random patterns of bits, and all of bfloat16, as heads of 16."""
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(4))
    rows = torch.cat([bits.to(torch.int32), torch.arange(2**16, dtype=torch.int32) << 16])
    k = rows.view(torch.float32).view(-1, 1, 16)
    want = coded_caches(k.shape[0] // 16, 16, 1, 16)
    found = moved(want)
    slots = torch.arange(k.shape[0])
    ops.store_kv_cache(k, k.flip(0), slot_mapping=slots, **want)
    ops.store_kv_cache(k.cuda(), k.flip(0).cuda(), slot_mapping=slots.cuda(), **found)
    for name, part in want.items():
        assert_same(found[name], part)


@DTYPES
def test_load(dtype: torch.dtype) -> None:
    """Every code below every scale, pages that no row reads poisoned."""
    legal = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    caches = coded_caches(30, 4, 1, 254)
    scales = torch.cat([torch.tensor([0, 255], dtype=torch.uint8), torch.arange(27, 135)[:106]])
    for name in ("k", "v"):
        caches[f"{name}_cache"].view(torch.uint8)[:27] = legal
        caches[f"{name}_scale"][:27] = scales.view(27, 1, 4)
    # Heads of zeros have no other codes, nor have those that hold NaN.
    for name in ("k", "v"):
        caches[f"{name}_cache"].view(torch.uint8)[0, :2] = 0
    fresh = torch.randn(5, 1, 254).to(dtype)
    rest = {
        "page_table": torch.arange(27, dtype=torch.int32)[None],
        "context_lens": torch.tensor([108], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 113], dtype=torch.int32),
    }
    tensors = {**caches, "k_new": fresh, "v_new": fresh.flip(0), **rest}
    want = ops.load_kv_cache(**tensors, num_rows=113)
    found = ops.load_kv_cache(**moved(tensors), num_rows=113)
    for side in range(2):
        assert torch.equal(torch.isnan(found[side]).cpu(), torch.isnan(want[side]))
        assert_same(found[side].nan_to_num(7.0), want[side].nan_to_num(7.0))


@pytest.mark.parametrize("dim", [32, 33])
def test_copy(dim: int) -> None:
    caches = coded_caches(6, 4, 2, dim)
    for part in caches.values():
        part.view(torch.uint8).copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
    found = moved(caches)
    pairs = torch.tensor([[0, 3], [-1, 4], [2, -1], [5, 1]], dtype=torch.int32)
    ops.copy_kv_pages(src_dst=pairs.cuda(), **found)
    for name, part in caches.items():
        assert_same(found[name], part.view(torch.uint8)[[0, 5, 2, 0, 4, 5]].view(part.dtype))


@DTYPES
@DIMS
@pytest.mark.parametrize("num_rows", [1, 9, 600])
@pytest.mark.parametrize("kind", ["plain", "norm_v", "from_raw_k"])
def test_rows_that_are_stored_hold_the_stored_values(
    dtype: torch.dtype, dim: int, num_rows: int, kind: str
) -> None:
    """Against the ops apart: what is rotated without a store, stored and loaded."""
    num_q, num_kv = 4, 2
    from_raw_k = kind == "from_raw_k"
    heads = num_q + (1 if from_raw_k else 2) * num_kv
    packed = torch.randn(num_rows, heads * dim).to(dtype).cuda()
    rotary = dim // 2 * 2
    angle = torch.arange(num_rows)[:, None] * torch.logspace(0, -2, rotary // 2)[None]
    angles = torch.cat([angle.cos(), angle.sin()], 1).cuda()
    weight = torch.rand(dim).to(dtype).cuda()
    positions = torch.arange(num_rows).cuda()
    shared: dict[str, Any] = {
        "num_q_heads": num_q,
        "num_kv_heads": num_kv,
        "head_dim": dim,
        "eps": 1e-6,
        "norm_v": kind == "norm_v",
        "v_from_raw_k": from_raw_k,
    }

    def new_v() -> torch.Tensor | None:  # with a gap between heads
        if not from_raw_k:
            return None
        return torch.zeros(num_rows, num_kv, dim + 8, dtype=dtype, device="cuda")[..., :dim]

    exact, exact_v = packed.clone(), new_v()
    ops.qk_norm_rope(exact, positions, angles, weight, weight, v_out=exact_v, **shared)
    num_pages = -(-num_rows // 4) + 1
    slots = torch.randperm(num_pages * 4)[:num_rows]
    slots[1::3] = -1
    found, found_v, caches = packed.clone(), new_v(), moved(coded_caches(num_pages, 4, 3, dim + 2))
    ops.qk_norm_rope_store(
        found,
        positions,
        angles,
        weight,
        weight,
        slot_mapping=slots.cuda(),
        v_out=found_v,
        **caches,
        **shared,
    )
    before, after = (each.view(num_rows, heads, dim).cpu() for each in (exact, found))
    assert_same(after[:, :num_q].contiguous(), before[:, :num_q].contiguous())
    k = before[:, num_q : num_q + num_kv].contiguous()
    v = exact_v.cpu() if exact_v is not None else before[:, num_q + num_kv :]
    v = v.contiguous()
    want = coded_caches(num_pages, 4, 3, dim + 2)
    ops.store_kv_cache(k, v, slot_mapping=slots, **want)
    for name, part in want.items():
        assert_same(caches[name], part)
    after_v = found_v.cpu() if found_v is not None else after[:, num_q + num_kv :]
    for rows, stored, name in ((k, after[:, num_q : num_q + num_kv], "k"), (v, after_v, "v")):
        cache, scale = want[f"{name}_cache"], want[f"{name}_scale"]
        by_slot = cache.float().flatten(0, 1)[:, :num_kv, :dim]
        factor = torch.exp2(scale.permute(0, 2, 1).flatten(0, 1)[:, :num_kv].double() - 127)
        values = (by_slot.double() * factor[..., None]).to(dtype)
        expected = torch.where((slots >= 0)[:, None, None], values[slots], rows)
        assert torch.equal(stored, expected)


def test_no_pages_take_nothing() -> None:
    rows = torch.randn(3, 1, 64, device="cuda")
    caches = moved(coded_caches(0, 4, 1, 64))
    ops.store_kv_cache(rows, rows.clone(), slot_mapping=torch.full((3,), -1).cuda(), **caches)
    assert caches["k_cache"].dtype == CODED


def on_device(case: AttentionCase) -> AttentionCase:
    return dataclasses.replace(case, tensors=moved(case.tensors))


def is_copied(codes: AttentionCase) -> bool:
    """Whether the copy engine can fetch the scale bytes: in groups of four, of heads and pages too."""
    scales = (codes.tensors["k_scale"], codes.tensors["v_scale"])
    return all(
        scale is not None
        and scale.data_ptr() % 4 == 0
        and scale.stride(2) == 1
        and scale.stride(0) % 4 == scale.stride(1) % 4 == 0
        for scale in scales
    )


def has_bits(codes: AttentionCase, has_hopper_kernels: bool) -> bool:
    """Whether codes and plain values take kernels that multiply alike.

    Beside float16 only the portable kernel reads codes, and float32 takes no other. In bfloat16 the
    Hopper kernels read plain caches of pages of eight tokens and more, and codes where the copy
    engine can fetch their scale bytes as well; elsewhere both take the portable kernel.
    """
    q, cache = codes.tensors["q"], codes.tensors["k_cache"]
    assert q is not None
    assert cache is not None
    if q.dtype != torch.bfloat16:
        return q.dtype == torch.float32
    is_plain_copied = has_hopper_kernels and cache.shape[1] >= 8
    return not is_plain_copied or is_copied(codes)


@pytest.mark.parametrize("seed", range(120))
def test_attention_has_the_bits_of_the_dequantised_cache(seed: int) -> None:
    dtype = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float16][seed % 4]
    case = random_case(seed, "cpu", layout=0, dtype=dtype)
    codes, values = (on_device(each) for each in coded(case))
    is_same = has_bits(codes, ops.has_hopper_kernels(torch.device("cuda")))
    for found, want in zip(codes.run(), values.run()):
        if is_same:
            assert torch.equal(found, want)
        else:
            torch.testing.assert_close(found, want, rtol=1.6e-2, atol=2e-2)


@pytest.mark.parametrize("seed", range(40))
def test_unseen_codes_and_scales_do_not_matter(seed: int) -> None:
    case = random_case(seed, "cpu", layout=0)
    clean = on_device(coded(poison(case, 0.5))[0])
    poisoned = on_device(coded(poison(case, torch.nan))[0])
    scales = poisoned.tensors["k_scale"]
    assert scales is not None
    for found, want in zip(poisoned.run(), clean.run()):
        assert torch.equal(found, want)
        assert not torch.isnan(found).any()


@pytest.mark.parametrize("op", OPS)
def test_ops_take_scales(op: str) -> None:
    op_calls.run(op, *with_scales(op, "cuda"))
    torch.cuda.synchronize()
