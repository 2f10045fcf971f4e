# SPDX-License-Identifier: Apache-2.0
"""Table of rotary cosines and sines."""

from __future__ import annotations

import torch


def build_cos_sin_cache(
    max_positions: int,
    rotary_dim: int,
    theta: float,
    device: torch.device | str,
    *,
    num_turning: int | None = None,
    base_dim: int | None = None,
) -> torch.Tensor:
    """[max_positions, rotary_dim] float32, cosines in the first half, sines in the second.

    Angles are products of float32 position and float32 inverse frequency: checkpoints were trained
    with that rounding, and at large positions a more precise angle differs from it visibly.

    Args:
        num_turning: slots from here on have angle 0 (proportional rotary embedding); None = all
            turn.
        base_dim: denominator of the exponents; None = `rotary_dim`.
    """
    if torch.device(device).type == "meta":
        return torch.empty(max_positions, rotary_dim, dtype=torch.float32, device=device)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32)
    exponents /= rotary_dim if base_dim is None else base_dim
    inverse_frequencies = 1.0 / (theta**exponents)
    if num_turning is not None:
        inverse_frequencies[num_turning:] = 0.0
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
