# SPDX-License-Identifier: Apache-2.0
"""Makes the shared modules importable and builds tiny engines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


import torch  # noqa: E402

from diffulex.engine.engine import Diffulex  # noqa: E402
from diffulex.runner import decode_graphs, decode_loop  # noqa: E402
from diffulex.runner.context_classes import ContextClasses  # noqa: E402
from replayed_graphs import BOUNDS, Replayed  # noqa: E402
from tiny_engine import TinyModel  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> object:
    """Tiny matrices gain nothing from threads, and busy machines lose much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A random SDAR checkpoint with confident logits."""
    return TinyModel(tmp_path_factory.mktemp("tiny"), "cpu")


@pytest.fixture(scope="session")
def tiny_cuda(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The same checkpoint on CUDA."""
    return TinyModel(tmp_path_factory.mktemp("tiny_cuda"), "cuda")


@pytest.fixture(scope="session")
def tiny_cuda_bf16(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A checkpoint for long contexts in bfloat16 on CUDA, of a shape the tensor cores take."""
    return TinyModel(
        tmp_path_factory.mktemp("tiny_cuda_bf16"),
        "cuda",
        "bfloat16",
        head_dim=64,
        hidden_size=128,
        max_position_embeddings=4096,
    )


@pytest.fixture
def small_classes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Bounds on the context that tiny requests grow through; on CUDA the kernels choose them."""

    def bounds(self: ContextClasses, num_reqs: int, rows: int) -> tuple[int, ...]:
        return (*(b for b in (16, 24, 40, 64) if b < self._limit), self._limit)

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("cuda") is None:
            patch.setattr(ContextClasses, "_find_bounds", bounds)
        yield


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Diffulex], Diffulex]:
    """Gives an engine of the CPU the graphs and the padding that it would have on CUDA."""
    monkeypatch.setattr(decode_loop, "StepGraphs", Replayed)
    monkeypatch.setattr(decode_graphs, "StepGraphs", Replayed)
    monkeypatch.setattr(ContextClasses, "_find_bounds", lambda *_: BOUNDS)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))

    def change(engine: Diffulex) -> Diffulex:
        runner = engine._executor.runner
        runner._capture_graphs()
        monkeypatch.setattr(runner, "_is_cuda", True)
        monkeypatch.setattr(runner, "_on_device", contextlib.nullcontext)
        return engine

    return change
