# SPDX-License-Identifier: Apache-2.0
"""moe_topk and router_gemm against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diffulex import ops
from diffulex.nn.experts import RoutedExperts
from reference import experts as moe_oracles
from tolerance import assert_accurate, to_numpy

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Scores closer than this may be exchanged by rounding.
MARGIN = 3e-6


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def optional_numpy(value: Any) -> Any:
    return (
        to_numpy(value)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else (value.cpu().numpy() if isinstance(value, torch.Tensor) else value)
    )


def check(logits: torch.Tensor, top_k: int, exact_ties: bool = False, **options: Any) -> Any:
    """Runs the op into poisoned outputs and compares with the oracle."""
    out = ops.Routing(
        torch.full((logits.shape[0], top_k), NAN, device=logits.device),
        torch.full((logits.shape[0], top_k), -7, dtype=torch.int32, device=logits.device),
    )
    result = ops.moe_topk(logits, top_k, out=out, **options)
    assert result is out
    named = {name: optional_numpy(value) for name, value in options.items()}
    weights, ids, margins = moe_oracles.topk(to_numpy(logits), top_k, **named)
    clear = np.ones(len(ids), bool) if exact_ties else margins > MARGIN
    assert clear.mean() > 0.5 or len(ids) < 4
    np.testing.assert_array_equal(result.ids.cpu().numpy()[clear], ids[clear])
    np.testing.assert_allclose(
        to_numpy(result.weights)[clear], weights[clear], rtol=2e-5, atol=1e-7
    )
    for row in result.ids.tolist():
        assert row == [-1] * top_k or len(set(row)) == top_k
    return result


@pytest.mark.every(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", [0, 1])
@pytest.mark.parametrize("num_experts", [1, 2, 8, 31, 32, 33, 64, 128, 129, 256, 257, 512, 1024])
def test_sizes(device: str, num_experts: int, scoring: int, dtype: torch.dtype) -> None:
    logits = normal(9, num_experts).mul(2).to(dtype).to(device)
    ties = dtype != torch.float32  # rounded logits are often equal, and then exactly so
    for top_k in sorted({1, min(3, num_experts), min(8, num_experts), min(32, num_experts)}):
        if ties and num_experts > 8:
            # Equal logits give equal scores on both sides; near ties cannot be told apart.
            result = ops.moe_topk(logits, top_k, scoring=scoring, renormalize=True)
            values = logits.float().gather(1, result.ids.long())
            assert torch.equal(values, logits.float().topk(top_k, dim=1).values)
            weights, _, _ = moe_oracles.topk(
                to_numpy(logits), top_k, scoring=scoring, renormalize=True
            )
            np.testing.assert_allclose(to_numpy(result.weights), weights, rtol=1e-4, atol=1e-6)
        else:
            check(logits, top_k, scoring=scoring, renormalize=True)
            check(logits, top_k, scoring=scoring, renormalize=False, routed_scaling=2.5)


@pytest.mark.parametrize("seed", range(40))
def test_random_options(device: str, seed: int) -> None:
    """Groups, bias, scale and validity in every combination."""
    random = np.random.default_rng(seed)
    n_group = int(random.choice([0, 1, 2, 4, 8]))
    size = int(random.choice([1, 2, 5, 8, 32]))
    num_experts = max(1, n_group) * size
    topk_group = int(random.integers(0, n_group + 1)) if n_group else 0
    is_grouped = n_group > 1 and 0 < topk_group < n_group
    limit = topk_group * size if is_grouped else num_experts
    top_k = int(random.integers(1, min(limit, 8) + 1))
    logits = normal(int(random.integers(1, 40)), num_experts, seed=seed).to(device)
    options: dict[str, Any] = {
        "scoring": int(random.integers(2)),
        "renormalize": bool(random.integers(2)),
        "n_group": n_group,
        "topk_group": topk_group,
        "group_score": int(random.integers(2)),
        "routed_scaling": float(random.choice([1.0, 2.5])),
    }
    if random.integers(2):
        options["bias"] = (0.3 * normal(num_experts, seed=seed) - 0.9).to(device)
    if random.integers(2):
        options["expert_scale"] = normal(num_experts, seed=seed + 1).to(device)
    if random.integers(2):
        valid = torch.from_numpy(random.random(logits.shape[0]) < 0.7)
        options["token_valid"] = (valid if seed % 2 else valid.byte()).to(device)
    check(logits, top_k, **options)


def test_the_bias_chooses_but_does_not_weigh(device: str) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    bias = torch.tensor([-5.0, 0.0, 0.0, 5.0], device=device)
    result = check(logits, 2, scoring=1, renormalize=False, bias=bias)
    assert result.ids.tolist() == [[3, 1]]
    expected = torch.sigmoid(torch.tensor([[-1.0, 1.0]]))
    torch.testing.assert_close(result.weights.cpu(), expected)


def test_excluded_groups_are_not_zero_but_minus_infinity(device: str) -> None:
    """With a strongly negative bias every choice is below 0, which must not let others win."""
    logits = torch.zeros(1, 8, device=device)
    logits[0, 4:] = 1.0
    bias = torch.full((8,), -3.0, device=device)
    result = check(
        logits, 3, exact_ties=True, scoring=1, bias=bias, n_group=2, topk_group=1, renormalize=True
    )
    assert result.ids.tolist() == [[4, 5, 6]]


@pytest.mark.parametrize("scoring", [0, 1])
@pytest.mark.parametrize("num_experts", [8, 64, 128, 300])
def test_ties_go_to_the_lower_expert_and_group(device: str, num_experts: int, scoring: int) -> None:
    logits = torch.zeros(3, num_experts, device=device)
    logits[1, 5] = 1.0
    logits[2, ::2] = 0.5
    result = check(logits, 4, exact_ties=True, scoring=scoring)
    assert result.ids[0].tolist() == [0, 1, 2, 3]
    assert result.ids[1].tolist() == [5, 0, 1, 2]
    assert result.ids[2].tolist() == [0, 2, 4, 6]
    grouped = check(
        logits, 2, exact_ties=True, scoring=scoring, n_group=4, topk_group=2, group_score=1
    )
    assert grouped.ids[0].tolist() == [0, 1]


@pytest.mark.parametrize("scoring", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(device: str, dtype: torch.dtype, scoring: int) -> None:
    logits = normal(6, 16).to(dtype)
    logits[0] = NAN
    logits[1] = -INF
    logits[2, :8], logits[2, 8:] = NAN, -INF
    logits[3, 3], logits[3, 5] = NAN, -INF
    logits[4] = NAN
    logits[4, 9] = 1.0
    logits[5, 7] = INF
    logits = logits.to(device)
    result = ops.moe_topk(logits, 3, scoring=scoring, renormalize=True)
    assert torch.isfinite(result.weights).all()
    for row in range(3):
        assert result.ids[row].tolist() == [0, 1, 2]
        assert result.weights[row].tolist() == [0.0, 0.0, 0.0]
    assert not {3, 5} & set(result.ids[3].tolist())
    # Experts without a score follow in the order of their numbers.
    assert result.ids[4].tolist() == [9, 0, 1]
    torch.testing.assert_close(result.weights[4].cpu(), torch.tensor([1.0, 0.0, 0.0]))
    assert result.ids[5, 0] == 7
    with_bias = ops.moe_topk(
        logits, 3, scoring=scoring, renormalize=True, bias=torch.ones(16, device=device)
    )
    assert with_bias.ids[0].tolist() == [0, 1, 2]
    assert with_bias.weights[0].tolist() == [0.0, 0.0, 0.0]


def test_rows_that_are_not_valid(device: str) -> None:
    logits = normal(5, 8).to(device)
    logits[1] = NAN
    valid = torch.tensor([True, False, False, True, True], device=device)
    result = check(logits, 2, token_valid=valid)
    assert result.ids[1:3].tolist() == [[-1, -1]] * 2
    assert result.weights[1:3].tolist() == [[0.0, 0.0]] * 2
    again = ops.moe_topk(logits, 2, token_valid=valid.byte())
    assert torch.equal(again.ids, result.ids)


def test_strided_rows_and_outputs(device: str) -> None:
    wide = normal(7, 40).to(device)
    weights = torch.full((7, 9), NAN, device=device)
    ids = torch.full((7, 9), -7, dtype=torch.int32, device=device)
    out = ops.Routing(weights[:, 2:5], ids[:, 4:7])
    ops.moe_topk(wide[:, 3:19], 3, out=out)
    expected = ops.moe_topk(wide[:, 3:19].contiguous(), 3)
    assert torch.equal(out.weights, expected.weights)
    assert torch.equal(out.ids, expected.ids)
    assert weights[:, :2].isnan().all()
    assert weights[:, 5:].isnan().all()
    assert (ids[:, :4] == -7).all()
    assert (ids[:, 7:] == -7).all()


def test_no_tokens(device: str) -> None:
    result = ops.moe_topk(torch.empty(0, 8, device=device), 2)
    assert result.ids.shape == (0, 2)
    assert ops.router_gemm(
        torch.empty(0, 8, device=device), torch.ones(4, 8, device=device)
    ).shape == (0, 4)


TOPK_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 9}, r"top_k: expected a value in \[1, 8\], got 9"),
    ({"top_k": 0}, r"top_k: expected a value in \[1, 8\], got 0"),
    ({"scoring": 2}, "scoring: expected"),
    ({"group_score": 2}, "group_score: expected"),
    ({"n_group": 3, "topk_group": 1}, "n_group: expected a divisor of 8 experts, got 3"),
    ({"n_group": -1}, "n_group: expected a value >= 0, got -1"),
    ({"topk_group": -1}, "topk_group: expected a value >= 0, got -1"),
    (
        {"top_k": 3, "n_group": 4, "topk_group": 1},
        "top_k: expected at most the 2 experts of topk_group groups, got 3",
    ),
]


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize(("change", "message"), TOPK_ERRORS)
def test_topk_errors(where: str, change: dict[str, Any], message: str) -> None:
    options = {"top_k": 2, **change}
    with pytest.raises(RuntimeError, match=f"^diffulex::moe_topk: {message}"):
        ops.moe_topk(torch.ones(3, 8, device=where), **options)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_shape_errors(where: str) -> None:
    logits = torch.ones(3, 8, device=where)
    for name, value in {
        "bias": torch.ones(7, device=where),
        "expert_scale": torch.ones(8, dtype=torch.float64, device=where),
        "token_valid": torch.ones(3, dtype=torch.int32, device=where),
    }.items():
        with pytest.raises(RuntimeError, match=f"^diffulex::moe_topk: {name}: expected"):
            ops.moe_topk(logits, 2, **{name: value})
    with pytest.raises(RuntimeError, match=r"^diffulex::moe_topk: logits: expected 1 to 1024"):
        ops.moe_topk(torch.ones(3, 1025, device=where), 2)
    with pytest.raises(RuntimeError, match=r"^diffulex::router_gemm: w: expected shape"):
        ops.router_gemm(logits, torch.ones(4, 7, device=where))
    with pytest.raises(RuntimeError, match=r"^diffulex::router_gemm: w: expected dtype"):
        ops.router_gemm(logits, torch.ones(4, 8, dtype=torch.float16, device=where))


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "num_experts"),
    [
        (1, 1, 1),
        (3, 7, 5),
        (4, 64, 8),
        (9, 2048, 128),
        (33, 260, 257),
        (130, 96, 17),
        (300, 544, 257),
    ],
)
def test_router_gemm(
    device: str,
    num_tokens: int,
    hidden: int,
    num_experts: int,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> None:
    x = normal(num_tokens, hidden).to(x_dtype).to(device)
    w = normal(num_experts, hidden, seed=1).to(w_dtype).to(device)
    out = torch.full((num_tokens, num_experts), NAN, device=device)
    assert ops.router_gemm(x, w, out=out) is out
    expected = to_numpy(x) @ to_numpy(w).T
    slack = 2e-7 * hidden * float(x.float().abs().max() * w.float().abs().max())
    assert_accurate(out, expected, x.cpu().float() @ w.cpu().float().t(), slack=slack)


@pytest.mark.parametrize(
    ("dtype", "hidden"), [(torch.float32, 300), (torch.bfloat16, 300), (torch.bfloat16, 1056)]
)
def test_router_rows_do_not_depend_on_the_batch(
    device: str, dtype: torch.dtype, hidden: int
) -> None:
    x = normal(5000, hidden).to(device, dtype)
    w = normal(40, hidden, seed=2).to(device, dtype)
    alone = torch.cat([ops.router_gemm(row[None], w) for row in x[:70]])
    # Many rows take other tiles.
    many = ops.router_gemm(x, w)
    assert torch.equal(many[:70], alone)
    parts = [ops.router_gemm(part, w) for part in x.split(1300)]
    assert torch.equal(torch.cat(parts), many)
    for rows in (2, 3, 5, 31, 33, 70):
        assert torch.equal(ops.router_gemm(x[:rows], w), alone[:rows])
    assert torch.equal(ops.router_gemm(x[:70], w[:7]), alone[:, :7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_invariant", [False, True])
def test_logits_of_many_rows(device: str, dtype: torch.dtype, is_invariant: bool) -> None:
    layer = RoutedExperts()
    layer.is_batch_invariant = is_invariant
    x, w = normal(700, 512).to(device, dtype), normal(48, 512, seed=1).to(device, dtype)
    out = torch.full((700, 48), NAN, device=device)
    layer.router_logits(x, w, out)
    expected = to_numpy(x) @ to_numpy(w).T
    slack = 2e-7 * 512 * float(x.float().abs().max() * w.float().abs().max())
    assert_accurate(out, expected, x.cpu().float() @ w.cpu().float().t(), slack=slack)
    if is_invariant or dtype == torch.float32:
        assert torch.equal(out, ops.router_gemm(x, w))


def test_router_strides(device: str) -> None:
    wide, wide_w = normal(6, 80).to(device), normal(9, 70, seed=3).to(device)
    out = torch.full((6, 12), NAN, device=device)
    ops.router_gemm(wide[:, 5:69], wide_w[:, 3:67], out=out[:, 1:10])
    expected = ops.router_gemm(wide[:, 5:69].contiguous(), wide_w[:, 3:67].contiguous())
    assert torch.equal(out[:, 1:10], expected)
    assert out[:, :1].isnan().all()
    assert out[:, 10:].isnan().all()
