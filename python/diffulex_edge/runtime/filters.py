# SPDX-License-Identifier: Apache-2.0
"""Which ids of a row top-k, top-p and min-p keep."""

from __future__ import annotations

import math

from diffulex.families.base import FilterOrder


def kept_ids(
    logits: list[float], top_k: int, top_p: float, min_p: float, *, order: int, beta: float
) -> list[int]:
    """Ids the filters keep, in descending order of logit; -inf logits are not in the distribution.

    `beta` is the inverse temperature. Each filter renormalises what it gets.
    """
    kept = [v for v, logit in enumerate(logits) if logit > -math.inf]
    kept.sort(key=lambda v: (-logits[v], v))

    def masses() -> list[float]:
        top = logits[kept[0]] * beta
        values = [math.exp(logits[v] * beta - top) for v in kept]
        total = math.fsum(values)
        return [value / total for value in values]

    def by_top_k() -> list[int]:
        if top_k <= 0 or top_k >= len(kept):
            return kept
        return [v for v in kept if logits[v] >= logits[kept[top_k - 1]]]

    def by_min_p() -> list[int]:
        probs = masses()
        return kept if min_p <= 0 else [v for v, p in zip(kept, probs) if p >= min_p * probs[0]]

    def by_top_p() -> list[int]:
        if top_p >= 1:
            return kept
        before, result = 0.0, list[int]()
        for v, p in zip(kept, masses()):
            if result and before > max(0.0, top_p):
                break
            result.append(v)
            before += p
        return result

    steps = [by_top_p, by_min_p, by_top_k]
    for step in steps if order == FilterOrder.TOP_P_FIRST else reversed(steps):
        kept = step()
    return kept
