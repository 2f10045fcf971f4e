# SPDX-License-Identifier: Apache-2.0
"""Acceptance rules over the open positions of one block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from brute_force.proposals import Proposal
from brute_force.settings import PROBABILITY_ERROR, Settings


def acceptance_margin(
    proposals: Mapping[int, Proposal], settings: Settings, threshold: float, is_gate_open: bool
) -> float:
    """How far the accepted set is from changing, in units of the float32 error."""
    values = [abs(float(p.probability) - threshold) for p in proposals.values()]
    is_threshold = settings.rule.startswith("threshold")
    if is_gate_open or not is_threshold:
        rankings = sorted(
            (p.ranking for p in proposals.values() if math.isfinite(p.ranking)), reverse=True
        )
        gaps = [a - b for a, b in itertools.pairwise(rankings)]
        # The threshold rules need the best position only, and only when none passes.
        values += gaps[:1] if is_threshold else gaps
        if settings.rule == "hierarchy":
            values += [
                abs(float(p.probability) - settings.low_threshold) for p in proposals.values()
            ]
        if settings.rule in ("factor", "entropy_bound"):
            keys = sorted(p.entropy for p in proposals.values() if math.isfinite(p.entropy))
            total = 0.0
            for n, key in enumerate(keys, start=1):
                values += [abs(total - settings.entropy_bound)] if n > 1 else []
                total += key
            values += [b - a for a, b in itertools.pairwise(keys)]
            order = sorted((float(p.probability) for p in proposals.values()), reverse=True)
            for n, probability in enumerate(order, start=1):
                values.append(abs((n + 1) * (1 - probability) - settings.factor) / (n + 1))
    return min([math.inf, *values]) / PROBABILITY_ERROR


def accepted_positions(
    proposals: Mapping[int, Proposal],
    settings: Settings,
    threshold: float,
    is_gate_open: bool,
    open_steps: int,
) -> set[int]:
    """Open positions that take their token in this step."""
    if not proposals:
        return set()
    limit = np.float32(threshold)
    confident = {i for i, p in proposals.items() if p.probability > limit}
    if settings.rule == "threshold_non_strict":
        confident = {i for i, p in proposals.items() if p.probability >= limit}
    if settings.rule == "leftmost_prefix":
        return leftmost_positions(proposals, limit, is_gate_open)
    ranked = sorted(proposals, key=lambda i: (-proposals[i].ranking, i))
    steps = settings.denoising_steps or settings.block_size
    base, extra = divmod(settings.block_size, steps)
    count = base + (1 if open_steps < extra else 0)
    if open_steps >= steps:
        count = max(1, base + (1 if steps - 1 < extra else 0))
    enough = confident if len(confident) >= count else set(ranked[:count])
    chosen = {
        "threshold": lambda: confident or {ranked[0]},
        "threshold_non_strict": lambda: confident or {ranked[0]},
        "static": lambda: set(ranked[:count]),
        "dynamic": lambda: enough,
        "sequential": lambda: set(sorted(proposals)[:count]),
        "factor": lambda: factor_positions(proposals, settings.factor),
        "entropy_bound": lambda: entropy_positions(proposals, settings.entropy_bound),
        "hierarchy": lambda: hierarchy_positions(proposals, confident, ranked, settings),
    }[settings.rule]()
    # A closed gate takes away what the rule accepts below the threshold.
    return chosen if is_gate_open else chosen & confident


def leftmost_positions(
    proposals: Mapping[int, Proposal], limit: np.float32, is_gate_open: bool
) -> set[int]:
    """From the left while the probability reaches the threshold; at least one if the gate is open."""
    order = sorted(proposals)
    chosen = set(itertools.takewhile(lambda i: proposals[i].probability >= limit, order))
    return chosen or ({order[0]} if is_gate_open else set())


def hierarchy_positions(
    proposals: Mapping[int, Proposal], confident: set[int], ranked: list[int], settings: Settings
) -> set[int]:
    """The best of every run of masks above the low threshold, all above the threshold, the best."""
    chosen = confident | {ranked[0]}
    runs: list[list[int]] = []
    for i in sorted(proposals):
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    for run in runs:
        best = min(run, key=lambda i: (-proposals[i].ranking, i))
        if proposals[best].probability > np.float32(settings.low_threshold):
            chosen.add(best)
    return chosen


def factor_positions(proposals: Mapping[int, Proposal], factor: float) -> set[int]:
    """The n most probable, with the largest n for which (n + 1)(1 - p(n)) < factor."""
    order = sorted(proposals, key=lambda i: (-proposals[i].probability, i))
    best = 1
    for n, i in enumerate(order, start=1):
        if (n + 1) * (1 - float(proposals[i].probability)) < factor:
            best = n
    return set(order[:best])


def entropy_positions(proposals: Mapping[int, Proposal], bound: float) -> set[int]:
    """Ascending entropy while the sum of the entropies before does not pass the bound."""
    chosen: set[int] = set()
    total = 0.0
    for i in sorted(proposals, key=lambda i: (proposals[i].entropy, i)):
        if chosen and total > bound:
            break
        chosen.add(i)
        total += proposals[i].entropy
    return chosen
