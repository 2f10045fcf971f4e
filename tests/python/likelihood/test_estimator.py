# SPDX-License-Identifier: Apache-2.0
"""Which positions are masked: numbers of masks, factors, seeds."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from diffulex.likelihood.estimator import Estimate, sample_masks, stratified_counts

#: Log-probabilities of a toy model whose tokens do not depend on each other.
TOY = np.log(np.array([0.9, 0.02, 0.4, 0.1]))


def estimate_of(logprobs: np.ndarray, estimate: Estimate, request: int = 0) -> float:
    masks = sample_masks(len(logprobs), estimate, request)
    return math.fsum(factor * logprobs[mask].sum() for mask, factor in masks)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 4), (3, 2), (4, 4), (5, 8), (7, 3), (40, 32)])
def test_numbers_of_masks_are_uniform_at_every_place_of_a_batch(num_tokens: int, size: int) -> None:
    table = np.array([stratified_counts(k, num_tokens, size) for k in range(1, num_tokens + 1)])
    for place in range(size):
        assert sorted(table[:, place]) == list(range(1, num_tokens + 1))


def test_numbers_of_masks_are_spread_within_a_batch() -> None:
    assert sorted(stratified_counts(3, 8, 8)) == list(range(1, 9))
    spread = Counter(stratified_counts(5, 4, 32).tolist())
    assert set(spread) == {1, 2, 3, 4}
    assert max(spread.values()) - min(spread.values()) <= 1


def test_one_token_takes_one_sample() -> None:
    ((mask, factor),) = sample_masks(1, Estimate(), 7)
    assert (mask.tolist(), factor) == ([True], 1.0)


def test_factors_make_every_sample_count_all_tokens() -> None:
    """L / k times k masked tokens of log-probability 1 is L."""
    for mc_num, size in ((1, 1), (5, 2), (128, 32)):
        estimate = Estimate(mc_num=mc_num, batch_size=size)
        assert estimate_of(np.ones(6), estimate) == pytest.approx(6.0)


def test_integers_of_numpy_are_integers() -> None:
    given = Estimate(mc_num=np.int64(9), batch_size=np.int32(4), seed=np.int64(-3))  # type: ignore[arg-type]
    assert given == Estimate(mc_num=9, batch_size=4, seed=-3)
    assert type(given.seed) is type(given.mc_num) is int
    assert estimate_of(TOY, given) == estimate_of(TOY, Estimate(mc_num=9, batch_size=4, seed=-3))


def test_equal_samples_are_one() -> None:
    masks = sample_masks(2, Estimate(mc_num=128), 0)
    assert len(masks) == 3
    assert len({mask.tobytes() for mask, _ in masks}) == 3


def test_mean_of_many_samples_is_the_sum_of_independent_tokens() -> None:
    """Tokens that do not depend on each other: the bound is the log-likelihood itself."""
    values = np.array([estimate_of(TOY, Estimate(mc_num=1), place) for place in range(4096)])
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert abs(values.mean() - TOY.sum()) < 3 * error


def test_stratified_variance_is_below_plain_variance() -> None:
    """The value of a sample depends on k where tokens are easier with fewer masks."""

    def value(size: int, seed: int) -> float:
        masks = sample_masks(8, Estimate(mc_num=8, batch_size=size, seed=seed), 0)
        return math.fsum(factor * mask.sum() * -float(mask.sum()) for mask, factor in masks)

    stratified = np.var([value(8, seed) for seed in range(200)])
    plain = np.var([value(1, seed) for seed in range(200)])
    assert stratified < 0.1 * plain


def test_draws_depend_on_seed_request_and_block_alone() -> None:
    estimate = Estimate(mc_num=4, batch_size=4, seed=5)

    def drawn(*key: int) -> list[bytes]:
        return [mask.tobytes() for mask, _ in sample_masks(40, Estimate(4, 4, key[0]), *key[1:])]

    assert drawn(5, 1, 0) == drawn(5, 1, 0)
    assert drawn(5, 1, 0) == [m.tobytes() for m, _ in sample_masks(40, estimate, 1)]
    assert len({tuple(drawn(*key)) for key in ((5, 1, 0), (6, 1, 0), (5, 2, 0), (5, 1, 1))}) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mc_num": 0}, "expected mc_num of at least 1, got 0"),
        ({"mc_num": True}, "expected mc_num of at least 1, got True"),
        ({"batch_size": 1.5}, "expected batch_size of at least 1, got 1.5"),
        ({"seed": 2**64}, "expected seed in"),
        ({"seed": "0"}, "expected seed in"),
        ({"guidance": -1}, "expected guidance >= 0, got -1"),
        ({"guidance": math.nan}, "expected guidance >= 0, got nan"),
        ({"check_greedy": 1}, "expected check_greedy True or False, got 1"),
    ],
)
def test_settings_are_checked(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Estimate(**fields)
