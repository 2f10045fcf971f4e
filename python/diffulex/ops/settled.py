# SPDX-License-Identifier: Apache-2.0
"""The promise under which kernels read weights ahead of the launches in front of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["settled_weights"]


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
