# SPDX-License-Identifier: Apache-2.0
"""Numbers about the order in which answers were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from diffulex.trace.trajectory import Trajectory

__all__ = ["kendall_tau", "order_statistics", "statistics_text"]

_QUANTILES = (10, 50, 90)
#: Rows of the comparison of all pairs that are made at once.
_CHUNK = 256


def kendall_tau(values: NDArray[np.int64]) -> float | None:
    """Rank correlation of `values` with their places, pairs of equal values left out: 1 rises, -1
    falls. None where no two values differ."""
    concordant = discordant = 0
    places = np.arange(len(values))
    for first in range(0, len(values), _CHUNK):
        rows = slice(first, first + _CHUNK)
        later = places[None, :] > places[rows, None]
        sign = np.sign(values[None, :] - values[rows, None])
        concordant += int(((sign > 0) & later).sum())
        discordant += int(((sign < 0) & later).sum())
    total = concordant + discordant
    return (concordant - discordant) / total if total else None


def order_statistics(trajectory: Trajectory) -> dict[str, Any]:
    """What a trajectory says about its order; quantities of tokens are None at level `blocks`.

    Returns:
        `steps`, `prefill_steps`, `seconds`, `tokens`, `tokens_per_step_mean` and `_max` (decided, of
        the steps that decided any), `max_open_blocks`; and of the answer's tokens `order_tau` (rank
        correlation of position and step), `block_order_tau` (the mean of it within blocks),
        `left_to_right` (share that was written when all before it was), `edits`, `edited_share`, and
        `confidence_mean`, `_p10`, `_p50`, `_p90`.
    """
    decided = [step.new_tokens for step in trajectory.steps if step.new_tokens]
    result: dict[str, Any] = {
        "steps": len(trajectory.steps),
        "prefill_steps": sum(step.is_prefill for step in trajectory.steps),
        "seconds": sum(step.seconds for step in trajectory.steps),
        "tokens": len(trajectory.token_ids),
        "tokens_per_step_mean": float(np.mean(decided)) if decided else None,
        "tokens_per_step_max": max(decided, default=None),
        "max_open_blocks": max((len(step.blocks) for step in trajectory.steps), default=0),
    }
    tokens = trajectory.tokens
    steps = np.array([token.step for token in tokens], dtype=np.int64)
    confidences = [token.confidence for token in tokens if token.confidence is not None]
    has_tokens = len(tokens) > 0
    result |= {
        "order_tau": kendall_tau(steps) if has_tokens else None,
        "block_order_tau": _within_blocks(trajectory, steps) if has_tokens else None,
        "left_to_right": float((steps >= np.maximum.accumulate(steps)).mean())
        if has_tokens
        else None,
        "edits": sum(token.edits for token in tokens) if has_tokens else None,
        "edited_share": float(np.mean([token.edits > 0 for token in tokens]))
        if has_tokens
        else None,
        "confidence_mean": float(np.mean(confidences)) if confidences else None,
    }
    for percent in _QUANTILES:
        value = float(np.percentile(confidences, percent)) if confidences else None
        result[f"confidence_p{percent}"] = value
    return result


def _within_blocks(trajectory: Trajectory, steps: NDArray[np.int64]) -> float | None:
    """The mean rank correlation over the blocks that have one."""
    starts = {block.start for step in trajectory.steps for block in step.blocks}
    edges = sorted(max(0, start - trajectory.prompt_len) for start in starts)
    parts = np.split(steps, [edge for edge in edges if 0 < edge < len(steps)])
    taus = [tau for tau in map(kendall_tau, parts) if tau is not None]
    return float(np.mean(taus)) if taus else None


def statistics_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line per quantity and a column per request, and their mean where there are more."""
    names = list(rows[0])
    columns = [[_shown(row[name]) for name in names] for row in rows]
    heads = [f"request {row}" for row in range(len(rows))]
    if len(rows) > 1:
        means = []
        for name in names:
            values = [row[name] for row in rows if row[name] is not None]
            means.append(_shown(float(np.mean(values)) if values else None))
        columns, heads = [means, *columns], ["mean", *heads]
    columns, heads = columns[:_MAX_COLUMNS], heads[:_MAX_COLUMNS]
    widths = [max(map(len, [head, *cells])) for head, cells in zip(heads, columns, strict=True)]
    left = max(map(len, names))
    lines = [" " * left + "".join(f"  {h:>{w}}" for h, w in zip(heads, widths, strict=True))]
    for index, name in enumerate(names):
        cells = (f"  {cells[index]:>{w}}" for cells, w in zip(columns, widths, strict=True))
        lines.append(f"{name:<{left}}{''.join(cells)}")
    return "\n".join(lines)


#: The mean and the first requests: a terminal has no place for more.
_MAX_COLUMNS = 6


def _shown(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
