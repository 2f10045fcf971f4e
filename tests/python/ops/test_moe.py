# SPDX-License-Identifier: Apache-2.0
"""moe_permute, fused_moe, fused_experts_packed and moe_combine against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diffulex import ops
from reference import experts as moe_oracles
from tolerance import assert_accurate, to_numpy

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def random_ids(num_tokens: int, num_experts: int, top_k: int, seed: int, holes: float = 0.0) -> Any:
    """Different experts per token; some slots have none."""
    random = np.random.default_rng(seed)
    ids = np.stack([random.permutation(num_experts)[:top_k] for _ in range(num_tokens)])
    ids[random.random(ids.shape) < holes] = -1
    return torch.from_numpy(ids.astype(np.int32))


class Case:
    """One call of fused_moe with everything it needs, made on the CPU and moved."""

    def __init__(
        self,
        num_tokens: int,
        num_experts: int,
        top_k: int,
        hidden: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        holes: float = 0.0,
        device: str = "cpu",
    ) -> None:
        self.x = normal(num_tokens, hidden, seed=seed).to(dtype).to(device)
        scale = hidden**-0.5
        self.w13 = normal(num_experts, 2 * width, hidden, seed=seed, scale=scale)
        self.w13 = self.w13.to(dtype).to(device)
        self.w2 = normal(num_experts, hidden, width, seed=seed + 1, scale=width**-0.5)
        self.w2 = self.w2.to(dtype).to(device)
        self.weights = normal(num_tokens, top_k, seed=seed + 2).abs().to(device)
        self.ids = random_ids(num_tokens, num_experts, top_k, seed, holes).to(device)

    def run(self, **options: Any) -> torch.Tensor:
        out = torch.full_like(self.x, NAN)
        workspace = ops.new_fused_moe_workspace(self.x, self.ids.shape[1], self.w13)
        workspace.fill_(0xFF)
        result = ops.fused_moe(
            self.x,
            self.w13,
            self.w2,
            self.weights,
            self.ids,
            out=out,
            workspace=workspace,
            **options,
        )
        assert result is out
        return out

    def check(self, **options: Any) -> torch.Tensor:
        out = self.run(**options)
        named = {
            "kind": options.get("act", 0),
            "weight_on_input": options.get("weight_on_input", False),
        }
        for name in ("addend", "expert_map"):
            value = options.get(name)
            if value is not None:
                named[name] = to_numpy(value) if value.is_floating_point() else value.cpu().numpy()
        arrays = [to_numpy(t) for t in (self.x, self.w13, self.w2, self.weights)]
        expected = moe_oracles.moe(*arrays, self.ids.cpu().numpy(), **named)
        inputs = [t.cpu() for t in (self.x, self.w13, self.w2, self.weights, self.ids)]
        moved = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        base = moe_oracles.plain_moe(*inputs, **moved)
        assert_accurate(out, expected, base)
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 16, 17, 64, 257])
def test_rows(device: str, num_tokens: int, dtype: torch.dtype) -> None:
    Case(num_tokens, 8, 2, 64, 32, dtype, seed=num_tokens, device=device).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hidden", "width"),
    [(2, 2), (6, 10), (64, 24), (72, 40), (66, 130), (200, 72), (128, 256), (136, 8)],
)
def test_widths(device: str, hidden: int, width: int, dtype: torch.dtype) -> None:
    Case(19, 4, 2, hidden, width, dtype, device=device).check()


@pytest.mark.parametrize("act", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(device: str, dtype: torch.dtype, act: int) -> None:
    Case(11, 4, 2, 64, 32, dtype, device=device).check(act=act)


@pytest.mark.every(5)
@pytest.mark.parametrize("top_k", range(1, 9))
@pytest.mark.parametrize("num_experts", [8, 64, 512])
def test_choices(device: str, num_experts: int, top_k: int) -> None:
    Case(13, num_experts, top_k, 32, 8, seed=top_k, holes=0.2, device=device).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_expert_takes_everything(device: str, dtype: torch.dtype) -> None:
    for num_tokens in (5, 33, 150):
        case = Case(num_tokens, 6, 1, 64, 32, dtype, device=device)
        case.ids.fill_(4)
        case.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_without_an_expert(device: str, dtype: torch.dtype) -> None:
    """They are not read: their x may be anything, and unused experts too."""
    case = Case(9, 6, 2, 64, 32, dtype, holes=0.4, device=device)
    case.ids[3] = -1
    case.ids[7] = -5
    case.ids[case.ids == 2] = -1
    clean = case.check()
    assert (clean[3] == 0).all()
    assert (clean[7] == 0).all()
    case.x[3], case.x[7] = NAN, NAN
    case.w13[2], case.w2[2] = NAN, NAN
    case.weights[case.ids < 0] = NAN
    assert torch.equal(case.run(), clean)


def test_nothing_at_all(device: str) -> None:
    case = Case(4, 3, 2, 16, 8, device=device)
    case.ids.fill_(-1)
    assert (case.run() == 0).all()
    addend = normal(4, 16).to(device)
    assert torch.equal(case.run(addend=addend), addend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_map(device: str, dtype: torch.dtype) -> None:
    """Shards of the experts add up to all of them, and one may hold them in any order."""
    case = Case(21, 8, 3, 64, 32, dtype, holes=0.1, device=device)
    whole = case.check()
    total = torch.zeros_like(whole, dtype=torch.float32)
    w13, w2 = case.w13, case.w2
    for owned in ([6, 1, 3], [0], [2, 4, 5, 7]):
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[torch.tensor(owned)] = torch.arange(len(owned), dtype=torch.int32)
        case.w13, case.w2 = w13[owned].contiguous(), w2[owned].contiguous()
        total += case.check(expert_map=expert_map.to(device)).float()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(total, whole.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_addend(device: str, dtype: torch.dtype) -> None:
    case = Case(10, 4, 2, 64, 32, dtype, device=device)
    addend = normal(10, 64, seed=9)
    case.check(addend=addend.to(dtype).to(device))
    case.check(addend=addend.to(device))
    wide = normal(10, 100, seed=4).to(dtype).to(device)
    case.check(addend=wide[:, 7:71])


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_on_input(device: str, dtype: torch.dtype) -> None:
    case = Case(10, 4, 1, 64, 32, dtype, device=device)
    first = case.check(weight_on_input=True)
    assert not torch.equal(first, case.check())


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(device: str, dtype: torch.dtype) -> None:
    case = Case(8, 4, 2, 64, 32, dtype, device=device)
    expected = case.check()
    wide = torch.full((8, 90), NAN, dtype=dtype, device=device)
    wide[:, 9:73] = case.x
    w13 = torch.full((4, 64, 71), NAN, dtype=dtype, device=device)
    w13[..., 5:69] = case.w13
    w2 = torch.full((4, 70, 40), NAN, dtype=dtype, device=device)
    w2[:, 2:66, 3:35] = case.w2
    ids = torch.full((8, 5), 99, dtype=torch.int32, device=device)
    ids[:, 1:3] = case.ids
    weights = torch.full((8, 5), NAN, device=device)
    weights[:, 2:4] = case.weights
    out = torch.full((8, 80), NAN, dtype=dtype, device=device)
    ops.fused_moe(
        wide[:, 9:73],
        w13[..., 5:69],
        w2[:, 2:66, 3:35],
        weights[:, 2:4],
        ids[:, 1:3],
        out=out[:, 11:75],
    )
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    )
    torch.testing.assert_close(out[:, 11:75], expected, **tolerance)
    assert out[:, :11].isnan().all()
    assert out[:, 75:].isnan().all()


def test_a_row_does_not_depend_on_the_others_on_the_cpu() -> None:
    case = Case(80, 5, 2, 66, 34)
    whole = case.run()
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for rows in (1, 2, 5, 63, 64, 65):
                part = Case(80, 5, 2, 66, 34)
                part.x, part.weights, part.ids = (
                    t[:rows] for t in (part.x, part.weights, part.ids)
                )
                assert torch.equal(part.run(), whole[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_runs_are_bit_equal(device: str, dtype: torch.dtype) -> None:
    case = Case(70, 8, 3, 64, 40, dtype, device=device)
    first = case.run()
    for _ in range(20):
        assert torch.equal(case.run(), first)


def test_no_tokens(device: str) -> None:
    case = Case(3, 4, 2, 16, 8, device=device)
    out = ops.fused_moe(case.x[:0], case.w13, case.w2, case.weights[:0], case.ids[:0])
    assert out.shape == (0, 16)
    offsets = torch.zeros(5, dtype=torch.int32, device=device)
    assert ops.fused_experts_packed(case.x[:0], case.w13, case.w2, offsets).shape == (0, 16)
    empty = ops.moe_combine(case.x[:0], case.weights[:0], case.ids[:0])
    assert empty.shape == (0, 16)
    permuted = ops.moe_permute(case.ids[:0], 4, 16)
    assert permuted.expert_offsets.tolist() == [0] * 5
    assert permuted.counters.tolist() == [0, 0]


# moe_permute


def check_permutation(ids: torch.Tensor, num_local: int, tile: int, expert_map: Any = None) -> None:
    slots = ids.numel()
    max_tiles = ops.moe_max_tiles(slots, num_local, tile)
    assert max_tiles == (-(-slots // tile) + min(num_local, slots) if slots else 0)
    sizes = (slots, num_local + 1, max_tiles + 3, max_tiles + 3, 4)
    out = ops.MoePermutation(
        *(torch.full((size,), -77, dtype=torch.int32, device=ids.device) for size in sizes)
    )
    ops.moe_permute(ids, num_local, tile, expert_map=expert_map, out=out)
    named = None if expert_map is None else expert_map.cpu().numpy()
    expected = moe_oracles.permute(ids.cpu().numpy(), num_local, tile, named)
    assert out.sorted_slots.tolist() == expected["sorted_slots"].tolist()
    assert out.expert_offsets.tolist() == expected["expert_offsets"].tolist()
    assert out.counters[:2].tolist() == expected["counters"].tolist()
    num_tiles = int(out.counters[0])
    tiles = torch.stack([out.tile_expert, out.tile_start], 1)
    assert tiles[:num_tiles].tolist() == expected["tiles"].tolist()
    assert (tiles[num_tiles:] == -1).all()


@pytest.mark.every(3)
@pytest.mark.parametrize("num_local", [1, 5, 64, 256, 512, 1500, 4096])
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 300, 1025])
def test_permute(device: str, num_tokens: int, num_local: int) -> None:
    random = np.random.default_rng(num_tokens + num_local)
    for top_k, tile in ((1, 16), (3, 7), (8, 64)):
        ids = random.integers(-1, num_local, (num_tokens, top_k)).astype(np.int32)
        check_permutation(torch.from_numpy(ids).to(device), num_local, tile)


def test_permute_keeps_the_order_of_slots(device: str) -> None:
    for num_tokens in (40, 5000):
        ids = torch.zeros(num_tokens, 2, dtype=torch.int32, device=device)
        ids[:, 1] = 3
        check_permutation(ids, 4, 32)


def test_tile_beyond_every_expert(device: str) -> None:
    """Begin plus tile, and the round-up of a count, pass the largest int32."""
    ids = torch.tensor([[0], [1], [1], [2]], dtype=torch.int32, device=device)
    for tile in (2**31 - 1, 2**31 - 2, 1 << 30):
        check_permutation(ids, 3, tile)


def test_permute_with_a_map(device: str) -> None:
    random = np.random.default_rng(5)
    expert_map = torch.tensor([2, -1, 0, 0, -1, 1], dtype=torch.int32, device=device)
    ids = torch.from_numpy(random.integers(-1, 6, (50, 3)).astype(np.int32)).to(device)
    check_permutation(ids, 3, 16, expert_map)
    wide = torch.full((50, 7), -9, dtype=torch.int32, device=device)
    wide[:, 2:5] = ids
    check_permutation(wide[:, 2:5], 3, 16, expert_map)


# fused_experts_packed


def packed_base(case: Case, counts: list[int], act: int) -> torch.Tensor:
    """Plain torch in the dtype of the case, on the CPU."""
    expert = torch.repeat_interleave(torch.tensor(counts))[:, None].int()
    rows = case.x.cpu().reshape(-1, case.x.shape[-1])[: len(expert)]
    ones = torch.ones(len(expert), 1)
    return moe_oracles.plain_moe(rows, case.w13.cpu(), case.w2.cpu(), ones, expert, act=act)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 40, 0, 100], [2, 2, 2, 2]])
def test_packed(device: str, counts: list[int], dtype: torch.dtype) -> None:
    num_rows = sum(counts) + 3
    case = Case(num_rows, 4, 1, 64, 40, dtype, device=device)
    offsets = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device)
    row_weights = normal(num_rows, seed=8).to(device)
    case.x[sum(counts) :] = NAN
    for act, weights in ((0, None), (1, row_weights)):
        out = torch.full_like(case.x, NAN)
        ops.fused_experts_packed(
            case.x, case.w13, case.w2, offsets, row_weights=weights, act=act, out=out
        )
        assert (out[sum(counts) :] == 0).all()
        used = out[: sum(counts)]
        factors = np.ones(num_rows) if weights is None else to_numpy(weights)
        expected = np.zeros((sum(counts), 64))
        for expert in range(4):
            rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
            arrays = [to_numpy(t) for t in (case.x[rows], case.w13[expert], case.w2[expert])]
            expected[rows] = moe_oracles.expert(*arrays, act) * factors[rows, None]
        base = packed_base(case, counts, act)
        if weights is not None:
            base = (base.float() * weights[: len(base), None].cpu()).to(dtype)
        assert_accurate(used, expected, base)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_batched_form(device: str, dtype: torch.dtype) -> None:
    counts = [3, 0, 9, 1]
    case = Case(1, 4, 1, 64, 40, dtype, device=device)
    x = normal(4, 9, 64, seed=3).to(dtype).to(device)
    for expert, count in enumerate(counts):
        x[expert, count:] = NAN
    row_weights = normal(4, 9, seed=8).to(device)
    storage = torch.full((4, 11, 64), 7.0, dtype=dtype, device=device)
    out = storage[:, 1:10]
    ops.fused_experts_packed(
        x,
        case.w13,
        case.w2,
        torch.tensor(counts, dtype=torch.int32, device=device),
        row_weights=row_weights,
        rows_per_expert=9,
        out=out,
    )
    for expert, count in enumerate(counts):
        assert (out[expert, count:] == 7).all(), "rows outside the counts stay as they are"
        arrays = [to_numpy(t) for t in (x[expert, :count], case.w13[expert], case.w2[expert])]
        expected = moe_oracles.expert(*arrays, 0) * to_numpy(row_weights)[expert, :count, None]
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2
        np.testing.assert_allclose(
            to_numpy(out[expert, :count]), expected, rtol=tolerance, atol=tolerance
        )
    assert (storage[:, [0, 10]] == 7).all()


# moe_combine


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 64, 1000])
def test_combine(device: str, hidden: int, dtype: torch.dtype) -> None:
    slot_out = normal(12 * 3, hidden).to(dtype).to(device)
    weights = normal(12, 3).to(device)
    ids = random_ids(12, 5, 3, seed=1, holes=0.3).to(device)
    slot_out[ids.flatten() < 0] = NAN
    addend = normal(12, hidden, seed=2).to(device)
    for term in (None, addend, addend.to(dtype)):
        out = torch.full((12, hidden), NAN, dtype=dtype, device=device)
        ops.moe_combine(slot_out, weights, ids, addend=term, out=out)
        used = np.where(ids.cpu().numpy()[..., None] >= 0, to_numpy(slot_out).reshape(12, 3, -1), 0)
        expected = (used * to_numpy(weights)[..., None]).sum(1)
        if term is not None:
            expected = expected + to_numpy(term)
        base = torch.from_numpy(expected).float().to(dtype)
        assert_accurate(out, expected, base, slack=1e-5)


def test_combine_is_the_last_step_of_fused_moe(device: str) -> None:
    """The same bits from slot outputs computed one expert at a time."""
    case = Case(14, 4, 2, 64, 32, holes=0.2, device=device)
    slot_out = torch.full((28, 64), NAN, device=device)
    ones = torch.ones(14, 1, device=device)
    for k in range(2):
        alone = ops.fused_moe(case.x, case.w13, case.w2, ones, case.ids[:, k : k + 1])
        slot_out[k::2] = alone
    combined = ops.moe_combine(slot_out, case.weights, case.ids)
    assert torch.equal(combined, case.run())


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [16, 32, 300, 563, 1125, 2063, 2813])
def test_many_experts_give_every_processor_many_tiles(num_tokens: int) -> None:
    """Every row against float32 products, with tens of tiles for a processor in the second product.

    The numbers are those of tiles of 16, 32, 64, 96, 128 and 160 rows, and of tiles that two share.
    """
    num_experts, top_k, hidden, width = 150, 8, 4096, 64
    x = normal(num_tokens, hidden).cuda().bfloat16()
    w13 = normal(num_experts, 2 * width, hidden, seed=1, scale=0.02).cuda().bfloat16()
    w2 = normal(num_experts, hidden, width, seed=2, scale=0.1).cuda().bfloat16()
    weights = normal(num_tokens, top_k, seed=3).cuda().abs()
    ids = random_ids(num_tokens, num_experts, top_k, seed=4).cuda()
    out = torch.full_like(x, torch.nan)
    ops.fused_moe(x, w13, w2, weights, ids, out=out)
    assert torch.equal(ops.fused_moe(x, w13, w2, weights, ids), out)
    expected = torch.zeros(num_tokens, hidden, device="cuda")
    for expert in range(num_experts):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].float() @ w13[expert].float().T).chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        expected.index_add_(
            0, tokens, (inner @ w2[expert].float().T) * weights[tokens, places, None]
        )
    errors = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 1e-2
