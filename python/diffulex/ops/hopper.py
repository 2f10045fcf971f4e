# SPDX-License-Identifier: Apache-2.0
"""Whether the Hopper kernels (`csrc/ops/*/sm90`) serve a device."""

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
