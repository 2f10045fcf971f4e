# SPDX-License-Identifier: Apache-2.0
"""What a closed engine gives back, without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex.config.sampling_params import SamplingParams
from diffulex.engine import engine as engine_module
from diffulex.engine.engine import Diffulex
from diffulex.errors import ConfigError
from diffulex.runner import model_runner
from diffulex.runner.model_runner import ModelRunner
from fixtures.quick import quick
from run_ahead_cases import STRATEGIES, model_of
from tiny_engine import TinyModel
from tiny_gemma import TinyGemma

SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_reqs": 4,
    "num_pages": 32,
    "block_size": 8,
    "buffer_size": 2,
}
FREE = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Only reference counts free memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def open_engine(tiny: TinyModel, **settings: Any) -> Diffulex:
    """An engine with a model of its own."""
    common = {"device": tiny.device, "dtype": tiny.dtype, **SMALL}
    return Diffulex(str(tiny.directory), **{**common, **settings})


def parts_of(runner: ModelRunner) -> dict[str, Any]:
    """What holds memory, by name."""
    parts: dict[str, Any] = {
        "model": runner.model,
        "weight": next(runner.model.parameters()),
        "runner": runner,
        "sampler": runner.sampler,
        "cache": runner.kv_cache,
        "keys": runner.kv_cache.layer(0)[0],
        "forward": runner._prepared_forward,
        "buffers": runner._buffers,
        "graphs": runner._graphs,
        "loop": runner._decode_loop,
        "forward graphs": runner._graphs.forwards,
    }
    return {name: part for name, part in parts.items() if part is not None}


def watch(engine: Diffulex) -> dict[str, weakref.ref[Any]]:
    return {name: weakref.ref(part) for name, part in parts_of(engine._executor.runner).items()}


def runs_ahead(engine: Diffulex) -> bool:
    """Starts a request and steps until the device runs ahead of the host; False if it never does."""
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(4):
        engine.step()
        if engine._loop._executor.is_ahead:
            return True
    return False


def alive(watched: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, part in watched.items() if part() is not None]


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_close_frees_everything(tiny: TinyModel, run_ahead: str) -> None:
    engine = open_engine(tiny, run_ahead=run_ahead)
    engine.generate([[1, 2, 3], [4, 5, 6, 7]], FREE, summary=False)
    watched = watch(engine)
    assert ("loop" in watched) == (run_ahead == "on")
    assert runs_ahead(engine) == (run_ahead == "on")
    engine.close()
    assert alive(watched) == []


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("name", quick(sorted(STRATEGIES), ("multi_bd", "dual_cache", "dmax")))
def test_every_strategy_frees_everything_but_a_shared_model(tiny: TinyModel, name: str) -> None:
    model = model_of(tiny, name)
    with model.engine(**{**SMALL, **STRATEGIES[name][1]}, run_ahead="on") as engine:
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.5, logprobs=1, seed=1)
        engine.generate([[1, 2, 3], [4, 5, 6, 7]], [FREE, params], summary=False)
        watched = watch(engine)
    assert set(alive(watched)) == {"model", "weight"}


@pytest.mark.slow
@pytest.mark.usefixtures("_no_collector")
def test_canvases_free_everything(tmp_path: Path) -> None:
    with TinyGemma(tmp_path, "cpu").engine(run_ahead="on") as engine:
        engine.generate([[1, 2, 3]], FREE, summary=False)
        watched = watch(engine)
    assert alive(watched) == []


@pytest.mark.usefixtures("_no_collector")
def test_leaving_the_block_frees_everything(tiny: TinyModel) -> None:
    with open_engine(tiny, run_ahead="on") as engine:
        stream = engine.stream([1, 2, 3], FREE)
        next(stream)
        watched = watch(engine)
    assert alive(watched) == []
    with pytest.raises(RuntimeError, match="expected an open engine, got a closed one"):
        next(stream)


@pytest.mark.usefixtures("_no_collector")
def test_an_engine_that_is_dropped_frees_everything(tiny: TinyModel) -> None:
    engine = open_engine(tiny, run_ahead="on")
    engine.generate([[1, 2, 3]], FREE, summary=False)
    watched = watch(engine)
    del engine
    assert alive(watched) == []


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("name", ["decide_num_pages", "prepare", "_make_decode_loop"])
def test_a_failed_construction_frees_everything(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also while its error is handled, so that the handler can try again."""
    watched: dict[str, weakref.ref[Any]] = {}
    run = getattr(ModelRunner, name)

    def failing(runner: ModelRunner, *args: Any) -> None:
        run(runner, *args)
        watched.update({n: weakref.ref(part) for n, part in parts_of(runner).items()})
        try:
            raise ValueError("cause")
        except ValueError as error:
            raise RuntimeError("injected") from error

    monkeypatch.setattr(ModelRunner, name, failing)
    with pytest.raises(RuntimeError, match="injected") as info:
        open_engine(tiny, run_ahead="on", num_pages=-1)
    assert {"model", "runner", "cache"} <= set(watched)
    assert alive(watched) == []
    assert any(entry.name == "failing" for entry in info.traceback)  # it still says where


@pytest.mark.usefixtures("_no_collector")
def test_errors_that_were_there_before_keep_their_variables(tiny: TinyModel) -> None:
    def fail() -> None:
        kept = "kept"
        raise ValueError(kept)

    names: dict[str, Any] = {}
    try:
        fail()
    except ValueError:
        with pytest.raises(ConfigError):
            open_engine(tiny, num_pages="many")
        names = sys.exc_info()[2].tb_next.tb_frame.f_locals  # type: ignore[union-attr]
    assert names == {"kept": "kept"}


def as_full_cuda(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner of the CPU that finds its device without free memory."""
    monkeypatch.setattr(runner, "_is_cuda", True)
    monkeypatch.setattr(runner, "_on_device", contextlib.nullcontext)
    monkeypatch.setattr(model_runner, "free_device_bytes", lambda *_: -1)


def test_the_error_names_the_engines_that_hold_the_memory(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # tests before this one may have left engines to it
    first, second = open_engine(tiny), tiny.engine()
    runner = second._executor.runner
    as_full_cuda(runner, monkeypatch)
    weights = sum(t.nbytes for t in first._executor.runner.model.parameters())
    weights += sum(t.nbytes for t in first._executor.runner.model.buffers())
    held = weights + first._executor.runner.kv_cache.nbytes
    text = (
        r"got 0 bytes; weights and caches of 1 other engine of this process take {} bytes of cpu$"
    )
    with pytest.raises(ConfigError, match=text.format(held)):
        runner.decide_num_pages()
    # Engines over one model share its weights.
    with tiny.engine() as third:
        text = text.replace("1 other engine", "2 other engines")
        with pytest.raises(
            ConfigError, match=text.format(held + third._executor.runner.kv_cache.nbytes)
        ):
            runner.decide_num_pages()
    first.close()
    with pytest.raises(ConfigError, match=r"got 0 bytes$"):
        runner.decide_num_pages()
    second.close()


def used_bytes() -> int:
    """Device memory that anybody holds."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.cuda
@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("run_ahead", ["auto", "off"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_device_memory_comes_back(
    tiny_cuda_bf16: TinyModel, run_ahead: str, enforce_eager: bool
) -> None:
    """Three engines in turn, each of which takes most of a GiB."""
    settings = {
        "run_ahead": run_ahead,
        "enforce_eager": enforce_eager,
        "max_model_len": 2048,
        "max_num_reqs": 8,
    }
    page_bytes = 2 * 2 * 32 * 2 * 64 * 2
    settings["num_pages"], settings["page_size"] = (768 << 20) // page_bytes, 32

    def use() -> int:
        """Opens, generates and closes; returns what it held."""
        with open_engine(tiny_cuda_bf16, **settings) as engine:
            engine.generate([[4, 5, 6, 7]] * 2, FREE, summary=False)
            assert (engine._executor.runner.num_graph_steps > 0) == (not enforce_eager)
            assert runs_ahead(engine) == (run_ahead == "auto")
            return used_bytes()

    use()  # the libraries keep what they take when they are used for the first time
    before = used_bytes()
    for _ in range(3):
        assert use() - before >= 700 << 20
        assert used_bytes() - before <= 64 << 20


@pytest.mark.cuda
@pytest.mark.usefixtures("_no_collector")
def test_device_memory_comes_back_from_a_failed_construction(
    tiny_cuda_bf16: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_engine(tiny_cuda_bf16).close()
    before = used_bytes()
    monkeypatch.setattr(engine_module, "log_startup", lambda *_: 1 / 0)
    page_bytes = 2 * 2 * 32 * 2 * 64 * 2
    with pytest.raises(ZeroDivisionError):
        open_engine(tiny_cuda_bf16, num_pages=(512 << 20) // page_bytes, page_size=32)
    assert used_bytes() - before <= 64 << 20


@pytest.mark.cuda
def test_a_full_device_names_the_engine_that_fills_it(tiny_cuda_bf16: TinyModel) -> None:
    gc.collect()
    with open_engine(tiny_cuda_bf16, num_pages=-1):
        text = r"num_pages: .*; weights and caches of 1 other engine of this process take \d+ bytes of cuda"
        with pytest.raises(ConfigError, match=text):
            open_engine(tiny_cuda_bf16, num_pages=-1)
