# SPDX-License-Identifier: Apache-2.0
"""What holds for the ops that a thread calls: promises of the caller, and what it asks for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["asks_for_invariance", "batch_invariant", "settled_weights"]


@contextmanager
def settled_weights() -> Iterator[None]:
    """Promises, for the ops that this thread calls inside, that no launch still in the stream writes
    a weight of theirs.

    The norms, the rotary embeddings, `router_gemm` and `linear_few_rows` then read their weights
    while the launches in front still run, which hides the way from memory. Without the promise they
    start after those have ended, so that ``rms_norm(x, w * 2, eps)`` is right. A CUDA graph keeps
    what held at its capture. No effect on the CPU.
    """
    before = torch.ops.diffulex_control.settle_weights(True)
    try:
        yield
    finally:
        torch.ops.diffulex_control.settle_weights(before)


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Asks the ops that this thread calls inside for results that do not depend on other requests.

    Attention then divides the keys of a request by that request alone, experts have one tile whatever
    the number of rows, `soft_embedding` and `linear_w4a16` of tiles one division of their matrix, which
    is slower. The other ops compute a row by itself anyway, `linear_few_rows` and `linear_packed` among
    them; torch's products do not. A CUDA graph keeps what held at its capture.
    """
    before = torch.ops.diffulex_control.make_batch_invariant(True)
    try:
        yield
    finally:
        torch.ops.diffulex_control.make_batch_invariant(before)


def asks_for_invariance() -> bool:
    """Whether this thread is inside `batch_invariant`."""
    is_asked: bool = torch.ops.diffulex_control.make_batch_invariant(True)
    torch.ops.diffulex_control.make_batch_invariant(is_asked)
    return is_asked
