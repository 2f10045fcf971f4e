# SPDX-License-Identifier: Apache-2.0
"""Programs for GPUs that run unattended: no command of theirs fails late, endings are told apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

from diffulex.errors import ConfigError  # noqa: E402
from diffulex.omni import UnsupportedFeatureError, cli  # noqa: E402
from diffulex.omni.bench.evaluate import evaluate_shapes  # noqa: E402
from diffulex.omni.bench.speed import measure_speed  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "benchmarks/python"
VIDEO = ROOT / "examples/train_shapes/train_video.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def omni_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import omni_gpu

    return omni_gpu


def run(*words):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True, text=True, check=False, env=ENVIRONMENT,
    )  # fmt: skip


def test_every_command_is_legal(omni_gpu, tmp_path):
    found = omni_gpu.stages(tmp_path)
    assert sum(stage.limit_s for stage in found) <= 3720
    seen = 0
    for stage in found:
        if stage.command[1:4] != ["-m", "diffulex", "omni"]:
            assert Path(stage.command[1]).is_file()
            continue
        for more in ([], stage.smoke):
            options = cli.build_parser().parse_with_file([*stage.command[4:], *more])
            runs = cli._varied(options, cli._engine_kwargs(options))
            assert len(runs) >= 5, stage.name
            assert [Path(name).parent for name in options.output] == [tmp_path, tmp_path]
            seen += 1
    assert seen == 10


@pytest.mark.parametrize("name", ["two_gpus", "memory"])
def test_the_model_is_there_for_a_stage_that_runs_alone(omni_gpu, tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), "--smoke", "--stage", name])
    ran = []

    def look(stage, out, _is_smoke):
        ran.append(stage.name)
        assert (
            Path(stage.command[stage.command.index("--model") + 1]) / "model_index.json"
        ).is_file()
        return "done", 0.0

    monkeypatch.setattr(omni_gpu, "run", look)
    assert omni_gpu.main() == 0
    assert ran == [name]


@pytest.mark.slow
def test_ranks_measure_one_setting_after_the_other(tmp_path):
    done = run(
        PROGRAMS / "omni_parallel.py", "--out", tmp_path, "--tiny", "--device", "cpu", "--height", 32,
        "--width", 32, "--num-frames", 5, "--steps", 3, "--first", 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "parallel.json").read_text())
    assert [row["setting"] for row in report["runs"]] == ["diffusers alone", "one process", "cfg 2"]
    for row in report["runs"]:
        assert row["difference"] < 1e-5
        assert row["request_s"] > row["step_s"] > 0
        assert row["request_s"] > row["decode_s"] > 0
        assert f"| {row['setting']} | {row['request_s']:.2f} |" in done.stdout


@pytest.mark.parametrize("gpus", [2, 4])
def test_settings_share_as_many_gpus_as_there_are(omni_gpu, gpus):
    import omni_parallel

    from diffulex.omni.grid import AXES, Grid

    alone, *settings = omni_parallel.SETTINGS[gpus]
    assert alone == {}
    for sizes in settings:
        assert set(sizes) <= set(AXES)
        assert Grid(sizes).size("world") == gpus


@pytest.mark.slow
def test_a_stage_runs_and_a_broken_one_is_told(omni_gpu, tmp_path, monkeypatch):
    stage = "diffusers_and_ways_to_share"
    done = run(PROGRAMS / "omni_gpu.py", "--out", tmp_path, "--smoke", "--stage", stage)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {stage} | done |" in (tmp_path / "summary.md").read_text()
    report = json.loads((tmp_path / "parallel/parallel.json").read_text())
    assert [row["setting"] for row in report["runs"]] == ["diffusers alone", "one process"]
    assert report["environment"]["device"] == "cpu"
    assert {"command", "date"} <= set(report["environment"])
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    endings = [
        omni_gpu.run(omni_gpu.Stage("x", limit, command, []), tmp_path, False)[0]
        for limit, command in ((1, sleeper), (60, [sys.executable, "-c", "raise SystemExit(3)"]))
    ]
    assert endings == ["ended after its 1 s", "exit code 3"]


def test_what_a_model_cannot_do_is_said_before_the_first_run(tiny, tmp_path):
    report = tmp_path / "x.json"
    kwargs = {"model": str(tiny("wan")), "device": "cpu"}
    variants = {"plain": {}, "heads": {"tensor_parallel_size": 2}}
    for measure in (
        lambda: evaluate_shapes(kwargs, caches=variants, limit=1, outputs=[str(report)]),
        lambda: measure_speed(kwargs, "x", {}, caches=variants, outputs=[str(report)]),
    ):
        with pytest.raises(
            UnsupportedFeatureError, match="tensor_parallel_size: expected 1 for Wan"
        ):
            measure()
    assert not report.exists()


def test_a_later_run_that_fails_leaves_the_rows_before_it(tiny, tmp_path):
    report = tmp_path / "x.json"
    fields = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
    count = []

    def fail():
        count.append(1)
        if len(count) == 4:
            raise ConfigError("the second run")

    with pytest.raises(ConfigError, match="the second run"):
        measure_speed(
            {"model": str(tiny("wan")), "device": "cpu"}, "x", fields,
            caches={"one": {}, "two": {}}, repeat=1, outputs=[str(report)], on_request=fail,
        )  # fmt: skip
    assert [row["cache"] for row in json.loads(report.read_text())["runs"]] == ["one"]


@pytest.mark.slow
def test_a_video_model_is_trained_and_draws_an_mp4(tmp_path):
    (tmp_path / "file").write_text("")
    bad = [
        (["--seconds", "0"], "--seconds: expected a number above 0"),
        (["--bank", "-1"], "--bank: expected a number above 0"),
        (["--eval", "-1"], "--eval: expected a number of at least 0"),
        (["--device", "cuda:77"], "--device: expected one that is here, got cuda:77"),
        (["--out", str(tmp_path / "file")], "--out: expected a directory, got the file"),
        (["--out", str(tmp_path / "file/x")], "--out: expected a directory that can be made"),
    ]
    sys.path.insert(0, str(VIDEO.parent))
    try:
        import train_video
    finally:
        sys.path.remove(str(VIDEO.parent))
    good = ["--out", str(tmp_path / "m"), "--device", "cpu"]
    for words, expected in bad:
        with pytest.raises(SystemExit) as raised:
            train_video.parse([*good, *words])
        assert raised.value.code == 2, expected
    train_video.main(
        [*good, "--bank", "8", "--batch", "2", "--vae-batch", "2", "--vae-seconds", "0.2",
         "--seconds", "0.2", "--eval", "1"]
    )  # fmt: skip
    record = json.loads((tmp_path / "m/motion.json").read_text())
    assert record["captions"] == 1
    assert set(record["right"]) == {"count", "color", "shape", "direction", "all"}
    target = tmp_path / "circle.mp4"
    words = ["a red circle moving right", "--model", str(tmp_path / "m"), "--device", "cpu"]
    assert cli.run(["generate", *words, "--num-inference-steps", "2", "-o", str(target)]) == 0
    assert target.read_bytes()[4:8] == b"ftyp"


@pytest.mark.slow
def test_seconds_of_caches_are_measured_in_turns(tmp_path):
    name = tmp_path / "seconds.json"
    done = run(PROGRAMS / "omni_seconds.py", "--captions", 1, "--output", name)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *others = json.loads(name.read_text())["rows"]
    assert (first["cache"], first["blocks_run"], first["median_ratio"]) == ("none", 1, 1)
    assert len(others) == 10
    for row in (first, *others):
        assert row["seconds"][0] > 0
        assert f"{row['cache']:36} {row['blocks_run']:6.1%}" in done.stdout
    # Thresholds leave out the more, the higher they are.
    for backend in ("cache_dit", "tea_cache"):
        shares = [row["blocks_run"] for row in others if row["cache"].startswith(backend)][:4]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] == 1 > shares[1]
