# SPDX-License-Identifier: Apache-2.0
"""Which share of the rows that requests may have their last decode steps ran."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from diffulex_ext import _core

if TYPE_CHECKING:
    from typing import Final

__all__ = ["HOST_LIMITS", "LOOP_LIMITS", "LOW_SHARE", "RowShare", "ShareLimits"]

_NUM_STEPS = 8
#: Void rows are left out where the last steps ran less than this share of theirs.
LOW_SHARE = 0.8


class ShareLimits:
    """From when on void rows are worth leaving out. Counts: times would change choices from run to run,
    and with them the last bits of products.

    Args:
        rows: that the requests of a step may have.
        products: of the void rows of a step.
        upper_share: of their rows that steps must run until void rows are no longer left out.
    """

    def __init__(self, rows: int, products: float, upper_share: float) -> None:
        self.rows, self.products, self.upper_share = rows, products, upper_share

    def is_worth(self, num_rows: int, num_products: float) -> bool:
        """Whether steps that might have `num_rows` rows gain by leaving out so many products."""
        return num_rows >= self.rows and num_products >= self.products


#: To have the host pack a step, for which the device waits: 1.3 ms at 700 TFLOP/s.
HOST_LIMITS: Final = ShareLimits(256, 4.5e11, LOW_SHARE)
#: To have the device pack it, and the host launch as much as that are: a tenth of a millisecond. To
#: change how the device runs steps costs one of the host.
LOOP_LIMITS: Final = ShareLimits(128, 5e10, 0.9)


class RowShare:
    """Says whether decode steps had better run valid rows alone.

    Args:
        rows_per_request: most rows of a request.
        products_per_row: weights that a row is multiplied by.
        limits: below which it is not worth it.
    """

    def __init__(self, rows_per_request: int, products_per_row: int, limits: ShareLimits) -> None:
        self._rows_per_request, self._products_per_row = rows_per_request, products_per_row
        self._limits = limits
        self._last_id = -1
        self._is_low = False
        #: Real rows and all rows of each step.
        self._steps: deque[tuple[int, int]] = deque(maxlen=_NUM_STEPS)

    def is_low(self, plan: _core.StepPlan) -> bool:
        """Whether void rows are worth leaving out; `plan`, unpadded, is the last step."""
        if plan.kind != _core.PlanKind.DECODE:
            return False
        if plan.step_id != self._last_id:
            self._last_id = plan.step_id
            self._steps.append((plan.num_rows, plan.num_reqs * self._rows_per_request))
            self._is_low = self._find()
        return self._is_low

    def _find(self) -> bool:
        num_real, num_all = (sum(counts) for counts in zip(*self._steps, strict=True))
        share = self._limits.upper_share if self._is_low else LOW_SHARE
        num_void = (num_all - num_real) / len(self._steps)
        is_worth = self._limits.is_worth(self._steps[-1][1], num_void * self._products_per_row)
        return is_worth and num_real < share * num_all
