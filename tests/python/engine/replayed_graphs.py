# SPDX-License-Identifier: Apache-2.0
"""Graphs of a device that has none: what they hold runs anew each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffulex.runner.step_graphs import NUM_WARMUPS

#: Bounds on the context of engines that have such graphs.
BOUNDS = (32, 64, 128)


class Replayed:
    """As StepGraphs, for a device without graphs."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self._runs: dict[Any, Callable[[], None]] = {}

    @property
    def keys(self) -> tuple[Any, ...]:
        return tuple(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, key: Any) -> bool:
        return key in self._runs

    def capture(
        self,
        key: Any,
        fill: Callable[[], None],
        run: Callable[[], None],
        num_warmups: int = NUM_WARMUPS,
    ) -> None:
        assert key not in self._runs
        assert num_warmups == NUM_WARMUPS or (num_warmups == 1 and self._runs)
        for _ in range(num_warmups):
            fill()
            run()
        fill()
        self._runs[key] = run

    def replay(self, key: Any) -> None:
        self._runs[key]()
