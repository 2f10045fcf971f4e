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
        "parallel_info",
        "record",
        "stats",
        "step",
        "stream",
        "watch_buffer",
    }
)


def refuse_others(engine: Any, parallel: Any) -> None:
    """Replaces the methods that need an engine in this process by an error that says so.

    Args:
        engine: whose methods.
        parallel: its section of the configuration, which says why.
    """
    count = parallel.data_parallel_size
    text = f"expected data_parallel_size 1, got {count}"
    if count == 1:
        text = f"expected distributed_executor mp, got {parallel.distributed_executor}"
    for name, _ in inspect.getmembers(type(engine), inspect.isfunction):
        if not name.startswith("_") and name not in REPLICATED:
            setattr(engine, name, partial(_refuse, f"{name}: {text}"))


def _refuse(text: str, *arguments: object, **options: object) -> NoReturn:
    raise RuntimeError(text)
