# SPDX-License-Identifier: Apache-2.0
"""What the step benchmarks share: timed decode steps, their summary, bandwidth, bytes, the machine."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kernel_bench.report import commit
from torch import nn

from diffulex import Diffulex
from diffulex.nn.gemma_layers import GemmaExperts
from diffulex.nn.linear import MatrixProduct
from diffulex.nn.moe import MoeFeedForward

__all__ = [
    "clock_facts",
    "copy_bandwidth",
    "expert_modules",
    "machine_facts",
    "markdown_table",
    "summary",
    "timed_steps",
    "weight_bytes",
]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights but an embedding table that only a few rows are taken from."""
    products = [module for module in model.modules() if isinstance(module, MatrixProduct)]
    experts = expert_modules(model)
    # Matrices that are packed or quantised are no parameters; their layers count them.
    counted = {id(model.get_parameter("embedding.weight"))}
    counted |= {id(product.weight) for product in products}
    counted |= {id(weight) for module in experts for weight in (module.w13, module.w2)}
    rest = sum(part.nbytes for part in model.parameters() if id(part) not in counted)
    held = sum(product.nbytes for product in products)
    return rest + held + sum(module.matrices.nbytes for module in experts)


def expert_modules(model: nn.Module) -> list[Any]:
    """The layers of routed experts."""
    return [m for m in model.modules() if isinstance(m, MoeFeedForward | GemmaExperts)]


def copy_bandwidth(device: str) -> float:
    """Bytes read plus written per second by a large copy."""
    num_bytes = 1 << (30 if device.startswith("cuda") else 27)
    # Random: hardware moves zeros faster than what weights look like.
    source = torch.empty(num_bytes // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes / best


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed_steps(
    engine: Diffulex,
    num_requests: int,
    warmup: int,
    steps: int,
    on_step: Callable[[], None] | None = None,
) -> list[float]:
    """Seconds per decode step in which every request takes part; `on_step` follows each.

    From the return of one step to that of the next: an engine that runs ahead works in between.
    """
    seconds: list[float] = []
    num_seen = 0
    while len(seconds) < steps and engine.has_unfinished():
        before, start = engine.run_stats.decode_s, time.perf_counter()
        results = engine.step()
        duration = time.perf_counter() - start
        is_decode = engine.run_stats.decode_s > before
        if is_decode and len(results) == num_requests:
            num_seen += 1
            if num_seen > warmup:
                seconds.append(duration)
                if on_step is not None:
                    on_step()
        if any(result.is_finished for result in results):
            break
    if len(seconds) < steps:
        raise RuntimeError(f"expected {steps} full decode steps, got {len(seconds)}")
    return seconds


def summary(seconds: Sequence[float]) -> dict[str, float | int]:
    """Median, mean, 10th and 90th percentile in milliseconds, and how many there were."""
    milliseconds = sorted(1e3 * value for value in seconds)
    last = len(milliseconds) - 1
    return {
        "step_ms": round(statistics.median(milliseconds), 4),
        "mean_ms": round(statistics.fmean(milliseconds), 4),
        "p10_ms": round(milliseconds[round(0.1 * last)], 4),
        "p90_ms": round(milliseconds[round(0.9 * last)], 4),
        "steps": len(milliseconds),
    }


def clock_facts(device: str) -> dict[str, float]:
    """Megahertz of the processors and watts right after a measurement; nothing on a CPU.

    Nothing either where the driver's library cannot be asked.
    """
    if not device.startswith("cuda"):
        return {}
    try:
        return {
            "sm_mhz": torch.cuda.clock_rate(device),
            "watts": round(torch.cuda.power_draw(device) / 1e3),
        }
    except Exception:  # whatever the driver's library raises
        return {}


def machine_facts(device: str) -> dict[str, str]:
    """Device, torch version, day and commit of a run."""
    is_cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit(),
    }


def markdown_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """The columns of `rows` with aligned bars; a missing value is a dash."""
    cells = [tuple(columns), *(tuple(str(row.get(name, "-")) for name in columns) for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    lines = []
    for index, line in enumerate(cells):
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append(f"| {' | '.join(padded)} |")
        if index == 0:
            lines.append(f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)
