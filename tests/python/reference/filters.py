# SPDX-License-Identifier: Apache-2.0
"""References of `sample_filtered` and `entropy_bound_mask`, in plain Python: rows are sorted."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from diffulex.ops.sampling import (
    ConfidenceSpace,
    ExclusionMode,
    FilterOrder,
    StatsColumn,
    TokenStats,
)
from diffulex_edge.runtime.filters import kept_ids

if TYPE_CHECKING:
    from torch import Tensor


@torch.no_grad()
def sample_filtered_reference(
    logits: Tensor,
    inv_temperature: Tensor,
    uniforms: Tensor,
    out: TokenStats,
    *,
    row_index: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    forbidden_ids: Tensor | None = None,
    vocab_limit: int = -1,
    softcap: float = 0.0,
    exclusion: int = ExclusionMode.EXCLUDE,
    filter_order: int = FilterOrder.TOP_P_FIRST,
    confidence_space: int = ConfidenceSpace.PROCESSED,
) -> TokenStats:
    """Reference of `sample_filtered` without extra rows."""
    num_rows, num_columns = out.ids.shape[0], logits.shape[1]
    forbidden = set[int]()
    if exclusion != ExclusionMode.OFF:
        forbidden |= set([] if forbidden_ids is None else forbidden_ids.tolist())
        forbidden |= set(range(vocab_limit if vocab_limit >= 0 else num_columns, num_columns))
    for row in range(num_rows):
        k = 0 if top_k is None else int(top_k[row])
        p = 1.0 if top_p is None else float(top_p[row])
        m = 0.0 if min_p is None else float(min_p[row])
        beta = float(inv_temperature[row])
        if beta == 0 or not (k > 0 or p < 1 or m > 0):
            continue
        source = row if row_index is None else int(row_index[row])
        out.ids[row] = -1
        out.stats[row] = 0.0
        if source < 0:
            continue
        values = logits[source].float()
        out.stats[row, StatsColumn.BAD_COUNT] = float((~torch.isfinite(values)).sum())
        largest = torch.finfo(torch.float32).max
        values = values.nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
        capped = softcap * torch.tanh(values / softcap) if softcap > 0 else values
        raw = values.tolist()
        candidates = [v for v in range(num_columns) if v not in forbidden and raw[v] > -math.inf]
        if not candidates:
            continue
        counted = [
            value if raw[v] > -math.inf and (exclusion != 1 or v not in forbidden) else -math.inf
            for v, value in enumerate(capped.tolist())
        ]
        kept = kept_ids(counted, k, p, m, order=filter_order, beta=beta)
        best = min(candidates, key=lambda v: (-raw[v], v))
        drawable = sorted(set(kept) & set(candidates))
        space = [v for v in range(num_columns) if counted[v] > -math.inf]
        if drawable and confidence_space == ConfidenceSpace.PROCESSED:
            space = kept
        chosen = _draw(drawable, counted, beta, float(uniforms[row])) if drawable else best
        out.ids[row] = chosen
        out.stats[row, : StatsColumn.BAD_COUNT] = _record(
            space, candidates, raw, counted, beta, chosen
        )
    return out


def _draw(drawable: list[int], logits: list[float], beta: float, uniform: float) -> int:
    top = max(logits[v] for v in drawable) * beta
    masses = [math.exp(logits[v] * beta - top) for v in drawable]
    target, cumulative = uniform * math.fsum(masses), 0.0
    for v, mass in zip(drawable, masses):
        cumulative += mass
        if cumulative > target:
            return v
    return drawable[-1]


def _record(
    space: list[int],
    candidates: list[int],
    raw: list[float],
    logits: list[float],
    beta: float,
    chosen: int,
) -> Tensor:
    """Columns of the distribution over `space`, all but the last."""
    tempered = torch.tensor([logits[v] * beta for v in space], dtype=torch.float64)
    lse = float(torch.logsumexp(tempered, 0))
    probs = torch.exp(tempered - lse)
    everything = torch.tensor([z for z in logits if z > -math.inf], dtype=torch.float64)
    members = set(space)
    ranked = sorted((v for v in candidates if v in members), key=lambda v: (-raw[v], v))
    second = math.exp(logits[ranked[1]] * beta - lse) if len(ranked) > 1 else 0.0
    return torch.tensor(
        [
            math.exp(logits[chosen] * beta - lse),
            math.exp(logits[ranked[0]] * beta - lse),
            second,
            float(-torch.special.xlogy(probs, probs).sum()),
            lse,
            logits[ranked[0]],
            math.exp(logits[chosen] - float(torch.logsumexp(everything, 0))),
        ]
    )


@torch.no_grad()
def entropy_bound_mask_reference(entropy: Tensor, segments: Tensor, *, bound: float) -> Tensor:
    """Reference of `entropy_bound_mask`."""
    mask = torch.zeros(entropy.shape, dtype=torch.uint8, device=entropy.device)
    values, offsets = entropy.tolist(), segments.tolist()
    limit = float(torch.tensor(bound))
    for begin, end in itertools.pairwise(offsets):
        before = 0.0
        for rank, row in enumerate(sorted(range(begin, end), key=lambda row: (values[row], row))):
            mask[row] = int(bound < 0 or rank == 0 or before <= limit)
            before += values[row]
    return mask
