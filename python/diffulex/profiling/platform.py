# SPDX-License-Identifier: Apache-2.0
"""What decides which kernels run: the processor or device, and what the library was built for."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from diffulex.env import get_flag

__all__ = ["Platform", "byte_variants", "cpu_isa", "runs_on"]

_CPUINFO = Path("/proc/cpuinfo")

# As csrc/ops/shared/cpu_isa/select_x86_64.cpp asks the processor, by the names of Linux.
_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# As csrc/ops/quant/isa/select_*.cpp do: the variants with products of bytes.
_BYTE_VARIANTS = {"v3n": "avx_vnni", "v4n": "avx512_vnni", "dot": "asimddp"}
# What the line of flags begins with.
_FLAGS = {"x86_64": "flags", "AMD64": "flags", "aarch64": "Features"}


def _cpu_flags(cpuinfo: Path) -> set[str]:
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return {"asimddp"}  # since the first of these processors
    word = _FLAGS.get(platform.machine())
    if word is None or not cpuinfo.is_file():
        return set()
    text = cpuinfo.read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if line.startswith(word))
    return set(next(lines, "").split())


def cpu_isa(cpuinfo: Path = _CPUINFO) -> str:
    """`v4` (AVX-512), `v3` (AVX2) or `base`: the widest CPU kernels this processor runs."""
    flags = _cpu_flags(cpuinfo)
    if flags >= _V4:
        return "v4"
    return "v3" if flags >= _V3 else "base"


def byte_variants(cpuinfo: Path = _CPUINFO) -> tuple[str, ...]:
    """Variants of the CPU kernels with products of bytes that this processor runs."""
    flags = _cpu_flags(cpuinfo)
    return tuple(variant for variant, flag in _BYTE_VARIANTS.items() if flag in flags)


def runs_on(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether a device of this compute capability runs what was built for these architectures.

    Args:
        archs: as CMake has them: `80`, `90a` (that one alone), `86-real` (no PTX), `90-virtual` (PTX
            alone).
        capability: major and minor version.
    """
    for arch in archs:
        digits = "".join(char for char in arch.partition("-")[0] if char.isdigit())
        built = int(digits[:-1]), int(digits[-1])
        is_own = arch.partition("-")[0][-1].isalpha()
        has_binary, has_ptx = not arch.endswith("-virtual"), not arch.endswith("-real")
        if built == capability:
            return True
        if not is_own and has_binary and built[0] == capability[0] and built[1] < capability[1]:
            return True
        if not is_own and has_ptx and built < capability:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Platform:
    """Facts about a device and the build.

    Attributes:
        capability: of a CUDA device; None: the CPU.
        archs: that the library has CUDA kernels for.
        profile: `full` or `minimal` set of attention kernels; None: no CUDA.
        isa: see `cpu_isa`.
        isa_variants: wider ones than `base` that the library has.
        has_hopper: the Hopper kernels are in use.
        is_limited: DIFFULEX_FORCE_SM80 turns them off.
        byte_variants: see `byte_variants`.
    """

    capability: tuple[int, int] | None
    archs: tuple[str, ...]
    profile: str | None
    isa: str
    isa_variants: tuple[str, ...]
    has_hopper: bool = False
    is_limited: bool = False
    byte_variants: tuple[str, ...] = ()

    @classmethod
    def of(cls, device_type: str, index: int | None, *, has_hopper: bool) -> Platform:
        """That of a device of this machine."""
        import torch  # noqa: PLC0415 (slow to import)

        import diffulex_ext  # noqa: PLC0415 (loads the library)

        build = diffulex_ext.build_info()
        capability = None
        if device_type == "cuda":
            capability = torch.cuda.get_device_capability(index)
        return cls(
            capability,
            tuple(build["cuda_archs"]),
            build["cuda_profile"],
            cpu_isa(),
            tuple(build["cpu_isa_variants"]),
            has_hopper,
            get_flag("DIFFULEX_FORCE_SM80"),
            byte_variants(),
        )
