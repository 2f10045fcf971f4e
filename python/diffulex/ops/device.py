# SPDX-License-Identifier: Apache-2.0
"""A device before ops run on it: which kernels serve it, and loading them."""

from __future__ import annotations

import functools

import torch

import diffulex_ext
from diffulex.env import get_flag


@functools.cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Compute capability 9.0, a build for it, and no `DIFFULEX_FORCE_SM80=1`."""
    if device.type != "cuda" or get_flag("DIFFULEX_FORCE_SM80"):
        return False
    archs = diffulex_ext.build_info()["cuda_archs"]
    is_built = any(arch.startswith("90a") for arch in archs)
    return is_built and torch.cuda.get_device_capability(device) == (9, 0)


def warmup(device: torch.device | str = "cuda") -> None:
    """Loads every CUDA kernel of the ops and waits for the device; the CPU has nothing to load.

    Call it before the first capture: any op of any shape can be captured then.

    Raises:
        ValueError: a device that is neither cpu nor cuda.
        RuntimeError: a library built without CUDA, or an error of the device.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"ops.warmup: device: expected cpu or cuda, got {device.type}")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.ops.diffulex_control.warm_kernels(index)
        torch.cuda.synchronize(device)
