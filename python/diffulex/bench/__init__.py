# SPDX-License-Identifier: Apache-2.0
"""Evaluation and measurement: tasks, scores, runs, reports. Optional; imported on request.

What is named here is imported when it is first used: neither torch nor lm-eval is needed to read a
configuration.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "BenchmarkConfig",
    "BenchmarkRunner",
    "EngineConfig",
    "EvalConfig",
    "compute_metrics",
    "get_logger",
    "load_benchmark_dataset",
    "setup_logger",
]

_PLACES = {
    "BenchmarkConfig": "config",
    "BenchmarkRunner": "runner",
    "DiffulexLM": "lm_eval_model",
    "EngineConfig": "config",
    "EvalConfig": "config",
    "compute_metrics": "metrics",
    "get_logger": "logger",
    "load_benchmark_dataset": "datasets",
    "setup_logger": "logger",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
