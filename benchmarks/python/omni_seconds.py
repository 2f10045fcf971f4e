# SPDX-License-Identifier: Apache-2.0
"""Seconds of one processor that a picture of the bundled model takes with each cache, in turns.

    OMP_NUM_THREADS=1 python benchmarks/python/omni_seconds.py --captions 6 --output seconds.json

Every caption is drawn once with every cache, one picture at a time in one process with one thread: what else
the host does slows all of them alike. Processor time is counted, which waiting for the processor is not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from diffulex.omni import OmniDiffusion
from diffulex.omni.bench.evaluate import held_out_scenes
from diffulex.omni.outputs import count_blocks

_TAYLOR = {"residual_diff_threshold": 0.12, "enable_taylorseer": True}
_MASK = {"scm_steps_mask_policy": "medium", "scm_steps_policy": "static"}
#: Name -> fields of a request.
CACHES: dict[str, dict[str, Any]] = {
    "none": {},
    **{
        f"{name}, {threshold:g}": {"cache_backend": name, "cache_config": {key: threshold}}
        for name, key, thresholds in (
            ("cache_dit", "residual_diff_threshold", (0.06, 0.12, 0.24, 0.48)),
            ("tea_cache", "rel_l1_thresh", (0.05, 0.1, 0.2, 0.3)),
        )
        for threshold in thresholds
    },
    "cache_dit, 0.12, TaylorSeer": {"cache_backend": "cache_dit", "cache_config": _TAYLOR},
    "cache_dit, mask medium, TaylorSeer": {
        "cache_backend": "cache_dit",
        "cache_config": {**_MASK, "enable_taylorseer": True},
    },
}


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--captions", type=int, default=6, help="how many, the first of the evaluation"
    )
    parser.add_argument("--output", type=Path, help="the figures of every picture, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in CACHES}
    blocks: dict[str, list[int]] = {name: [0, 0] for name in CACHES}
    # TeaCache finds the coefficients of the model when the engine is made with it.
    with OmniDiffusion(device="cpu", cache_backend="tea_cache") as engine:
        fields = {"seed": 0, "num_inference_steps": 20}
        off = {"cache_backend": "none"}
        engine.generate("a red circle", **fields, **off)
        for scene in held_out_scenes(arguments.captions):
            for name, cache in CACHES.items():
                start = time.process_time()
                (output,) = engine.generate(scene.caption, **fields, **(cache or off))
                seconds[name].append(time.process_time() - start)
                for summary in output.metrics.get("caches", ()):
                    for place, count in enumerate(count_blocks(summary)):
                        blocks[name][place] += count
    rows = []
    for name, values in seconds.items():
        ratios = [own / none for own, none in zip(values, seconds["none"])]
        total, run = blocks[name]
        share = run / total if total else 1.0
        middle = statistics.median(values)
        rows.append({"cache": name, "blocks_run": share, "seconds": values, "median_s": middle,
                     "median_ratio": statistics.median(ratios)})  # fmt: skip
        print(f"{name:36} {share:6.1%} {middle:6.3f} s {rows[-1]['median_ratio']:5.2f}")
    if arguments.output is not None:
        environment = {"command": " ".join(["python", *sys.argv]), "machine": platform.machine(),
                       "date": datetime.date.today().isoformat(), "torch": torch.__version__}  # fmt: skip
        report = {"environment": environment, "rows": rows}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
