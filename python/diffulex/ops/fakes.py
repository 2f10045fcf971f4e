# SPDX-License-Identifier: Apache-2.0
"""Fake kernels: the checks of the real ones without data, for tracing and for meta tensors.

Every op writes tensors of the caller and returns nothing, so a fake only checks devices, dtypes and
shapes. Names, order and defaults of the arguments are those of the op's schema. Conditions go through
`torch._check`, which accepts symbolic sizes.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    Check = TypeVar("Check", bound=Callable[..., None])

FLAGS = (torch.uint8, torch.bool)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOAT32 = (torch.float32,)
FLOAT64 = (torch.float64,)
INDEX = (torch.int32, torch.int64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
UINT8 = (torch.uint8,)
CODES = (torch.float8_e4m3fn,)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FakeArguments:
    """The arguments of one op call, of which all tensors lie on `device`.

    Failures read `diffulex::<op>: <argument>: expected ..., got ...`.
    """

    def __init__(self, op: str, values: dict[str, Any], device: torch.device) -> None:
        self._op = op
        self._values = values
        self._device = device

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def require(
        self, name: str, condition: bool | torch.SymBool, expected: str, got: object
    ) -> None:
        torch._check(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            condition,
            lambda: f"diffulex::{self._op}: {name}: expected {expected}, got {got}",
        )

    def check(self, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]) -> None:
        """Device, dtype and shape of a tensor that may be absent; None stands for any extent."""
        tensor: Tensor | None = self._values[name]
        if tensor is None:
            return
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

    def check_each(
        self, dtypes: Mapping[str, Sequence[torch.dtype]], shape: Sequence[int | None]
    ) -> None:
        """`check` of all that the op has of these, which have one shape."""
        for name, own_dtypes in dtypes.items():
            if name in self._values:
                self.check(name, own_dtypes, shape)

    def unsupported(self, name: str, what: str) -> None:
        """A scale is absent: quantised `what` are not there yet."""
        expected = f"none (quantised {what} are not supported)"
        self.require(name, self._values[name] is None, expected, "a tensor")

    def paired(self, name: str, other: str, present: bool) -> None:
        """The tensor is there exactly with another one."""
        tensor: Tensor | None = self._values[name]
        self.require(
            name,
            (tensor is not None) == present,
            f"a tensor with {other}" if present else f"none without {other}",
            "none" if tensor is None else f"a tensor of shape {list(tensor.shape)}",
        )

    def choice(self, name: str, last: int) -> None:
        """An enumerator from 0 to `last`."""
        values = ", ".join(str(choice) for choice in range(last)) + f" or {last}"
        self.require(name, 0 <= self._values[name] <= last, values, self._values[name])

    def at_least(self, name: str, bound: float) -> None:
        self.require(name, self._values[name] >= bound, f"a value >= {bound}", self._values[name])


def fake(op: str) -> Callable[[Check], Check]:
    """Makes the decorated checks the fake kernel of `torch.ops.diffulex.<op>`.

    They get a `FakeArguments`, and after it the arguments of the op whose names they have as
    parameters. The scratch of the op is checked here.
    """
    schema = getattr(torch.ops.diffulex, op).default._schema
    names = [argument.name for argument in schema.arguments]
    defaults = {
        argument.name: argument.default_value
        for argument in schema.arguments
        if argument.has_default_value()
    }

    def decorate(check: Check) -> Check:
        wanted = list(inspect.signature(check).parameters)[1:]

        def run(*args: Any, **kwargs: Any) -> None:
            values = defaults | dict(zip(names, args)) | kwargs
            arguments = FakeArguments(op, values, values[names[0]].device)
            check(arguments, **{name: values[name] for name in wanted})
            if "workspace" in values:
                arguments.check("workspace", UINT8, (None,))

        torch.library.register_fake(f"diffulex::{op}", run)
        return check

    return decorate


_PAGE_SIZES = (4, 8, 16, 32, 64, 128, 256)


def _check_page_size(arguments: FakeArguments, page_size: int) -> None:
    expected = f"a page size of {_PAGE_SIZES}"
    arguments.require("k_cache", page_size in _PAGE_SIZES, expected, page_size)


def check_scale_pair(arguments: FakeArguments) -> None:
    """Both scales of a cache or none, of bytes."""
    k_scale: Tensor | None = arguments["k_scale"]
    if k_scale is not None:
        arguments.check("k_scale", UINT8, (None,) * k_scale.dim())
    arguments.paired("v_scale", "k_scale", k_scale is not None)
    if k_scale is not None:
        arguments.check("v_scale", UINT8, (None,) * arguments["v_scale"].dim())


def check_scale_shapes(arguments: FakeArguments) -> None:
    """Scales [num_pages, Hc, page_size] of checked unified caches."""
    for name, cache in (("k_scale", arguments["k_cache"]), ("v_scale", arguments["v_cache"])):
        num_pages, page_size, heads, _ = cache.shape
        arguments.check(name, UINT8, (num_pages, heads, page_size))


def check_caches(
    arguments: FakeArguments, num_kv_heads: int, head_dim: int, dtypes: Sequence[torch.dtype]
) -> None:
    """Checks k_cache, v_cache, their scales and kv_layout; `dtypes` are those without scales."""
    k_cache: Tensor = arguments["k_cache"]
    v_cache: Tensor = arguments["v_cache"]
    check_scale_pair(arguments)
    has_scales = arguments["k_scale"] is not None
    arguments.choice("kv_layout", 1)
    if has_scales:
        layout = arguments["kv_layout"]
        arguments.require("kv_layout", layout == 0, "0 (unified) with k_scale", layout)
        dtypes = CODES
    if arguments["kv_layout"] == 0:
        arguments.check("k_cache", dtypes, (None,) * 4)
        arguments.check("v_cache", (k_cache.dtype,), (*k_cache.shape[:2], None, None))
        page_size = k_cache.shape[1]
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            arguments.require(
                name,
                cache.shape[2] >= num_kv_heads,
                f"room for {num_kv_heads} heads",
                cache.shape[2],
            )
            arguments.require(
                name, cache.shape[3] >= head_dim, f"room for head_dim {head_dim}", cache.shape[3]
            )
        _check_page_size(arguments, page_size)
        if has_scales:
            check_scale_shapes(arguments)
        return
    arguments.check("k_cache", dtypes, (None, num_kv_heads, None, None, None))
    num_pages, _, groups, page_size, width = k_cache.shape
    arguments.require(
        "k_cache", groups * width == head_dim, f"D/x * x = {head_dim}", groups * width
    )
    arguments.check("v_cache", (k_cache.dtype,), (num_pages, num_kv_heads, head_dim, page_size))
    _check_page_size(arguments, page_size)
