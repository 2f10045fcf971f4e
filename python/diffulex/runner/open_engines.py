# SPDX-License-Identifier: Apache-2.0
"""The engines of this process that hold memory, so that an error can name them."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffulex.runner.model_runner import ModelRunner

__all__ = ["memory_holders", "register_open"]

_lock = threading.Lock()
_open: weakref.WeakSet[ModelRunner] = weakref.WeakSet()


def register_open(runner: ModelRunner) -> None:
    """Counts the runner for as long as it lives; a closed engine drops its own."""
    with _lock:
        _open.add(runner)


def memory_holders(runner: ModelRunner) -> str:
    """What other engines hold on the device of `runner`, to append to an error; empty for none.

    Weights that `runner` uses as well are not counted.
    """
    with _lock:
        others = [other for other in _open if other is not runner]
    others = [other for other in others if other.device == runner.device]
    if not others:
        return ""
    own = {tensor.data_ptr() for tensor in _weights(runner.model)}
    held = {
        tensor.data_ptr(): tensor.nbytes
        for other in others
        for tensor in _weights(other.model)
        if tensor.data_ptr() not in own
    }
    num_bytes = sum(held.values()) + sum(other.kv_cache.nbytes for other in others)
    who = "1 other engine" if len(others) == 1 else f"{len(others)} other engines"
    return (
        f"; weights and caches of {who} of this process take {num_bytes} bytes of {runner.device}"
    )


def _weights(model: Any) -> Iterator[torch.Tensor]:
    if isinstance(model, torch.nn.Module):
        yield from model.parameters()
        yield from model.buffers()
