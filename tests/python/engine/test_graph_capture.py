# SPDX-License-Identifier: Apache-2.0
"""Capture of a CUDA graph beside other work of the process."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from diffulex.runner.graph_capture import captured_graph


@pytest.mark.cuda
def test_garbage_with_a_graph_does_not_break_the_next_capture() -> None:
    device = torch.device("cuda")
    stream = torch.cuda.Stream(device)
    pool = torch.cuda.graph_pool_handle()
    counter = torch.zeros(4, device=device)

    def step() -> None:
        counter.add_(1.0)

    def step_beside_garbage() -> None:
        for _ in range(1000):  # far more allocations than the collector's threshold
            cycle = SimpleNamespace()
            cycle.self = cycle
        step()

    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    counter.zero_()

    # Graphs that only the collector can free.
    for _ in range(8):
        owner = SimpleNamespace(graph=captured_graph(step, pool, stream))
        owner.self = owner
    del owner
    threshold = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        graph = captured_graph(step_beside_garbage, pool, stream)
    finally:
        gc.set_threshold(*threshold)
    assert gc.isenabled()
    graph.replay()
    torch.cuda.synchronize(device)
    assert counter.tolist() == [1.0] * 4


def test_want_of_memory_is_what_a_broken_capture_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end may raise something else, and leave another stream behind."""
    streams = ["before"]

    class Broken:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> None:
            streams.append("captured")

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Broken)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)

    def fails(error: Exception) -> None:
        raise error

    for error, kind in [
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
        (RuntimeError("no kernel"), RuntimeError),
    ]:
        with pytest.raises(kind) as raised:
            captured_graph(lambda error=error: fails(error), (0, 1), None)  # type: ignore[misc, arg-type]
        assert (raised.value is error) == (kind is torch.OutOfMemoryError)
        assert streams[-1] == "before"
