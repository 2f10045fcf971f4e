# SPDX-License-Identifier: Apache-2.0
"""What an engine of several replicas can do."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NoReturn

__all__ = ["REPLICATED", "refuse_others"]

#: Methods of `Diffulex` that work with several replicas; every other public one is refused.
REPLICATED = frozenset(
    {
        "abort",
        "add_request",
        "chat",
        "close",
        "flush_prefix_cache",
        "generate",
        "has_unfinished",
        "observe_blocks",
        "record",
        "stats",
        "step",
        "stream",
        "watch_buffer",
    }
)


def refuse_others(engine: Any, num_replicas: int) -> None:
    """Replaces the methods that need one engine by an error that says so."""
    for name, _ in inspect.getmembers(type(engine), inspect.isfunction):
        if not name.startswith("_") and name not in REPLICATED:
            setattr(engine, name, partial(_refuse, name, num_replicas))


def _refuse(name: str, num_replicas: int, *arguments: object, **options: object) -> NoReturn:
    raise RuntimeError(f"{name}: expected data_parallel_size 1, got {num_replicas}")
