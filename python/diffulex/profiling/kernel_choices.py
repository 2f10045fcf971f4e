# SPDX-License-Identifier: Apache-2.0
"""Which kernel each op of an engine takes, and why.

The ops choose for themselves, by rules of dtypes and shapes in their `*_cuda.cu` and `config.cpp`;
what is said here at the start is what those rules come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from diffulex.profiling.platform import Platform

__all__ = ["CodedProducts", "KernelChoice", "OpShapes", "kernel_choices"]

_HALF = ("bfloat16", "float16")
#: Head sizes with tensor-core kernels, by build profile.
_HEAD_DIMS = {"full": (64, 128, 256, 512), "minimal": (64, 128)}
_HOPPER_PAGES = (8, 256)
_MMA_MULTIPLE, _WGMMA_MULTIPLE, _E4M3_MULTIPLE = 8, 64, 16
_ISA_NAMES = {"base": "portable", "v3": "AVX2", "v4": "AVX-512"}
_ISA_ORDER = tuple(_ISA_NAMES)
# Beside those, the variants with products of bytes, and their names.
_BYTE_KERNELS = {
    "base": ("dot", "SDOT"),
    "v3": ("v3n", "AVX2 VNNI"),
    "v4": ("v4n", "AVX-512 VNNI"),
}


class KernelChoice(NamedTuple):
    """What an op runs.

    Attributes:
        op: name of the op, or of a group of ops that choose alike.
        kernel: what it takes.
        reason: why.
        is_fast: the device has no faster kernel for such an op, whatever the format of its weights.
    """

    op: str
    kernel: str
    reason: str
    is_fast: bool = True

    def __str__(self) -> str:
        return f"{self.op}: {self.kernel} ({self.reason})"


class CodedProducts(NamedTuple):
    """Matrices in low precision, or routed experts of layers.

    Attributes:
        num_unfit: how many have a form that no Hopper product takes.
    """

    scheme: str
    num_matrices: int = 1
    num_unfit: int = 0


class OpShapes(NamedTuple):
    """What the choices depend on.

    Attributes:
        dtype: of weights and activations.
        head_dims: of the attention layers.
        page_size: tokens of a page.
        experts: hidden and intermediate size of routed experts; None: there are none.
        is_batch_invariant: no kernel is chosen by the number of rows.
        has_cached_codes: keys and values are cached as e4m3 codes.
        coded: the matrices in low precision, by scheme.
        coded_experts: routed experts in low precision; None: they have the dtype.
        has_dense: some matrices have the dtype.
    """

    dtype: str
    head_dims: tuple[int, ...]
    page_size: int
    experts: tuple[int, int] | None = None
    is_batch_invariant: bool = False
    has_cached_codes: bool = False
    coded: tuple[CodedProducts, ...] = ()
    coded_experts: CodedProducts | None = None
    has_dense: bool = True


def kernel_choices(platform: Platform, shapes: OpShapes) -> list[KernelChoice]:
    """One entry for each op with more than one kernel, and one for the others."""
    if platform.capability is None:
        return _cpu_choices(platform, shapes)
    choices = [_attention(platform, shapes, head_dim) for head_dim in shapes.head_dims]
    if shapes.has_dense:
        choices.append(_products(platform, shapes))
    choices += [_coded_products(platform, shapes, coded) for coded in shapes.coded]
    if shapes.experts is not None and shapes.coded_experts is not None:
        coded = shapes.coded_experts
        choices.append(_coded_experts(platform, shapes.dtype, coded, shapes.experts))
    elif shapes.experts is not None:
        choices.append(_experts(platform, shapes.dtype, shapes.experts))
    choices.append(KernelChoice("other ops", "CUDA", "one kernel each"))
    return choices


def _cpu_choices(platform: Platform, shapes: OpShapes) -> list[KernelChoice]:
    usable = [isa for isa in _ISA_ORDER[1:] if isa in platform.isa_variants]
    usable = [isa for isa in usable if _ISA_ORDER.index(isa) <= _ISA_ORDER.index(platform.isa)]
    isa = usable[-1] if usable else "base"
    is_fast = isa == platform.isa
    reason = "the widest this processor runs"
    if not is_fast:
        reason = f"the build has no {_ISA_NAMES[platform.isa]} kernels"
    choices = [KernelChoice("ops", f"CPU {_ISA_NAMES[isa]}", reason, is_fast)]
    schemes = dict.fromkeys(coded.scheme for coded in shapes.coded)
    if shapes.coded_experts is not None:
        schemes[shapes.coded_experts.scheme] = None
    for scheme in schemes:
        by, how = _ISA_NAMES[isa], "codes widened to float32"
        if scheme == "int8":
            by, how = _byte_kernel(platform, isa), "sums of integers"
        kernel = f"{_coded_kernel(scheme)}, {by}"
        choices.append(KernelChoice(f"{scheme} products", kernel, f"{how}; {reason}", is_fast))
    if not shapes.has_dense:
        return choices
    if shapes.is_batch_invariant:
        choices.append(KernelChoice("dense products", "linear_packed", "batch_invariant is set"))
    elif shapes.dtype == "float32":
        choices.append(KernelChoice("dense products", "linear_packed", "float32 on the CPU"))
    else:
        reason = f"packed products are for float32, weights are {shapes.dtype}"
        choices.append(KernelChoice("dense products", "torch", reason, is_fast=False))
    return choices


def _byte_kernel(platform: Platform, isa: str) -> str:
    """What multiplies bytes beside the kernels of `isa`: the build and the processor must have it."""
    variant, name = _BYTE_KERNELS[isa]
    has_it = variant in platform.isa_variants and variant in platform.byte_variants
    return name if has_it else _ISA_NAMES[isa]


def _hopper_reason(platform: Platform) -> str:
    """Why the Hopper kernels run, or do not."""
    assert platform.capability is not None
    if platform.has_hopper:
        return "compute capability 9.0"
    if platform.is_limited:
        return "DIFFULEX_FORCE_SM80 is set"
    if platform.capability == (9, 0):
        return "the build has no Hopper kernels"
    return "compute capability {}.{}".format(*platform.capability)


def _misses_hopper(platform: Platform) -> bool:
    """The device has Hopper kernels that are not in use."""
    return platform.capability == (9, 0) and not platform.has_hopper


def _attention(platform: Platform, shapes: OpShapes, head_dim: int) -> KernelChoice:
    op = f"block_attention D {head_dim}"
    assert platform.capability is not None
    head_dims = _HEAD_DIMS.get(platform.profile or "", ())
    dtypes = _HALF if platform.profile == "full" else _HALF[:1]
    if shapes.dtype not in dtypes:
        return KernelChoice(op, "portable", _lacks("dtypes", dtypes, shapes.dtype), is_fast=False)
    lacking = ""
    if head_dim not in head_dims:
        lacking = _lacks("head sizes", [str(item) for item in head_dims], str(head_dim))
    elif platform.capability < (8, 0):
        lacking = "tensor-core kernels need compute capability 8.0"
    if lacking:
        return KernelChoice(op, "portable", lacking, is_fast=False)
    if shapes.has_cached_codes and shapes.dtype != "bfloat16":
        reason = f"the cache holds codes, rows {shapes.dtype}"
        return KernelChoice(op, "portable", reason, is_fast=False)
    low, high = _HOPPER_PAGES
    if platform.has_hopper and not low <= shapes.page_size <= high:
        reason = f"Hopper kernels take pages of {low} to {high} tokens, got {shapes.page_size}"
        return KernelChoice(op, "tensor cores sm_80", reason, is_fast=False)
    kernel = "Hopper sm_90" if platform.has_hopper else "tensor cores sm_80"
    return KernelChoice(op, kernel, _hopper_reason(platform), not _misses_hopper(platform))


def _lacks(what: str, known: Sequence[str], got: str) -> str:
    return f"tensor-core kernels are for {what} {', '.join(known) or 'none'}, got {got}"


def _products(platform: Platform, shapes: OpShapes) -> KernelChoice:
    if shapes.is_batch_invariant:
        return KernelChoice("dense products", "linear_few_rows", "batch_invariant is set")
    if platform.has_hopper and shapes.dtype in _HALF:
        return KernelChoice("dense products", "linear_few_rows, cuBLAS", "by rows and size")
    reason = _hopper_reason(platform)
    if platform.has_hopper:
        reason = f"linear_few_rows is for {' and '.join(_HALF)}, got {shapes.dtype}"
        return KernelChoice("dense products", "cuBLAS", reason, is_fast=False)
    return KernelChoice("dense products", "cuBLAS", reason, not _misses_hopper(platform))


def _coded_kernel(scheme: str) -> str:
    return "linear_w4a16" if scheme == "int4" else "linear_scaled"


def _coded_products(platform: Platform, shapes: OpShapes, coded: CodedProducts) -> KernelChoice:
    """Of the matrices of one scheme."""
    op, kernel = f"{coded.scheme} products", _coded_kernel(coded.scheme)
    reason = _unfit_reason(platform, coded.scheme, shapes.dtype, ("fp8", "fp8_block", "int4"))
    has_library = not shapes.is_batch_invariant
    if reason:
        is_library = has_library and coded.scheme == "int4" and shapes.dtype == "bfloat16"
        kernel += ", portable" + "; cuBLAS" * is_library
        return KernelChoice(op, kernel, reason, platform.capability != (9, 0))
    kernel += ", Hopper sm_90"
    if coded.num_unfit:
        reason = (
            f"{coded.num_unfit} of {coded.num_matrices} have a form that Hopper's does not take"
        )
        kernel += "; portable" + "; cuBLAS" * (has_library and coded.scheme == "int4")
        return KernelChoice(op, kernel, reason, is_fast=False)
    if shapes.is_batch_invariant:
        return KernelChoice(op, kernel, "batch_invariant is set")
    return KernelChoice(op, f"{kernel}; cuBLAS", "by rows and size")


def _unfit_reason(platform: Platform, scheme: str, dtype: str, schemes: Sequence[str]) -> str:
    """Why no Hopper kernel multiplies codes, of which there are some for these schemes."""
    if not platform.has_hopper:
        return _hopper_reason(platform)
    if scheme not in schemes:
        return f"Hopper kernels are for the dtype, {', '.join(schemes)}"
    return "" if dtype == "bfloat16" else f"the Hopper kernel is for bfloat16, got {dtype}"


def _coded_experts(
    platform: Platform, dtype: str, coded: CodedProducts, sizes: tuple[int, int]
) -> KernelChoice:
    scheme = coded.scheme
    reason = _unfit_reason(platform, scheme, dtype, ("fp8", "fp8_block", "int4"))
    if not reason and scheme == "int4" and coded.num_unfit:
        reason = (
            f"{coded.num_unfit} of {coded.num_matrices} layers have a form that Hopper's does not"
            " take"
        )
    elif not reason and any(size % _E4M3_MULTIPLE for size in sizes):
        reason = (
            f"the Hopper kernel takes multiples of {_E4M3_MULTIPLE}, got {sizes[0]} x {sizes[1]}"
        )
    if reason:
        is_fast = platform.capability != (9, 0)
        return KernelChoice("fused_moe", f"{scheme}, portable", reason, is_fast)
    return KernelChoice("fused_moe", f"{scheme}, Hopper sm_90", _hopper_reason(platform))


def _experts(platform: Platform, dtype: str, sizes: tuple[int, int]) -> KernelChoice:
    if dtype not in _HALF or any(size % _MMA_MULTIPLE for size in sizes):
        reason = (
            f"tensor cores take {' and '.join(_HALF)} and sizes that are multiples of"
            f" {_MMA_MULTIPLE}, got {dtype} and {sizes[0]} x {sizes[1]}"
        )
        return KernelChoice("fused_moe", "portable", reason, is_fast=False)
    is_built = dtype == "bfloat16" or platform.profile == "full"
    if not platform.has_hopper or not is_built:
        reason = _hopper_reason(platform)
        if platform.has_hopper:
            reason = f"the build has no Hopper kernels of {dtype}"
        is_fast = not _misses_hopper(platform) and not platform.has_hopper
        return KernelChoice("fused_moe", "tensor cores sm_80", reason, is_fast)
    if any(size % _WGMMA_MULTIPLE for size in sizes):
        reason = f"Hopper kernels take multiples of {_WGMMA_MULTIPLE}, got {sizes[0]} x {sizes[1]}"
        return KernelChoice("fused_moe", "tensor cores sm_80", reason, is_fast=False)
    return KernelChoice("fused_moe", "Hopper sm_90", _hopper_reason(platform))
