# SPDX-License-Identifier: Apache-2.0
"""Capture of one CUDA graph in a process that goes on working meanwhile."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from diffulex.ops.settled import settled_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.cuda import _POOL_HANDLE

__all__ = ["captured_graph"]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector off: a graph that dies while another is captured breaks it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def captured_graph(
    run: Callable[[], object], pool: _POOL_HANDLE, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """A graph of what `run` enqueues; nothing is executed.

    Kernels of the graph read weights ahead of the launches in front of them: `run` writes none. Other
    threads may allocate meanwhile (torch's default mode forbids that to the whole process).

    Args:
        run: must have run before on `stream`, so that no library initialises itself in the capture.
        pool: memory pool of `torch.cuda.graph_pool_handle`.
        stream: idle, not the default stream.

    Raises:
        torch.OutOfMemoryError: there is no memory for what `run` allocates.
    """
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    try:
        with (
            _no_collection(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            settled_weights(),
        ):
            run()
    except RuntimeError as error:
        # The end of a capture that has failed may raise in place of what made it fail.
        if isinstance(error.__context__, torch.OutOfMemoryError):
            raise error.__context__ from None
        raise
    finally:
        torch.cuda.set_stream(before)  # the end of a capture that has failed may raise before it
    return graph
