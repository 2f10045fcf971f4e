# SPDX-License-Identifier: Apache-2.0
"""Which row predicts which position, and sampled proposals, through token_stats and acceptance."""

from __future__ import annotations

import pytest
import torch

import sampling_vectors as vectors
from diffulex import ops
from diffulex.ops import AcceptRule, StatsColumn, TokenStats
from rewriting_cases import MASK, ints, writes

CARRY = [0.9, 0.02, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01]


def carry(device: str) -> torch.Tensor:
    return torch.tensor([CARRY], dtype=torch.float64).log().float().to(device)


def stats_of(device: str, rows: list[int]) -> TokenStats:
    """Greedy statistics; row 4 is the saved carry."""
    return ops.token_stats(
        vectors.logits(device),
        extra_logits=carry(device),
        row_index=ints(device, *rows),
        forbidden_ids=vectors.mask_ids(device),
    )


def accept(
    device: str,
    stats: TokenStats,
    tau: float,
    tokens: list[int] | None = None,
    rule: AcceptRule = AcceptRule.THRESHOLD,
) -> dict[int, int]:
    result = ops.accept_mask_fill(
        torch.tensor([tokens or [MASK] * 4], device=device),
        ints(device, 0, 1, 2, 3)[None],
        ints(device, 0),
        torch.ones(1, dtype=torch.uint8, device=device),
        torch.tensor([tau], device=device),
        ints(device, 0),
        stats.ids,
        stats.stats,
        mask_token_id=MASK,
        rule=rule,
    )
    return writes(result.write_ids)


def test_vector_d_carry(device: str) -> None:
    stats = stats_of(device, [4, 0, 1, 2])
    assert stats.ids.tolist() == [0, 1, 2, 3]
    assert stats.stats[:, StatsColumn.CONFIDENCE].tolist() == pytest.approx(
        [0.90, 0.92, 0.60, 0.96], abs=1e-6
    )
    assert accept(device, stats, 0.91) == {1: 1, 3: 3}
    assert accept(device, stats, 0.97) == {3: 3}


def test_vector_d_local_shift_and_seed(device: str) -> None:
    stats = stats_of(device, [0, 0, 1, 2])
    tokens = [5, MASK, MASK, MASK]
    assert accept(device, stats, 0.91, tokens) == {1: 1, 3: 3}
    assert accept(device, stats, 0.97, tokens) == {3: 3}
    assert stats_of(device, [3]).ids.tolist() == [4]


def test_vector_d_the_carry_proposes_what_the_row_did(device: str) -> None:
    # Step t reads the stored block's last row directly, step t + 1 its saved copy.
    window = torch.cat([vectors.logits(device)[:3], carry(device), vectors.logits(device)])
    direct = ops.token_stats(window, row_index=ints(device, 3))
    saved = ops.token_stats(
        vectors.logits(device), extra_logits=window[3:4], row_index=ints(device, 4)
    )
    assert torch.equal(direct.ids, saved.ids)
    assert torch.equal(direct.stats, saved.stats)


@pytest.mark.parametrize(
    ("uniforms", "ids", "taken"),
    [
        ([0.5, 0.5, 0.5, 0.5], [1, 2, 3, 4], {0: 1, 2: 3}),
        ([0.01, 0.97, 0.99, 0.90], [0, 6, 5, 5], {3: 5}),
    ],
)
def test_vector_c_sampled(
    device: str, uniforms: list[float], ids: list[int], taken: dict[int, int]
) -> None:
    stats = ops.token_stats(
        vectors.logits(device),
        forbidden_ids=vectors.mask_ids(device),
        inv_temperature=torch.ones(4, device=device),
        uniforms=torch.tensor(uniforms, dtype=torch.float64, device=device),
    )
    assert stats.ids.tolist() == ids
    assert accept(device, stats, 0.85, rule=AcceptRule.DYNAMIC) == taken
