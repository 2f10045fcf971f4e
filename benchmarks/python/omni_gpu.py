# SPDX-License-Identifier: Apache-2.0
"""Everything that the image engine has to show on two GPUs, in order of value, unattended.

    python benchmarks/python/omni_gpu.py --out build/omni_gpu

runs each stage as a command of its own with a time limit and goes on after one that fails. A stage leaves
its reports and its log in the directory; `summary.md`, written after every stage, says which ended how. The
limits add up to an hour, the expected times to about half of one. `--stage` picks stages, `--smoke` runs all
at a tiny size on the CPU. The exit code is 1 where a stage has failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import omni_shapes

ROOT = Path(__file__).resolve().parents[2]
_CACHES = (
    "none,cache_dit=0.06,cache_dit=0.12,cache_dit=0.24,tea_cache=0.05,tea_cache=0.1,tea_cache=0.2"
)
_SEER = "cache_backend=cache_dit,enable_taylorseer=true"
_MASK = "cache_backend=cache_dit,scm_steps_policy=static,scm_steps_mask_policy"
#: Two processes each.
_PARALLEL = (
    "cfg_parallel_size",
    "ulysses_degree",
    "ring_degree",
    "data_parallel_size",
    "pipeline_parallel_size",
)


class Stage(NamedTuple):
    """A command. `limit_s`: seconds until it is ended; `smoke`: what its options become at a tiny size."""

    name: str
    limit_s: int
    command: list[str]
    smoke: list[str]


def _vary(*items: str) -> list[str]:
    return [word for item in items for word in ("--vary", item)]


def _omni(name: str, out: Path, *words: str) -> list[str]:
    reports = [word for suffix in ("md", "json") for word in ("--output", f"{out / name}.{suffix}")]
    return [sys.executable, "-m", "diffulex", "omni", *words, *reports]


def stages(out: Path) -> list[Stage]:
    """All of them, the most valuable first."""
    wan = str(out / "wan_1_3b")
    python, examples = ROOT / "benchmarks/python", ROOT / "examples/train_shapes"
    tiny_eval = [
        "--limit",
        "4",
        "--max-batch-size",
        "2",
        "--num-inference-steps",
        "6",
        "--device",
        "cpu",
    ]
    small = ["--height", "32", "--width", "32", "--num-frames", "5", "--steps", "2"]
    tiny_video = [*small, "--device", "cpu"]
    bench = [
        "bench", "--model", wan, "--load-format", "dummy", "--num-frames", "33", "--steps", "8",
        "--height", "480", "--width", "832", "--repeat", "1",
    ]  # fmt: skip
    two = [f"{name}=2" for name in _PARALLEL]
    return [
        Stage(
            "caches",
            900,
            _omni(
                "caches",
                out,
                "eval",
                "--limit",
                "500",
                "--max-batch-size",
                "100",
                "--cache",
                _CACHES,
                *_vary(
                    *(f"{_SEER},residual_diff_threshold={x}" for x in (0.06, 0.12, 0.24)),
                    *(f"{_MASK}={name}" for name in ("slow", "medium", "fast")),
                    *(
                        f"{_MASK}={name},enable_taylorseer=true"
                        for name in ("slow", "medium", "fast")
                    ),
                ),
            ),
            tiny_eval,
        ),
        Stage(
            "diffusers_and_ways_to_share",
            300,
            [sys.executable, str(python / "omni_parallel.py"), "--out", str(out / "parallel")],
            ["--tiny", "--first", "1", *tiny_video],
        ),
        Stage("two_gpus", 900, _omni("two_gpus", out, *bench, "-n", "2", *_vary(*two)), tiny_video),
        Stage(
            "train_video",
            420,
            [sys.executable, str(examples / "train_video.py"), "--out", str(out / "motion")],
            [
                "--device",
                "cpu",
                "--bank",
                "8",
                "--batch",
                "2",
                "--vae-batch",
                "2",
                "--vae-seconds",
                "0.5",
                "--seconds",
                "0.5",
                "--eval",
                "1",
            ],
        ),
        Stage(
            "memory",
            420,
            _omni(
                "memory",
                out,
                *bench,
                *_vary(
                    "text_encoder_cpu_offload=true",
                    "dit_cpu_offload=true",
                    "vae_use_tiling=true",
                    "dit_cpu_offload=true,text_encoder_cpu_offload=true,vae_use_tiling=true",
                ),
            ),
            tiny_video,
        ),
        Stage(
            "parallel_is_equal",
            600,
            _omni(
                "parallel_is_equal",
                out,
                "eval",
                "--limit",
                "200",
                "--max-batch-size",
                "100",
                *_vary(*two, "tensor_parallel_size=2", "text_encoder_int8=true"),
            ),
            tiny_eval,
        ),
        Stage(
            "speed_of_caches",
            180,
            _omni("speed_of_caches", out, "bench", "--repeat", "5", "--cache", _CACHES),
            ["--repeat", "1", "--steps", "4", "--device", "cpu"],
        ),
    ]


def run(stage: Stage, out: Path, is_smoke: bool) -> tuple[str, float]:
    """How a stage has ended, and its seconds; its output goes to a file beside its reports."""
    command = [*stage.command, *(stage.smoke if is_smoke else [])]
    paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    start = time.monotonic()
    with (out / f"{stage.name}.log").open("w", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        try:
            code = subprocess.run(
                command, cwd=out, env=environment, stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, timeout=stage.limit_s, check=False,
            ).returncode  # fmt: skip
            ending = "done" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ending = f"ended after its {stage.limit_s} s"
    return ending, time.monotonic() - start


def _devices(is_smoke: bool) -> list[str]:
    if is_smoke:
        return ["cpu"]
    import torch  # noqa: PLC0415 (slow)

    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _summary(rows: list[tuple[Stage, str, float]], devices: list[str]) -> str:
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    lines = [
        "# The image engine on its devices", "",
        f"- command: {shlex.join(sys.argv)}", f"- device: {', '.join(devices)}", f"- date: {date}", "",
        "| stage | ended | seconds | limit |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    lines += [f"| {s.name} | {ending} | {spent:.0f} | {s.limit_s} |" for s, ending, spent in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of reports")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    names = [stage.name for stage in stages(Path())]
    parser.add_argument("--stage", action="append", choices=names, help="only these [all]")
    options = parser.parse_args()
    devices = _devices(options.smoke)
    if not options.smoke and len(devices) < 2:
        parser.error(f"expected two GPUs, got {len(devices)}; --smoke needs none")
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    omni_shapes.build(out / "wan_1_3b", options.smoke)
    rows: list[tuple[Stage, str, float]] = []
    for stage in stages(out):
        if options.stage and stage.name not in options.stage:
            continue
        rows.append((stage, *run(stage, out, options.smoke)))
        print(f"{stage.name}: {rows[-1][1]}, {rows[-1][2]:.0f} s", flush=True)
        (out / "summary.md").write_text(_summary(rows, devices), encoding="utf-8")
    print(_summary(rows, devices))
    return int(any(ending != "done" for _, ending, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
