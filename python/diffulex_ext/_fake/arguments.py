# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of one op call that work on fake tensors and symbolic sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FakeArguments:
    """The arguments of one op call; failures read `diffulex::<op>: <argument>: expected ...`."""

    def __init__(self, op: str, first: Tensor) -> None:
        self._op = op
        self._device = first.device

    def require(
        self, name: str, condition: bool | torch.SymBool, expected: str, got: object
    ) -> None:
        torch._check(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            condition,
            lambda: f"diffulex::{self._op}: {name}: expected {expected}, got {got}",
        )

    def tensor(
        self,
        name: str,
        tensor: Tensor,
        dtypes: Sequence[torch.dtype],
        shape: Sequence[int | None],
    ) -> None:
        """Checks device, dtype and shape; None in `shape` stands for any extent."""
        self.require(
            name, tensor.device == self._device, f"a tensor on {self._device}", tensor.device
        )
        names = " or ".join(_dtype_name(dtype) for dtype in dtypes)
        self.require(name, tensor.dtype in dtypes, f"dtype {names}", _dtype_name(tensor.dtype))
        text = "[" + ", ".join("*" if extent is None else str(extent) for extent in shape) + "]"
        got = list(tensor.shape)
        self.require(name, tensor.dim() == len(shape), f"shape {text}", got)
        for extent, wanted in zip(tensor.shape, shape):
            if wanted is not None:
                self.require(name, extent == wanted, f"shape {text}", got)

    def optional(
        self,
        name: str,
        tensor: Tensor | None,
        dtypes: Sequence[torch.dtype],
        shape: Sequence[int | None],
    ) -> None:
        if tensor is not None:
            self.tensor(name, tensor, dtypes, shape)

    def unsupported(self, name: str, tensor: Tensor | None) -> None:
        self.require(name, tensor is None, "none (quantised caches are not supported)", "a tensor")

    def paired(self, name: str, tensor: Tensor | None, other: str, present: bool) -> None:
        self.require(
            name,
            (tensor is not None) == present,
            f"a tensor with {other}" if present else f"none without {other}",
            "none" if tensor is None else f"a tensor of shape {list(tensor.shape)}",
        )

    def choice(self, name: str, value: int, last: int) -> None:
        values = ", ".join(str(choice) for choice in range(last)) + f" or {last}"
        self.require(name, 0 <= value <= last, values, value)

    def at_least(self, name: str, value: float, bound: float) -> None:
        self.require(name, value >= bound, f"a value >= {bound}", value)

    def workspace(self, tensor: Tensor | None) -> None:
        self.optional("workspace", tensor, (torch.uint8,), (None,))
