# SPDX-License-Identifier: Apache-2.0
"""What the device can do at most: bytes copied, bytes read, products; and the floors they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernel_bench.timing import elapsed_us, quantiles, time_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["NOMINAL_BANDWIDTH", "NOMINAL_PRODUCTS", "Ceilings", "bandwidth_us", "measure_ceilings"]

#: Bytes per second of a copy on an H200 that the formulas of targets are counted with.
NOMINAL_BANDWIDTH = 4.3e12
#: The same for operations, by the type of the operands.
NOMINAL_PRODUCTS = {"bfloat16": 790e12, "e4m3": 1580e12}


def bandwidth_us(num_bytes: float, share: float) -> float:
    """Microseconds of so many bytes at a share of the nominal bandwidth."""
    return 1e6 * num_bytes / (share * NOMINAL_BANDWIDTH)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured in the run whose floors they make: bytes and FLOP per second, bytes of L2."""

    copy: float
    #: Kernel that only reads -> its rate, or why it does not run.
    reads: Mapping[str, float | str]
    #: Type of the operands -> operations of a large product, or why there is none.
    products: Mapping[str, float | str]
    l2_bytes: int

    @property
    def read(self) -> float:
        """Of the fastest; a copy reads, too, so what only reads is not slower."""
        return max(self.copy, *(rate for rate in self.reads.values() if isinstance(rate, float)))

    def product(self, operands: str) -> float:
        """Operations of a type of operands, of bfloat16 where the device has no product of them."""
        rate = self.products[operands]
        if not isinstance(rate, float):
            rate = self.products["bfloat16"]
        assert isinstance(rate, float)
        return rate

    def floor_us(
        self,
        read_bytes: float,
        written_bytes: float,
        flops: float = 0.0,
        operands: str = "bfloat16",
    ) -> float:
        """Microseconds that one call needs at least.

        A written byte goes with a read one at the speed of a copy, further reads at that of a
        read; a product needs its operations at the rate of a large square one of its operands.
        """
        paired = 2 * min(read_bytes, written_bytes)
        rest = abs(read_bytes - written_bytes)
        alone = self.read if read_bytes > written_bytes else self.copy
        return max(paired / self.copy + rest / alone, flops / self.product(operands)) * 1e6

    def cache(self, rotated_bytes: float) -> str:
        """cold, partly or warm: whether buffers of that many bytes in turn stay in L2."""
        if rotated_bytes <= self.l2_bytes:
            return "warm"
        return "partly" if rotated_bytes < 3 * self.l2_bytes else "cold"


def measure_ceilings(device: str) -> Ceilings:
    """Runs a large copy, several large reads and large products."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
    return Ceilings(
        _copy_bandwidth(device), _read_bandwidths(device), _product_rates(device), l2_bytes
    )  # fmt: skip


def _median_s(call: Callable[[], object], count: int) -> float:
    """Seconds of one of `count` calls in a row, so that the time of a launch does not count."""
    if not torch.cuda.is_available():
        return time_calls([call]).median * 1e-6

    def calls() -> None:
        for _ in range(count):
            call()

    calls()
    return quantiles([elapsed_us(calls) for _ in range(10)]).median * 1e-6 / count


def _copy_bandwidth(device: str) -> float:
    """Bytes read plus written; outside a graph, where a copy node moves a third less."""
    source = torch.randint(0, 255, (1 << (30 if device == "cuda" else 22),), dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median_s(lambda: target.copy_(source), 4)


def _read_bandwidths(device: str) -> dict[str, float | str]:
    """Of a sum, a product with a vector and, on CUDA, a Triton kernel that only loads."""
    is_cuda = device == "cuda"
    matrix = torch.randn(
        (131072, 8192) if is_cuda else (512, 1024),
        dtype=torch.bfloat16 if is_cuda else torch.float32,
        device=device,
    )
    vector = torch.randn(matrix.size(1), dtype=matrix.dtype, device=device)
    words = matrix.view(torch.float32)
    calls: dict[str, Callable[[], object]] = {
        "torch.sum": words.sum,
        "torch.mv": lambda: torch.mv(matrix, vector),
    }
    found: dict[str, float | str] = {}
    if is_cuda:
        try:
            from kernel_bench.triton_read import read_all  # noqa: PLC0415

            calls["Triton loads"] = read_all(words)
            calls["Triton loads"]()
            torch.cuda.synchronize()
        except Exception as error:  # no Triton, no compiler, an unknown device
            calls.pop("Triton loads", None)
            found["Triton loads"] = f"{type(error).__name__}: {error}"[:120]
    return found | {name: matrix.nbytes / _median_s(call, 4) for name, call in calls.items()}


def _product_rates(device: str) -> dict[str, float | str]:
    """Operations per second of square products of random numbers: torch's, of 8 bits with one scale each."""
    size = 8192 if device == "cuda" else 128
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    sums = torch.empty(size, size, dtype=torch.int32, device=device)
    one = torch.ones((), device=device)
    scaled_mm: Any = torch._scaled_mm

    def coded(dtype: torch.dtype, factor: float) -> list[torch.Tensor]:
        return [(factor * values).to(dtype) for values in (left, right)]

    def of_floats() -> Callable[[], object]:
        return lambda: torch.mm(left, right, out=out)

    def of_e4m3() -> Callable[[], object]:
        codes = coded(torch.float8_e4m3fn, 1.0)
        return lambda: scaled_mm(
            codes[0], codes[1].t(), scale_a=one, scale_b=one, out_dtype=dtype, out=out,
            use_fast_accum=True,
        )  # fmt: skip

    def of_int8() -> Callable[[], object]:
        codes = coded(torch.int8, 30.0)
        return lambda: torch._int_mm(codes[0], codes[1].t(), out=sums)

    def rate(make: Callable[[], Callable[[], object]]) -> float | str:
        try:
            return 2.0 * size**3 / _median_s(make(), 10)
        except Exception as error:  # a device without such products
            return f"{type(error).__name__}: {error}"[:120]

    return {"bfloat16": rate(of_floats), "e4m3": rate(of_e4m3), "int8": rate(of_int8)}
