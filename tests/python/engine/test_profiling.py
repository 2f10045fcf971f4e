# SPDX-License-Identifier: Apache-2.0
"""Recordings of an engine: its scopes in the trace, and none of it where nothing records."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex import ConfigError, Diffulex, SamplingParams
from tiny_engine import TinyModel

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = list(range(1, 65))


def scopes_of(path: str) -> list[dict[str, Any]]:
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    found = [e for e in events if str(e.get("name", "")).startswith("diffulex.")]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def children(scopes: list[dict[str, Any]], parent: dict[str, Any]) -> list[dict[str, Any]]:
    """Scopes directly inside of one."""
    end, found = parent["ts"], []
    for scope in scopes:
        is_inside = scope["ts"] + scope["dur"] <= parent["ts"] + parent["dur"]
        if scope is not parent and scope["ts"] >= end and is_inside:
            found.append(scope)
            end = scope["ts"] + scope["dur"]
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Scopes of a recording of the demo."""
    directory = tmp_path_factory.mktemp("traces")
    config = {"torch_profiler_dir": str(directory)}
    with Diffulex("demo", device="cpu", num_pages=64, profiler_config=config) as engine:
        engine.start_profile("run")
        engine.generate("Tom has 3 apples.", max_tokens=12, summary=False, progress_log_interval=0)
        result = engine.stop_profile()
    assert result["trace"] == str(directory / "run.engine.trace.json")
    assert (directory / "run.model_runner.rank0.trace.json").resolve() == Path(result["trace"])
    return scopes_of(result["trace"])


def test_scopes_of_a_step_sum_to_the_step(recorded: list[dict[str, Any]]) -> None:
    steps = [scope for scope in recorded if scope["name"] == "diffulex.engine.step"]
    assert len(steps) >= 2
    for name in ("diffulex.engine.step", "diffulex.model_runner.rank0.execute"):
        parents = [scope for scope in recorded if scope["name"] == name]
        inside = [[part["dur"] for part in children(recorded, scope)] for scope in parents]
        # A thread of a loaded host may lose the processor between two scopes of one step.
        shares = [sum(parts) / scope["dur"] for parts, scope in zip(inside, parents, strict=True)]
        assert 0.95 <= sorted(shares)[len(shares) // 2] <= 1.0, (name, shares)


def test_names_of_scopes(recorded: list[dict[str, Any]]) -> None:
    names = {scope["name"].removeprefix("diffulex.") for scope in recorded}
    engine = ("generate", "tokenizer_encode", "add_request", "scheduler_add", "step")
    step = ("scheduler_schedule", "prepare_reqs_for_execution", "model_runner_run")
    end = ("scheduler_postprocess", "evict_sampler_state", "record_outputs")
    expected = {f"engine.{name}" for name in (*engine, *step, *end, "convert_outputs_to_text")}
    forward = ("model_forward", "eager_prefill", "eager_decode", "compute_logits", "sampler")
    inputs = ("before_model_forward", "prepare.copy_inputs")
    runner = (*inputs, "prepare_sample", "wait_for_output")
    expected |= {f"multi_block.{name}" for name in (*forward, *runner)}
    expected |= {"model_runner.rank0.execute", "model_runner.rank0.start_loop"}
    assert names == expected | {"sampler.sample_tokens"}


def test_scopes_of_steps_that_run_ahead(tiny: TinyModel, tmp_path: Path) -> None:
    config = {"torch_profiler_dir": str(tmp_path)}
    with tiny.engine(run_ahead="on", profiler_config=config) as engine:
        plain = engine.generate([PROMPT], PARAMS, summary=False)
        engine.start_profile()
        output = engine.generate([PROMPT], PARAMS, summary=False)
        scopes = scopes_of(engine.stop_profile()["trace"])
        assert output[0].token_ids == plain[0].token_ids
    names = {scope["name"] for scope in scopes}
    assert "diffulex.multi_block.eager_decode" in names
    assert "diffulex.model_runner.rank0.run_ahead" in names


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("is_eager", "decode"), [(True, "eager_decode"), (False, "full_static_decode")]
)
def test_a_recording_on_a_device(
    is_eager: bool, decode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFULEX_CUDA_STAGE_TIMING_PATH", str(tmp_path / "times.csv"))
    settings: dict[str, Any] = {"run_ahead": "off", "enforce_eager": is_eager}
    settings |= {"profiler_config": {"torch_profiler_dir": str(tmp_path)}}
    with Diffulex("demo", device="cuda", num_pages=64, **settings) as engine:
        for is_recorded in (False, True):
            if is_recorded:
                engine.start_profile("run")
            engine.generate("Tom has 3 apples.", PARAMS, summary=False, progress_log_interval=0)
        result = engine.stop_profile()
    text = Path(result["trace"]).read_text(encoding="utf-8")
    assert any(event.get("cat") == "kernel" for event in json.loads(text)["traceEvents"])
    rows = json.loads((tmp_path / "run.engine.summary.json").read_text(encoding="utf-8"))
    assert sum(row["self_cuda_us"] or 0 for row in rows) > 0
    scopes = scopes_of(result["trace"])
    assert f"diffulex.multi_block.{decode}" in {scope["name"] for scope in scopes}
    steps = [scope for scope in scopes if scope["name"] == "diffulex.engine.step"]
    shares = [sum(c["dur"] for c in children(scopes, step)) / step["dur"] for step in steps]
    # What lies between the scopes is much of a step this small: on an H200 9 % of one without graphs.
    assert sorted(shares)[len(shares) // 2] >= (0.85 if is_eager else 0.8), shares
    with (tmp_path / "times.rank0.csv").open(encoding="utf-8", newline="") as file:
        forwards = [row for row in csv.DictReader(file) if row["stage"] == "model_forward"]
    assert forwards
    assert all(float(row["cuda_ms"]) > 0 for row in forwards)


def test_areas() -> None:
    from diffulex.strategies.listing import STRATEGIES

    areas = {name: strategy.traits.area for name, strategy in STRATEGIES.items()}
    assert areas.pop("dmax") == "token_merge"
    assert areas.pop("fast_dllm_v2") == "fast_dllm_v2"
    assert areas.pop("diffusion_gemma") == "diffusion_gemma"
    assert set(areas.values()) == {"multi_block"}


def methods(engine: Diffulex) -> list[tuple[str, bool]]:
    """Which stages are replaced on their objects."""
    return [(stage.scope, stage.method in vars(stage.owner)) for stage in engine._stages()]


def test_an_engine_that_records_nothing_runs_its_own_methods(
    tiny: TinyModel, tmp_path: Path
) -> None:
    """Profiling that is off costs a step one look at the observer, and nothing else."""
    with tiny.engine() as engine:
        assert engine._executor.observer is None
        assert not any(is_replaced for _, is_replaced in methods(engine))
    config = {"torch_profiler_dir": str(tmp_path), "max_iterations": 2}
    with tiny.engine(profiler_config=config) as engine:
        assert not any(is_replaced for _, is_replaced in methods(engine))
        engine.start_profile()
        assert all(is_replaced for _, is_replaced in methods(engine))
        engine.generate([PROMPT], PARAMS, summary=False)
        assert not any(is_replaced for _, is_replaced in methods(engine))


def test_a_recording_that_ended_by_itself_is_asked_for_once(
    tiny: TinyModel, tmp_path: Path
) -> None:
    with tiny.engine(profiler_config={"torch_profiler_dir": str(tmp_path)}) as engine:
        engine.start_profile("short", max_iterations=2)
        with pytest.raises(RuntimeError, match="no recording under way, got one"):
            engine.start_profile()
        engine.generate([PROMPT], PARAMS, summary=False)
        assert not engine.is_profiling
        result = engine.stop_profile()
        assert result["steps"] == 2
        assert len(result["files"]) == 4
        with pytest.raises(RuntimeError, match="recording under way, got none"):
            engine.stop_profile()
        engine.start_profile("none")
        engine._profiler.close()
    assert len(list(tmp_path.glob("*.engine.trace.json"))) == 2


def test_a_recording_before_its_first_step_has_no_files(tiny: TinyModel, tmp_path: Path) -> None:
    config = {"torch_profiler_dir": str(tmp_path), "delay_iterations": 9}
    with tiny.engine(profiler_config=config) as engine:
        engine.start_profile()
        assert engine.stop_profile() == {"trace": None, "files": [], "steps": 0}


@pytest.mark.parametrize("delay", [0, 2])
def test_the_engine_owns_its_recordings(tiny: TinyModel, tmp_path: Path, delay: int) -> None:
    """The files are the engine's, and the worker's names point to them."""
    config = {"torch_profiler_dir": str(tmp_path), "delay_iterations": delay}
    with tiny.engine(profiler_config=config) as engine:
        engine.start_profile("owned", max_iterations=2)
        engine.generate([PROMPT], PARAMS, summary=False)
        result = engine.stop_profile()
    assert result["steps"] == 2
    names = {path.name for path in tmp_path.iterdir() if not path.is_symlink()}
    assert len(names) == 4
    assert all(name.startswith("owned.engine.") for name in names)
    (trace,) = tmp_path.glob("*.model_runner.rank0.trace.json")
    assert trace.resolve() == Path(result["trace"]).resolve()


def test_a_delayed_recording_that_cannot_begin_leaves_none_of_the_worker(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, is_first = torch.profiler.profile.start, iter([True])

    def start(profile: Any) -> None:
        if next(is_first, False):
            raise RuntimeError("busy")
        begin(profile)

    monkeypatch.setattr(torch.profiler.profile, "start", start)
    config = {"torch_profiler_dir": str(tmp_path), "delay_iterations": 2}
    with tiny.engine(profiler_config=config) as engine:
        engine.start_profile("lost")
        engine.generate([PROMPT], PARAMS, summary=False)
        assert not any(is_replaced for _, is_replaced in methods(engine))
        with pytest.raises(RuntimeError, match="the recording is lost: busy"):
            engine.stop_profile()
    assert list(tmp_path.iterdir()) == []


def test_stop_says_why_there_is_no_trace(tiny: TinyModel, tmp_path: Path) -> None:
    occupied = tmp_path / "traces"
    occupied.write_text("a file")
    with tiny.engine(profiler_config={"torch_profiler_dir": str(occupied)}) as engine:
        for _ in range(2):
            engine.start_profile()
            with pytest.raises(RuntimeError, match="the recording is lost: FileExistsError"):
                engine.stop_profile()


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_step_records(tiny: TinyModel, run_ahead: str) -> None:
    with tiny.engine(run_ahead=run_ahead) as engine:
        run = engine.generate([PROMPT, PROMPT[:9]], PARAMS, summary=False).stats
        records = engine.step_stats()
        assert engine.step_stats(2).tolist() == records[-2:].tolist()
    assert records["step"].tolist() == list(range(run.num_steps))
    assert records["decided"].sum() == run.decided_tokens
    assert records["n_prefill"][0] == 2
    assert records["n_decode"][-1] >= 1
    assert (records["graph_bucket"] == -1).all()
    assert records["kv_pages_used"].max() == run.peak_pages
    assert records["committed_blocks"].sum() >= 2
    stages = ("schedule_us", "prepare_us", "forward_us", "sample_us", "postprocess_us")
    assert all((records[name] >= 0).all() for name in stages)
    total = sum(float(records[name].sum()) for name in stages) / 1e6
    assert run.total_s <= total * 1.001  # the books come on top
    starts = records["t_start_ns"]
    assert (starts[1:] > starts[:-1]).all()
    if run_ahead == "off":
        assert (records["sample_us"] > 0).all()
    assert engine.step_stats().size == records.size  # also when it is closed


def test_step_records_of_preempted_requests(tiny: TinyModel) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with tiny.engine(num_pages=5, decode_headroom=False) as engine:
        prompts = [[7 + i] * 40 for i in range(3)]
        result = engine.generate(prompts, params, summary=False)
        assert engine.step_stats()["preempted"].sum() == result.num_preemptions > 0


def test_as_many_records_as_are_asked_for(tiny: TinyModel) -> None:
    with tiny.engine(step_records=3) as engine:
        run = engine.generate([PROMPT], PARAMS, summary=False).stats
        steps = engine.step_stats()["step"].tolist()
        assert steps == [run.num_steps - k for k in (3, 2, 1)]


def test_an_engine_without_records(tiny: TinyModel) -> None:
    with tiny.engine(step_records=0) as engine:
        assert engine._loop.ring is None
        assert engine._executor.times is None
        engine.generate([PROMPT], PARAMS, summary=False)
        with pytest.raises(RuntimeError, match="expected step_records above 0, got 0"):
            engine.step_stats()


def test_an_engine_streams_its_records(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("DIFFULEX_STEP_TRACE", str(path))
    with tiny.engine() as engine:
        run = engine.generate([PROMPT], PARAMS, summary=False).stats
    assert len(path.read_text().splitlines()) == run.num_steps


def test_a_full_disk_stops_the_stream_and_nothing_else(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DIFFULEX_STEP_TRACE", "/dev/full")
    with tiny.engine() as engine:
        run = engine.generate([PROMPT], PARAMS, summary=False).stats
        executor = engine._executor
    assert len(engine.step_stats()) == run.num_steps
    with pytest.raises(RuntimeError, match="got no worker"):
        executor.runner  # noqa: B018 (closed)
    assert caplog.text.count("no more records are written") == 1


def test_an_engine_that_cannot_start_closes_its_stream(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("DIFFULEX_STEP_TRACE", str(path))
    monkeypatch.setenv("DIFFULEX_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(ConfigError, match="DIFFULEX_NVTX"):
        tiny.engine()
    assert path.exists()
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert path not in [link.readlink() for link in links if link.is_symlink()]


def test_listeners_of_the_environment(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Domain:
        """A domain of NVTX that keeps what it is told."""

        def __init__(self) -> None:
            self.open: list[str] = []
            self.steps: list[int] = []

        def get_event_attributes(self, message: str, payload: int | None = None) -> Any:
            return message, payload

        def push_range(self, attributes: Any) -> None:
            self.open.append(attributes[0])
            if attributes[0] == "step":
                self.steps.append(attributes[1])

        def pop_range(self) -> None:
            self.open.pop()

    domain = Domain()
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(get_domain=lambda name: domain))
    monkeypatch.setenv("DIFFULEX_NVTX", "1")
    monkeypatch.setenv("DIFFULEX_CUDA_STAGE_TIMING_PATH", str(tmp_path / "times.csv"))
    monkeypatch.setenv("DIFFULEX_CUDA_STAGE_TIMING_MAX_STEPS", "3")
    config = {"torch_profiler_dir": str(tmp_path)}
    with tiny.engine(profiler_config=config) as engine:
        engine.start_profile("both")
        result = engine.generate([PROMPT], PARAMS, summary=False)
        assert any(
            s["name"] == "diffulex.engine.step" for s in scopes_of(engine.stop_profile()["trace"])
        )
        assert all(is_replaced for _, is_replaced in methods(engine))
        stages = engine._stages()
    assert not any(stage.method in vars(stage.owner) for stage in stages)
    assert domain.open == []
    assert domain.steps == list(range(result.stats.num_steps))
    lines = (tmp_path / "times.rank0.csv").read_text().splitlines()
    totals = [line for line in lines if ",total," in line]
    assert len(totals) == 3
    names = {line.split(",")[4] for line in lines[1:]}
    assert {"scheduler_schedule", "model_runner_run", "model_forward", "sampler"} <= names


def test_an_environment_that_asks_for_what_is_not_here(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setenv("DIFFULEX_NVTX", "1")
    with pytest.raises(ConfigError, match="DIFFULEX_NVTX: expected the package nvtx"):
        tiny.engine()
