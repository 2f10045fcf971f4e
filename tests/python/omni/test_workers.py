# SPDX-License-Identifier: Apache-2.0
"""Worker processes: equal pictures, failures with one clear error each, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402

from diffulex.errors import CheckpointError  # noqa: E402
from diffulex.omni import (  # noqa: E402
    EngineDeadError,
    OmniDiffusion,
    RequestAborted,
    RequestError,
    RequestTimeout,
    UnsupportedFeatureError,
    WorkerDeadError,
    WorkerError,
)
from diffulex.omni import scheduler as scheduling  # noqa: E402
from diffulex.omni.bench.evaluate import evaluate_shapes  # noqa: E402
from diffulex.omni.config import OmniDiffusionConfig  # noqa: E402
from diffulex.omni.message_queue import QueueHandle  # noqa: E402

# Every worker imports torch and diffusers, and the host may do other work.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("one_thread"),
]

SMALL = {"height": 64, "width": 64, "num_inference_steps": 4}
#: What ranks get after an error of one, and what a busy host may take beside it: it is below 1.
GRACE_S, SLACK_S = 2.0, 8
PROMPTS = ["a cat", "two dogs", "three birds"]


@pytest.fixture(scope="module")
def plain(tiny):
    with OmniDiffusion(model=str(tiny("qwen"))) as engine:
        yield engine


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left():
    """Sockets of this module's engines have a directory of their own: other tests run beside it."""
    before, tempfile.tempdir = tempfile.tempdir, tempfile.mkdtemp(prefix="omni-")
    yield
    assert leftovers() == set()
    shutil.rmtree(tempfile.tempdir)  # with what libraries put there
    tempfile.tempdir = before


def leftovers():
    directories = {path.name for path in Path(tempfile.gettempdir()).glob("dxom-*")}
    return directories | {path.name for path in Path("/dev/shm").glob(f"dxom-{os.getpid()}-*")}


def make(tiny, **keywords):
    return OmniDiffusion(
        model=str(tiny("qwen")),
        distributed_executor_backend="mp",
        cpu_threads_per_worker=1,
        worker_imports="fixtures.omni_faults",
        **{"error_grace_s": GRACE_S, **keywords},
    )


def latents(engine, prompts=PROMPTS, **fields):
    outputs = engine.generate(prompts, **{**SMALL, "seed": 3, "output_type": "latent", **fields})
    return [item for output in outputs for item in output.latents]


def assert_gone(pids):
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def assert_equal(got, expected):
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_one_worker_draws_what_this_process_draws(tiny, plain):
    # A cache that always computes changes nothing; its account comes along with the pictures.
    with make(tiny, cache_backend="cache_dit", residual_diff_threshold=0) as engine:
        assert_equal(latents(engine), latents(plain))
        for kind in ("pil", "np", "pt"):
            got, expected = (
                np.asarray(e.generate("a", **SMALL, seed=1, output_type=kind)[0].images[0])
                for e in (engine, plain)
            )
            assert np.array_equal(got, expected)
        previews = []
        (output,) = engine.generate(
            "a", **SMALL, seed=1, on_step=lambda event: previews.append(event.preview()[0])
        )
        assert len(previews) == 4
        cache = output.metrics["cache"]["transformer"]
        assert [branch["computed"] for branch in cache.values()] == [[0, 1, 2, 3]] * 2
        assert engine.engine.collective_rpc("cache_summary") == [{"transformer": cache}]
        assert np.array_equal(np.asarray(previews[-1]), np.asarray(output.images[0]))
        check_refusals(engine)
        check_stops(engine, plain)
        assert engine.engine.collective_rpc("memory_stats") == [{"allocated": 0, "peak": 0}]
        with pytest.raises(WorkerError, match="expected one of cache_summary, generate, lat"):
            engine.engine.collective_rpc("__del__")
        assert_equal(latents(engine), latents(plain))
        health = engine.engine.health()
        assert health["state"] == "ready"
    assert_gone(health["pids"])
    engine.close()
    assert engine.engine.health() == {"state": "closed", "pids": []}
    with pytest.raises(RuntimeError, match="expected an open engine, got a closed one"):
        engine.generate("a")


def check_refusals(engine):
    with pytest.raises(RequestError, match="height: expected a multiple of 16, got 72"):
        latents(engine, height=72)
    with pytest.raises(RequestError, match="prompt: expected at most 512 tokens"):
        latents(engine, ["b " * 600])
    with pytest.raises(RequestError, match=r"extra: .*nearest is 'attention_kwargs'"):
        latents(engine, extra={"attention_kwarg": 1})
    with pytest.raises(TypeError, match="expected numbers, texts, lists, maps or arrays, got a o"):
        latents(engine, extra={"attention_kwargs": object()})
    with pytest.raises(WorkerError) as raised:
        latents(engine, ["fault raise 0"])
    assert str(raised.value) == "worker 0: expected no error, got ValueError: as the prompt says"
    assert (raised.value.rank, raised.value.kind) == (0, "ValueError")
    assert "fail_at_second_step" in raised.value.trace


def check_stops(engine, plain):
    steps = []

    def stop(event):
        steps.append(event.step)
        return event.step < 2

    with pytest.raises(RequestAborted, match="stopped by its callback"):
        latents(engine, on_step=stop)
    assert steps == [1, 2]

    def fail(_event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        latents(engine, on_step=fail)
    # Without a callback: from another thread, and by Ctrl-C.
    long = {"num_inference_steps": 900, "true_cfg_scale": 1.0}
    has_ended = threading.Event()

    def abort():  # again and again: it may not be drawn yet
        while not has_ended.wait(0.5):
            engine.engine.abort(["long"])

    aborting = threading.Thread(target=abort)
    aborting.start()
    try:
        with pytest.raises(RequestAborted, match="got an abort"):
            latents(engine, ["a"], request_id="long", **long)
    finally:
        has_ended.set()
        aborting.join()
    timer = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT])
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            latents(engine, ["a"], **long)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert_equal(latents(engine), latents(plain))


def test_two_engines_of_a_process_know_nothing_of_each_other(tiny, plain):
    with make(tiny) as first, make(tiny) as second:
        assert_equal(latents(first), latents(plain))
        assert_equal(latents(second), latents(plain))
        assert not {*first.engine.health()["pids"]} & {*second.engine.health()["pids"]}
        first.close()
        assert_equal(latents(second), latents(plain))


def test_two_replicas_share_the_images(tiny, plain):
    with make(tiny, data_parallel_size=2) as engine:
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[:2], [*PROMPTS, "d", "e"], []):
            assert_equal(latents(engine, prompts), latents(plain, prompts))
        fields = {"num_outputs_per_prompt": 3}
        assert_equal(latents(engine, ["a"], **fields), latents(plain, ["a"], **fields))
        seen = set()
        latents(engine, on_step=lambda event: seen.add((event.call, event.step)))
        assert seen == {(call, step) for call in range(3) for step in range(1, 5)}
        with pytest.raises(RequestAborted):
            latents(engine, on_step=lambda event: event.call != 2)
        # One replica fails, the other one has nothing to do with it: the workers go on.
        for prompts in (["a", "fault raise 1"], ["fault raise 0", "a"], ["fault raise 0,1"] * 2):
            with pytest.raises(WorkerError, match="got ValueError: as the prompt says"):
                latents(engine, prompts)
        assert_equal(latents(engine), latents(plain))

        pids = engine.engine.health()["pids"]
        os.kill(pids[1], signal.SIGKILL)
        start = time.monotonic()
        while engine.engine.health()["state"] != "dead":
            time.sleep(0.01)
        assert time.monotonic() - start < SLACK_S
        with pytest.raises(EngineDeadError) as raised:
            latents(engine)
        expected = (
            "worker 1: expected a running process, got one that was killed by SIGKILL"
            " (possibly out of memory)"
        )
        assert str(raised.value) == expected
        assert (raised.value.rank, raised.value.exitcode) == (1, -9)
        assert_gone(pids)
        engine.engine.restart()
        assert_equal(latents(engine), latents(plain))
        with pytest.raises(WorkerDeadError, match=r"worker 1: .* that ended with exit code 7"):
            latents(engine, ["a", "fault exit 1"])


def test_two_branches_of_guidance(tiny, plain):
    with make(tiny, cfg_parallel_size=2) as engine:
        assert_equal(latents(engine), latents(plain))
        off = {"true_cfg_scale": 1.0}
        assert_equal(latents(engine, **off), latents(plain, **off))
        steps = []
        with pytest.raises(RequestAborted):
            latents(engine, on_step=lambda event: steps.append(event.step) or event.step < 2)
        assert steps == [1, 2]
        with pytest.raises(WorkerError, match="as the prompt says"):
            latents(engine, ["fault raise 0,1"])
        assert_equal(latents(engine), latents(plain))
        # The other rank waits for the failed one for ever.
        pids = engine.engine.health()["pids"]
        start = time.monotonic()
        with pytest.raises(WorkerDeadError) as raised:
            latents(engine, ["fault raise 1"])
        assert time.monotonic() - start < GRACE_S + SLACK_S
        expected = (
            "worker 1: expected the same course as workers [0], got ValueError: as the prompt says"
        )
        assert str(raised.value) == expected
        assert (raised.value.rank, raised.value.exitcode) == (1, None)
        assert_gone(pids)
        with pytest.raises(WorkerDeadError):
            latents(engine)
        # One is gone while the other waits for it in a collective.
        engine.engine.restart()
        pids = engine.engine.health()["pids"]
        with pytest.raises(WorkerDeadError):
            latents(engine, ["fault kill 1"])
        assert_gone(pids)


def test_a_rank_that_hangs_is_ended(tiny):
    with make(tiny, cfg_parallel_size=2, dist_timeout_s=3) as engine:
        pids = engine.engine.health()["pids"]
        start = time.monotonic()
        with pytest.raises(WorkerDeadError, match="worker 0: expected the same course as workers"):
            latents(engine, ["fault hang 1"])
        assert time.monotonic() - start < 3 + GRACE_S + SLACK_S
        assert_gone(pids)


def test_health_tells_how_old_the_last_step_is(tiny):
    ages = []

    def wait(event):
        if event.step == 2:
            time.sleep(0.3)
        ages.append(engine.engine.health()["step_age_s"])

    with make(tiny) as engine:
        assert engine.engine.health()["step_age_s"] is None
        latents(engine, ["a"], on_step=wait)
        assert len(ages) == 4
        assert min(ages) >= 0
        # Asked in the callback, which ends a step.
        assert ages[1] >= 0.3
        assert engine.engine.health()["step_age_s"] is None


def test_a_request_has_a_time_limit(tiny, plain):
    with make(tiny, request_timeout_s=3) as engine:
        with pytest.raises(RequestTimeout) as raised:
            latents(engine, ["a"], num_inference_steps=1000)
        assert (
            str(raised.value) == "request: expected an end within 3 s (request_timeout_s), got none"
        )
        assert_equal(latents(engine, ["a"]), latents(plain, ["a"]))
        with pytest.raises(RequestTimeout, match="the workers did not stop and were ended"):
            latents(engine, ["fault hang 0"])
        with pytest.raises(WorkerDeadError):
            latents(engine)


def test_failed_starts_leave_no_process(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(tiny("qwen"), tmp_path / "model")
    file = model / "vae/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"missing keys {name}"):
        OmniDiffusion(model=str(model), distributed_executor_backend="mp")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        OmniDiffusion(model=str(model), worker_imports="no_such_module")
    with pytest.raises(WorkerDeadError, match=r"worker 0: .* within 0.01 s \(init_timeout_s\)"):
        make(tiny, init_timeout_s=0.01)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedFeatureError, match="expected one of 0 CUDA devices"):
            make(tiny, device="cuda")
    assert leftovers() == set()


def test_ranks_are_told_their_own_devices(tiny, monkeypatch):
    monkeypatch.setattr(scheduling, "resolve_device", lambda name, world: "cuda")
    config = OmniDiffusionConfig.from_kwargs(
        model=str(tiny("qwen")), device="cuda", cfg_parallel_size=2
    )
    told = scheduling._settings(config, config.model.model, QueueHandle("somewhere", 2))
    assert [settings["device"] for settings in told] == ["cuda:0", "cuda:1"]
    for settings in told:
        assert OmniDiffusionConfig.from_kwargs(**settings["config"]).model.device == "cuda"


def test_replicas_draw_the_shapes_that_one_process_draws(monkeypatch):
    """The bundled model: verdicts are equal, and every replica gets captions."""
    settings = {"device": "cpu", "cpu_threads_per_worker": 1}
    sizes = []
    generate = OmniDiffusion.generate_requests
    monkeypatch.setattr(
        OmniDiffusion,
        "generate_requests",
        lambda engine, requests: sizes.append(len(requests)) or generate(engine, requests),
    )
    reports = [
        evaluate_shapes(
            {**settings, "data_parallel_size": size},
            settings=[{"num_inference_steps": 4}],
            limit=4,
        )
        for size in (1, 2)
    ]
    assert sizes == [1, 1, 1, 1, 2, 2]
    one, two = (report.runs[0] for report in reports)
    assert one.accuracy == two.accuracy
    assert one.num_images == two.num_images == 4


_ENGINE = """
import gc, os, signal, sys, time
from diffulex.omni import OmniDiffusion
def make():
    engine = OmniDiffusion(model=sys.argv[1], distributed_executor_backend="mp")
    (pid,) = engine.engine.health()["pids"]
    return engine, pid, engine.engine._worker.get_broadcast_handle()[0]
engine, pid, directory = make()
if sys.argv[2] == "forget":  # first in a process that lives on
    del engine
    gc.collect()
    end = time.monotonic() + 120
    while os.path.exists(f"/proc/{pid}") or os.path.exists(directory):
        assert time.monotonic() < end
        time.sleep(0.05)
    engine, pid, directory = make()
print(pid, directory, flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["kill", "forget"])
def test_no_worker_outlives_the_engine(tiny, how):
    result = subprocess.run(
        [sys.executable, "-c", _ENGINE, str(tiny("qwen")), how],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    pid, directory = result.stdout.split()
    assert result.returncode == (-9 if how == "kill" else 0)
    end = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() or Path(directory).exists():
        assert time.monotonic() < end
        time.sleep(0.05)
