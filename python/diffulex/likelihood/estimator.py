# SPDX-License-Identifier: Apache-2.0
"""The Monte-Carlo estimator of a masked model's log-likelihood.

One sample of L tokens draws k of 1..L, masks k of them, and counts (L / k) times the sum of the masked
tokens' log-probabilities. Its mean is a lower bound of the log-likelihood, in expectation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Estimate", "is_int", "sample_masks", "stratified_counts"]

_SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class Estimate:
    """How likelihoods are estimated.

    Attributes:
        mc_num: samples of a request, or of each of its blocks; one token takes one, which is exact.
        batch_size: samples whose numbers of masks are stratified together; 1 is plain sampling.
        seed: key of the draws: with the place of a request and of a sample it fixes every draw.
        guidance: scale of unsupervised guidance, l + scale * (l - l without the prompt); 0 is off.
        check_greedy: also find out whether the tokens are those of greedy decoding.

    Raises:
        ValueError: a value is out of range.
    """

    mc_num: int = 128
    batch_size: int = 32
    seed: int = 0
    guidance: float = 0.0
    check_greedy: bool = False

    def __post_init__(self) -> None:
        for name in ("mc_num", "batch_size"):
            value = getattr(self, name)
            if not is_int(value) or value < 1:
                raise ValueError(f"score: expected {name} of at least 1, got {value!r}")
            object.__setattr__(self, name, int(value))
        if not is_int(self.seed) or not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"score: expected seed in [-2**63, 2**64), got {self.seed!r}")
        object.__setattr__(self, "seed", int(self.seed))
        guidance = self.guidance
        is_number = isinstance(guidance, (int, float)) and not isinstance(guidance, bool)
        if not is_number or not math.isfinite(guidance) or guidance < 0:
            raise ValueError(f"score: expected guidance >= 0, got {guidance!r}")
        if not isinstance(self.check_greedy, bool):
            raise ValueError(
                f"score: expected check_greedy True or False, got {self.check_greedy!r}"
            )


def is_int(value: object) -> bool:
    """Whether a value is an integer, of Python or NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def stratified_counts(first: int, num_tokens: int, batch_size: int) -> NDArray[np.int64]:
    """Numbers of masks [batch_size] of a batch whose first sample has `first`, spread over 1..L.

    Halves are rounded up: then each of them is uniform where `first` is.
    """
    steps = np.arange(batch_size) * num_tokens / batch_size
    return (np.floor(first + steps + 0.5).astype(np.int64) - 1) % num_tokens + 1


def _generator(seed: int, request: int, block: int, sample: int) -> np.random.Generator:
    key = seed % 2**_SEED_BITS
    return np.random.Generator(np.random.Philox(key=key, counter=[0, block, sample, request]))


def sample_masks(
    num_tokens: int, estimate: Estimate, request: int, block: int = 0
) -> list[tuple[NDArray[np.bool_], float]]:
    """Distinct masks [L] and the factor of the sum of their log-probabilities in the estimate.

    Args:
        num_tokens: L, at least 1.
        estimate: seed and number of samples.
        request: id of the request, in [0, 2**63).
        block: place of the block.
    """
    if num_tokens == 1:
        return [(np.ones(1, dtype=np.bool_), 1.0)]
    counts = np.zeros(0, dtype=np.int64)
    weights: dict[bytes, float] = {}
    for sample in range(estimate.mc_num):
        draws = _generator(estimate.seed, request, block, sample)
        place = sample % estimate.batch_size
        if place == 0:
            first = int(draws.integers(1, num_tokens + 1))
            size = min(estimate.batch_size, estimate.mc_num - sample)
            counts = stratified_counts(first, num_tokens, size)
        count = int(counts[place])
        mask = np.zeros(num_tokens, dtype=np.bool_)
        mask[draws.permutation(num_tokens)[:count]] = True
        # Equal samples are one forward.
        key = mask.tobytes()
        weights[key] = weights.get(key, 0.0) + num_tokens / count / estimate.mc_num
    return [(np.frombuffer(key, dtype=np.bool_), weight) for key, weight in weights.items()]
