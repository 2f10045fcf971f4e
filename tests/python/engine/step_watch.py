# SPDX-License-Identifier: Apache-2.0
"""What the steps of an engine ran and decided."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diffulex.engine.engine import Diffulex
from diffulex_ext import _core


class Watched:
    """Rows of every decode plan, and the confidence of every position that a step decided."""

    def __init__(self, engine: Diffulex, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self.decided: dict[tuple[int, int, int, int], tuple[int, float]] = {}
        self._nfe: dict[int, int] = {}
        self._scheduler = engine._scheduler
        self._complete = engine._scheduler.complete_step
        monkeypatch.setattr(engine._loop, "_scheduler", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def complete_step(self, plan: _core.StepPlan, output: _core.SamplerOutput) -> Any:
        count = plan.num_reqs - plan.num_padded_reqs
        if plan.kind == _core.PlanKind.DECODE:
            starts = plan.cu_seqlens_q[: count + 1]
            real = int(np.sum(plan.valid_slices[:count] - starts[:-1]))
            self.rows.append((real, int(starts[-1]), count))
        for req_id in plan.req_ids[:count].tolist():
            self._nfe[req_id] = self._nfe.get(req_id, 0) + 1
        ids, values = output.write_ids, output.confidence
        for blk in range(plan.num_blocks):
            req_id = int(plan.req_ids[plan.blk_req[blk]])
            for rel in np.flatnonzero(ids[blk] >= 0).tolist():
                key = req_id, self._nfe[req_id], int(plan.blk_start[blk]), rel
                self.decided[key] = int(ids[blk, rel]), float(values[blk, rel])
        return self._complete(plan, output)
