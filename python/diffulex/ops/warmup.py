# SPDX-License-Identifier: Apache-2.0
"""Preparation of a device, so that nothing is loaded lazily inside CUDA graph capture."""

from __future__ import annotations

import torch


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
