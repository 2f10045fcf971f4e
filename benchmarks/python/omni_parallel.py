# SPDX-License-Identifier: Apache-2.0
"""Seconds of videos, and of their steps, by the ways in which GPUs share them.

    python benchmarks/python/omni_parallel.py --out build/omni --gpus 2

writes a pipeline of the shape of Wan 2.1 1.3B without weights and starts one process per GPU; each imports
once and takes part in one setting after the other. First one of them alone calls the pipeline of diffusers
itself, then the engine. A request is as many videos as GPUs; what follows the last step is not shared unless
by replicas. `parallel.json` and `parallel.md` in the directory are written after every setting; `difference`
is the mean distance of the first video's pixels, of a range of 1, from those of diffusers; none of stages on GPUs,
whose random weights the host draws and not the device. `--tiny --device cpu` shows the way over gloo.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import omni_shapes

#: By number of GPUs; the axes are those of `diffulex.omni.grid`.
SETTINGS: dict[int, list[dict[str, int]]] = {
    2: [{}, {"cfg": 2}, {"ulysses": 2}, {"ring": 2}, {"dp": 2}, {"pp": 2}],
    4: [{}, {"cfg": 2, "ulysses": 2}, {"ulysses": 4}, {"ring": 4}, {"dp": 2, "cfg": 2}],
}
_TIMEOUT_S = 120.0
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "setting": lambda row: row["setting"],
    "request s": lambda row: f"{row['request_s']:.2f}",
    "step ms": lambda row: f"{row['step_s'] * 1e3:.1f}",
    "decode s": lambda row: f"{row['decode_s']:.2f}",
    "peak MiB": lambda row: f"{row['peak_MiB']:.0f}",
    "load s": lambda row: f"{row['load_s']:.1f}",
    "difference": lambda row: "-" if row["difference"] is None else f"{row['difference']:.2g}",
}

#: Draws with so many steps, calls the second with the number of the video after each; the first video.
Draw = Callable[[int, Callable[[int], None]], Any]


def _measure(draw: Draw, options: Any, groups: Any) -> dict[str, Any]:
    """Medians of the requests that follow one of two steps, and the first video; on every rank."""
    import torch  # noqa: PLC0415 (slow)
    import torch.distributed as dist  # noqa: PLC0415

    is_cuda = options.device != "cpu"
    steps: list[float] = []
    requests: list[float] = []
    decodes: list[float] = []

    def now(is_for_all: bool = False) -> float:
        if is_cuda:
            torch.cuda.synchronize()
        if is_for_all and groups is not None:
            dist.barrier()
        return time.perf_counter()

    draw(2, lambda number: None)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.repeat):
        calls: dict[int, list[float]] = {}
        start = now(True)
        video = draw(
            options.steps, lambda number, to=calls: to.setdefault(number, []).append(now())
        )
        end = now(True)
        requests.append(end - start)
        steps += [after - before for times in calls.values() for before, after in pairwise(times)]
        decodes += [end - times[-1] for times in list(calls.values())[-1:]]
    return {
        "request_s": statistics.median(requests),
        "step_s": statistics.median(steps),
        "decode_s": statistics.median(decodes),
        "peak_MiB": torch.cuda.max_memory_allocated() / 2**20 if is_cuda else 0.0,
        "video": video,
    }


def _diffusers(pipeline: Any, options: argparse.Namespace) -> Draw:
    """One video after the other, as the engine draws them."""
    import torch  # noqa: PLC0415

    def draw(steps: int, note: Callable[[int], None]) -> Any:
        videos = [
            pipeline(
                prompt=options.prompt,
                negative_prompt="",
                height=options.height,
                width=options.width,
                num_frames=options.num_frames,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(number),
                output_type="np",
                callback_on_step_end=lambda *_, number=number: note(number) or {},
            ).frames[0]
            for number in range(options.gpus)
        ]
        return videos[0]

    return draw


def _engine(worker: Any, groups: Any, options: argparse.Namespace) -> Draw:
    """With the ranks of a grid; the videos are dealt to its replicas."""
    from diffulex.omni.worker import PipelineCall  # noqa: PLC0415

    replicas = 1 if groups is None else groups.grid.size("dp")

    def draw(steps: int, note: Callable[[int], None]) -> Any:
        calls = [
            PipelineCall(
                request_ids=(str(number),),
                prompts=(options.prompt,),
                negative_prompts=("",),
                seeds=(number,),
                height=options.height,
                width=options.width,
                num_inference_steps=steps,
                output_type="np",
                arguments={"num_frames": options.num_frames},
                replica=number * replicas // options.gpus,
            )
            for number in range(options.gpus)
        ]

        def on_step(event: Any) -> bool:
            note(event.call)
            return groups is None or not groups.agree(False)

        first, *_ = [drawn.images[0] for drawn in worker.run(calls, on_step)]
        return first

    return draw


def _setting(options: argparse.Namespace, sizes: dict[str, int], store: Path) -> list[Any]:
    """Rows of one setting, as this rank sees it; none where it has no part in it."""
    import torch.distributed as dist  # noqa: PLC0415

    from diffulex.omni.config import OmniDiffusionConfig  # noqa: PLC0415
    from diffulex.omni.grid import Grid  # noqa: PLC0415
    from diffulex.omni.groups import RankGroups  # noqa: PLC0415
    from diffulex.omni.loader import load_pipeline  # noqa: PLC0415
    from diffulex.omni.stage_loader import Stage  # noqa: PLC0415
    from diffulex.omni.worker import Worker  # noqa: PLC0415

    if not sizes and options.rank:
        return []
    device = "cpu" if options.device == "cpu" else f"cuda:{options.rank}"
    start = time.perf_counter()
    groups = RankGroups(Grid(sizes), options.rank, store, device, _TIMEOUT_S) if sizes else None
    stage = Stage(groups.coords["pp"], sizes["pp"]) if groups and "pp" in sizes else None
    config = OmniDiffusionConfig.from_kwargs(
        model=str(options.out / "wan"), load_format="dummy", device=options.device
    )
    worker = Worker(load_pipeline(config, stage, device), groups)
    load_s = time.perf_counter() - start
    runs = {" x ".join(f"{axis} {size}" for axis, size in sizes.items()): groups}
    if groups is None:
        runs = {"diffusers alone": None, "one process": None}
    rows = []
    for name in runs:
        is_plain = name == "diffusers alone"
        draw = (
            _diffusers(worker.pipeline, options) if is_plain else _engine(worker, groups, options)
        )
        rows.append({"setting": name, **_measure(draw, options, groups), "load_s": load_s})
    worker.close()
    if groups is not None:
        dist.destroy_process_group()
    return rows


def _write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    import torch  # noqa: PLC0415

    is_cuda = options.device != "cpu"
    names = ("height", "width", "num_frames", "steps", "repeat", "gpus")
    environment = {
        "command": shlex.join(["python", *sys.argv[: sys.argv.index("--rank")]]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        **{name: getattr(options, name) for name in names},
    }
    report = {"environment": environment, "runs": rows}
    (options.out / "parallel.json").write_text(json.dumps(report, indent=2) + "\n")
    lines = ["# Videos on several GPUs", "", *(f"- {k}: {v}" for k, v in environment.items()), ""]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "|" + " --- |" * len(_COLUMNS)]
    lines += ["| " + " | ".join(cell(row) for cell in _COLUMNS.values()) + " |" for row in rows]
    (options.out / "parallel.md").write_text("\n".join(lines) + "\n")


def _run_rank(options: argparse.Namespace) -> None:
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    if options.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(options.rank)
    rows: list[dict[str, Any]] = []
    expected = None
    for number, sizes in enumerate(SETTINGS[options.gpus][: options.first]):
        found = _setting(options, sizes, options.out / f"store{number}")
        if options.rank:
            continue  # those that do not lead have no video
        for row in found:
            video = row.pop("video")
            expected = video if expected is None else expected
            has_same_weights = options.device == "cpu" or "pp" not in sizes
            distance = float(np.abs(video - expected).mean()) if has_same_weights else None
            rows.append({**row, "difference": distance})
        _write(options, rows)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return value


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, choices=SETTINGS, default=2)
    parser.add_argument("--rank", type=int, help="of this process; none: starts all")
    parser.add_argument("--first", type=int, help="only so many settings [all]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", default="a red circle left of a blue square")
    parser.add_argument("--tiny", action="store_true", help="narrow: only shows the way")
    parser.add_argument("--height", type=_count, default=480)
    parser.add_argument("--width", type=_count, default=832)
    parser.add_argument("--num-frames", type=_count, default=33)
    parser.add_argument("--steps", type=_count, default=8)
    parser.add_argument("--repeat", type=_count, default=1)
    options = parser.parse_args()
    if options.height % 16 or options.width % 16 or (options.num_frames - 1) % 4:
        parser.error(
            "expected height and width in multiples of 16, frames in multiples of 4 plus 1"
        )
    return options


def main() -> int:
    options = _parse()
    options.out = options.out.absolute()
    if options.rank is not None:
        _run_rank(options)
        return 0
    omni_shapes.build(options.out / "wan", options.tiny)
    for store in options.out.glob("store*"):
        store.unlink()
    command = [sys.executable, *sys.argv, "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(options.gpus)]
    try:
        # One that fails leaves the others waiting.
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        return 1
    print((options.out / "parallel.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
