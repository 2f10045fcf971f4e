# SPDX-License-Identifier: Apache-2.0
"""The worked rows of the sampler specification: V = 8, B = 4, mask id 7."""

from __future__ import annotations

import torch

MASK = 7
PROBABILITIES = [
    [0.02, 0.92, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01],
    [0.05, 0.10, 0.60, 0.05, 0.05, 0.05, 0.05, 0.05],
    [0.005, 0.005, 0.005, 0.96, 0.005, 0.005, 0.005, 0.01],
    [0.05, 0.05, 0.05, 0.05, 0.25, 0.10, 0.05, 0.40],
]


def logits(device: str) -> torch.Tensor:
    """ln P of the four rows."""
    return torch.tensor(PROBABILITIES, dtype=torch.float64).log().float().to(device)


def mask_ids(device: str) -> torch.Tensor:
    return torch.tensor([MASK], device=device)
