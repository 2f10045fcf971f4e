# SPDX-License-Identifier: Apache-2.0
"""One logits row: the proposed token and what is known about it, in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import numpy as np

from brute_force.settings import LOGIT_ERROR, PROBABILITY_ERROR, RequestSettings, Settings


@dataclass
class Proposal:
    """What the row of one position offers."""

    token: int
    probability: np.float32  # compared with thresholds
    ranking: float
    entropy: float
    margin: float = math.inf
    argmax: int = -1
    argmax_probability: float = 0.0  # at temperature 1
    top_ids: list[int] = field(default_factory=list)
    top_probabilities: list[float] = field(default_factory=list)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def candidates_of(size: int, settings: Settings) -> np.ndarray:
    excluded = settings.suppressed | {settings.mask_id}
    return _candidates(size, settings.candidate_limit, excluded)


@functools.cache
def _candidates(size: int, limit: int, excluded: frozenset[int]) -> np.ndarray:
    is_candidate = np.arange(size) < limit
    is_candidate[list(excluded)] = False
    return np.flatnonzero(is_candidate)


def descending(values: np.ndarray) -> np.ndarray:
    """Places of the values from the largest on; of equal ones the first comes first."""
    return np.argsort(-values, kind="stable")


def propose(row: np.ndarray, settings: Settings, request: RequestSettings, draw: float) -> Proposal:
    """Token, probability and ranking of one row."""
    logits = row.astype(np.float64)
    candidates = candidates_of(len(row), settings)
    if settings.has_renormalisation:
        outside = np.ones(len(row), bool)
        outside[candidates] = False
        logits[outside] = -np.inf
    raw = softmax(logits)
    temperature = request.temperature
    is_greedy = temperature < 1e-5
    tempered = raw if is_greedy else softmax(logits / temperature)
    processed = tempered
    if is_greedy:
        # The first of equal maxima is the lowest id.
        token = int(candidates[np.argmax(row[candidates])])
        runner_up, best_logit = np.partition(row[candidates], -2)[-2:]
        margin = float(best_logit - runner_up) / LOGIT_ERROR
    else:
        processed, margin = filtered(tempered, settings, request)
        kept = candidates[processed[candidates] > 0]
        if len(kept) == 0:
            kept, processed = candidates[[np.argmax(tempered[candidates])]], tempered
        cumulative = np.cumsum(processed[kept])
        above = np.flatnonzero(cumulative > draw * cumulative[-1])
        token = int(kept[above[0]] if len(above) else kept[-1])
        distances = np.abs(cumulative[:-1] / cumulative[-1] - draw)
        margin = min(margin, float(distances.min(initial=math.inf)) / PROBABILITY_ERROR)
    space = {"processed": processed, "tempered": tempered, "raw": raw}[settings.confidence_space]
    positive = processed[processed > 0]
    entropy = -float((positive * np.log(positive)).sum())
    second, best = np.partition(processed[candidates], -2)[-2:]
    ranking = {
        "max_prob": float(space[token]),
        "margin_confidence": float(best - second),
        "neg_entropy": -entropy,
    }[settings.ranking]
    order = candidates[descending(raw[candidates])[: max(settings.merge_top_k, 1)]]
    proposal = Proposal(
        token,
        np.float32(space[token]),
        ranking,
        entropy,
        margin,
        argmax=int(order[0]),
        argmax_probability=float(raw[order[0]]),
        top_ids=[int(i) for i in order],
        top_probabilities=[float(raw[i]) for i in order],
    )
    if token in settings.demoted:
        proposal.probability = np.float32(-np.inf)
        proposal.ranking, proposal.entropy = -math.inf, math.inf
    return proposal


def filtered(
    probabilities: np.ndarray, settings: Settings, request: RequestSettings
) -> tuple[np.ndarray, float]:
    """The distribution after the filters, and how far the kept set is from changing."""
    steps = {
        "p_then_k": (_top_p, _min_p, _top_k),
        "k_then_p": (_top_k, _min_p, _top_p),
    }[settings.filter_order]
    margin = math.inf
    for step in steps:
        keep, distance = step(probabilities, request)
        margin = min(margin, distance / PROBABILITY_ERROR)
        probabilities = np.where(keep, probabilities, 0.0)
        probabilities = probabilities / probabilities.sum()
    return probabilities, margin


def _everything(probabilities: np.ndarray) -> tuple[np.ndarray, float]:
    return probabilities > 0, math.inf


def _top_p(probabilities: np.ndarray, request: RequestSettings) -> tuple[np.ndarray, float]:
    if request.top_p >= 1:
        return _everything(probabilities)
    order = descending(probabilities)
    keep = np.zeros(len(probabilities), bool)
    bound = float(np.float32(request.top_p))
    before = np.cumsum(probabilities[order])[:-1]  # of all but the first
    keep[order[0]] = True
    keep[order[1:][before <= bound]] = True
    return keep & (probabilities > 0), float(np.abs(before - bound).min(initial=math.inf))


def _top_k(probabilities: np.ndarray, request: RequestSettings) -> tuple[np.ndarray, float]:
    if request.top_k <= 0:
        return _everything(probabilities)
    count = min(request.top_k, len(probabilities))
    values = np.sort(probabilities)[::-1]
    bound = values[count - 1]
    gap = bound - values[count] if count < len(values) and values[count] > 0 else math.inf
    return (probabilities >= bound) & (probabilities > 0), float(gap)


def _min_p(probabilities: np.ndarray, request: RequestSettings) -> tuple[np.ndarray, float]:
    if request.min_p <= 0:
        return _everything(probabilities)
    bound = float(np.float32(request.min_p)) * probabilities.max()
    positive = probabilities[probabilities > 0]
    return (probabilities >= bound) & (probabilities > 0), float(np.abs(positive - bound).min())
