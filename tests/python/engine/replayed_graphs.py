# SPDX-License-Identifier: Apache-2.0
"""Graphs of a device that has none: what they hold runs anew each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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

    def capture(self, key: Any, fill: Callable[[], None], run: Callable[[], None]) -> None:
        assert key not in self._runs
        for _ in range(2):
            fill()
            run()
        fill()
        self._runs[key] = run

    def replay(self, key: Any) -> None:
        self._runs[key]()
