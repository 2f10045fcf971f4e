# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of one product on the CPU, by the format of its weights.

    python benchmarks/python/bench_cpu_products.py

One thread, weights in panels; the fastest of the calls in `--seconds` of processor time, which other
programs on the host hardly change. Ratios are those to bfloat16 panels of the same rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from step_timing import markdown_table

from diffulex import ops
from diffulex.ops import WeightScheme

#: Output and input features.
SHAPES = ((2048, 1024), (1024, 3072))
ROWS = (1, 32, 128)
_GROUP = 128


def best_ms(call: Callable[[], object], seconds: float) -> float:
    """The fastest call of the thread."""
    call()
    best, end = float("inf"), time.thread_time() + seconds
    while best == float("inf") or time.thread_time() < end:
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best * 1e3


def products(weight: torch.Tensor, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """A call for each format of `weight` [N, K], of rows `x` [T, K]; the first is what others are compared with."""
    out = torch.empty(len(x), len(weight))
    packed = {"bfloat16": weight.bfloat16().float(), "float32": weight}
    calls: dict[str, Callable[[], object]] = {
        name: partial(ops.linear_packed, x, ops.pack_weight(w), out_features=len(weight), out=out)
        for name, w in packed.items()
    }
    for scheme in WeightScheme:
        is_int4 = scheme == WeightScheme.INT4
        codes, scale = ops.quantize_weight(weight, scheme, group=_GROUP if is_int4 else 0)
        panels = ops.pack_panels(codes)
        if is_int4:
            call = partial(ops.linear_w4a16, x, panels, scale, group=_GROUP, out=out)
        else:
            dtype = torch.int8 if scheme == WeightScheme.INT8 else torch.float8_e4m3fn
            call = partial(ops.linear_scaled, ops.quantize_rows(x, dtype), panels, scale, out=out)
        calls[scheme.name.lower()] = call
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each figure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = []
    for out_features, in_features in SHAPES:
        weight = torch.randn(out_features, in_features) * 0.02
        for rows in ROWS:
            calls = products(weight, torch.randn(rows, in_features))
            found = {name: best_ms(call, options.seconds) for name, call in calls.items()}
            first = next(iter(found.values()))
            shown = {name: f"{ms:.2f} ({ms / first:.2f}x)" for name, ms in found.items()}
            lines.append({"N x K": f"{out_features} x {in_features}", "rows": rows, **shown})
    print(markdown_table(list(lines[0]), lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
