# SPDX-License-Identifier: Apache-2.0
"""Work of several CUDA streams at once, bit for bit what each does alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def check_streams(works: Sequence[Callable[[], torch.Tensor]]) -> None:
    """Each of `works`, which make their results in memory of their own, on a stream of its own.

    First launch by launch, then as graphs, whose kernels are on the device together.
    """
    want = [work() for work in works]
    assert all(result.isfinite().all() for result in want)
    streams = [torch.cuda.Stream() for _ in works]
    torch.cuda.synchronize()

    def check(found: Sequence[torch.Tensor]) -> None:
        torch.cuda.synchronize()
        for one, other in zip(found, want, strict=True):
            assert torch.equal(one, other)

    for _ in range(5):
        found = []
        for stream, work in zip(streams, works, strict=True):
            with torch.cuda.stream(stream):
                found.append(work())
        check(found)
    graphs, found = [], []
    for stream, work in zip(streams, works, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found.append(work())
        graphs.append(graph)
    for _ in range(20):
        for result in found:
            result.fill_(torch.nan)
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        check(found)
