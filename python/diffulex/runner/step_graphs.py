# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of decode steps.

Only shapes and addresses are baked in: every value a kernel reads comes from device arrays, which
are refilled before each replay.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from diffulex.log import get_logger
from diffulex.runner.graph_capture import captured_graph

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

__all__ = ["NUM_WARMUPS", "StepGraphs"]

logger = get_logger(__name__)

#: Steps in front of a capture that load kernels and let libraries initialise themselves.
NUM_WARMUPS: Final = 2

Key = TypeVar("Key")

# cuBLAS keeps scratch for every stream it has seen for as long as the process lives, so that the
# graphs of a new engine are captured on a stream of a closed one. Never on that of a living one:
# graphs keep the scratch of their stream, and two engines may run at once.
_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def _take_stream(device: torch.device) -> torch.cuda.Stream:
    try:
        return _idle_streams[device].pop()
    except IndexError:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class StepGraphs(Generic[Key]):
    """Graphs by what they depend on beside the arrays they read, in one memory pool.

    Capture the largest first: the smaller ones reuse its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _take_stream(device)
        weakref.finalize(self, _idle_streams[device].append, self._stream)

    @property
    def keys(self) -> tuple[Key, ...]:
        """What is captured, in the order of the captures."""
        return tuple(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def capture(
        self,
        key: Key,
        fill: Callable[[], None],
        run: Callable[[], None],
        num_warmups: int = NUM_WARMUPS,
    ) -> None:
        """Captures `run`; nothing may be in flight.

        Args:
            key: what is captured.
            fill: puts legal values into the arrays that `run` reads.
            run: enqueues one step; not kept.
            num_warmups: steps in front of the capture, at least 1.
        """
        start = time.perf_counter()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(num_warmups):
                fill()
                run()
            fill()
        stream.synchronize()
        self._graphs[key] = captured_graph(run, self._pool, stream)
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        logger.debug("captured the decode step of %s in %.2f s", key, seconds)

    def replay(self, key: Key) -> None:
        """Enqueues the step."""
        self._graphs[key].replay()
