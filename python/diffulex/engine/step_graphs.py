# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of whole decode steps: forward, head, sampler, and the plan of the step behind."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.engine.graph_capture import captured_graph
from diffulex.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StepGraphs", "StepVariant"]

logger = get_logger(__name__)

_NUM_WARMUPS = 2


class StepVariant(NamedTuple):
    """What a captured step depends on beside the arrays it reads."""

    num_reqs: int
    is_drawn: bool  # a request draws its tokens
    is_filtered: bool  # and one narrows its draws


class StepGraphs:
    """One graph per variant, in one memory pool.

    Greedy variants are captured before the first request, the others when they are first needed:
    most engines never draw.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[StepVariant, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def buckets(self) -> tuple[int, ...]:
        """Request counts that have a graph, ascending."""
        return tuple(sorted({variant.num_reqs for variant in self._graphs}))

    def __contains__(self, variant: StepVariant) -> bool:
        return variant in self._graphs

    def capture(
        self, variant: StepVariant, fill: Callable[[], None], run: Callable[[], None]
    ) -> None:
        """Captures `run`; nothing may be in flight.

        Args:
            variant: what is captured.
            fill: puts legal values into the arrays that `run` reads.
            run: enqueues one step; not kept.
        """
        start = time.perf_counter()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARMUPS):
                fill()
                run()
            fill()
        stream.synchronize()
        self._graphs[variant] = captured_graph(run, self._pool, stream)
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        logger.debug("captured the decode step of %s in %.2f s", variant, seconds)

    def replay(self, variant: StepVariant) -> None:
        """Enqueues the step."""
        self._graphs[variant].replay()
