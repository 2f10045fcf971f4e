# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of decode forwards, one per number of requests.

Only shapes and addresses are baked in: every value a kernel reads comes from the device mirror of
the plan, which is refilled before each replay.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from diffulex.engine.graph_capture import captured_graph
from diffulex.logging import get_logger
from diffulex.ops.workspace import empty_workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["GraphRunner", "graph_buckets"]

logger = get_logger(__name__)

_SMALL_BUCKETS = (1, 2, 4, 8)
_BUCKET_STEP = 16
_MAX_BUCKET = 512
_NUM_WARMUPS = 2


def graph_buckets(max_num_reqs: int) -> tuple[int, ...]:
    """Request counts that get a graph: 1, 2, 4, 8, multiples of 16, and the maximum itself."""
    cap = min(max_num_reqs, _MAX_BUCKET)
    counts = {*_SMALL_BUCKETS, *range(_BUCKET_STEP, cap + 1, _BUCKET_STEP), cap}
    return tuple(sorted(count for count in counts if count <= cap))


class GraphRunner:
    """Captures a forward for every bucket and replays it.

    Owns the scratch memory of the captured kernels: a graph keeps its address, so it must neither
    move nor be freed while the graphs exist.

    Args:
        buckets: ascending request counts.
        rows_per_request: rows of one request.
        hidden_size: H.
        workspace_bytes: scratch that suffices for every bucket.
    """

    def __init__(
        self,
        buckets: Sequence[int],
        rows_per_request: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        workspace_bytes: int,
    ) -> None:
        self.buckets = tuple(buckets)
        self._rows = rows_per_request
        self._device = device
        self.workspace = empty_workspace(workspace_bytes, device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        num_rows = self.buckets[-1] * rows_per_request
        self._hidden = torch.zeros(num_rows, hidden_size, dtype=dtype, device=device)

    def capture(self, forward: Callable[[int, Tensor | None], Tensor]) -> None:
        """Captures all buckets, the largest first so that the smaller ones reuse its memory.

        Args:
            forward: hidden states [bucket * rows_per_request, H] from the static step tensors,
                given the bucket and the scratch memory; not kept.
        """

        def run(bucket: int) -> None:
            self._hidden[: bucket * self._rows].copy_(forward(bucket, self.workspace))

        start = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for bucket in reversed(self.buckets):
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for _ in range(_NUM_WARMUPS):
                    run(bucket)
            stream.synchronize()
            self._graphs[bucket] = captured_graph(partial(run, bucket), pool, stream)
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        logger.info("captured CUDA graphs for %s requests in %.1f s", self.buckets, seconds)

    def replay(self, bucket: int) -> Tensor:
        """Hidden states of the bucket's rows; valid until the next replay."""
        self._graphs[bucket].replay()
        return self._hidden[: bucket * self._rows]
