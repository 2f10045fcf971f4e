# SPDX-License-Identifier: Apache-2.0
"""Registration of fake kernels and the dtype sets their checks share."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Fake: TypeAlias = Callable[..., None]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOAT32 = (torch.float32,)
FLOAT64 = (torch.float64,)
INDEX = (torch.int32, torch.int64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
UINT8 = (torch.uint8,)


def register(op: str) -> Callable[[Fake], Fake]:
    """Makes the decorated function the fake kernel of `torch.ops.diffulex.<op>`."""

    def decorate(fake: Fake) -> Fake:
        torch.library.register_fake(f"diffulex::{op}", fake)
        return fake

    return decorate
