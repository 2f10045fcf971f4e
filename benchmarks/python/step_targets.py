# SPDX-License-Identifier: Apache-2.0
"""How long a decode step may take on an H200, and what a Python and Triton engine took there.

Block 32, CUDA graphs, random weights, bfloat16. The engine was measured on 2026-11-20. Which experts its
router hit was not recorded; rows that hit more experts have more to read, so a model with experts
may also pass by its own floor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["FLOOR_FACTOR", "TARGETS", "StepCase", "judge"]

#: A step of a model with experts passes within this many times the time to read its weights.
FLOOR_FACTOR = 1.25


class StepCase(NamedTuple):
    """One measurement; times in milliseconds, None = not known or not set."""

    shape: str
    buffer_size: int
    prompt_len: int
    batch: int
    target_ms: float | None = None
    peer_ms: float | None = None


TARGETS = (
    StepCase("sdar-8b", 1, 256, 1, 4.4, 8.39),
    StepCase("sdar-8b", 1, 256, 8, 5.5, 14.5),
    StepCase("sdar-8b", 1, 3000, 1, 4.7, 16.3),
    StepCase("sdar-8b", 1, 3000, 8, 6.3, 25.2),
    StepCase("sdar-8b", 4, 256, 1, 5.5, 10.1),
    StepCase("sdar-8b", 4, 256, 8, 28.0, 37.9),
    StepCase("llada2-mini", 1, 256, 1, 0.6 * 4.82, 4.82),
    StepCase("llada2-mini", 1, 256, 8, 0.6 * 6.93, 6.93),
    StepCase("llada2-mini", 1, 3000, 1),
    StepCase("llada2-mini", 1, 3000, 8),
    StepCase("llada2-mini", 4, 256, 1, None, 6.78),
    StepCase("llada2-mini", 4, 256, 8, None, 12.1),
)


def judge(row: dict[str, Any]) -> str | None:
    """pass or miss; None for rows that nothing is asked of."""
    limits = [] if row.get("target_ms") is None else [row["target_ms"]]
    if row.get("experts") is not None:
        limits.append(FLOOR_FACTOR * row["floor_ms"])
    if not limits:
        return None
    return "pass" if row["step_ms"] <= max(limits) else "miss"
