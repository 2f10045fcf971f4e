# SPDX-License-Identifier: Apache-2.0
"""Whether every element of an output agrees with a reference in higher precision."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["BFLOAT16", "FLOAT32", "Agreement", "Tolerance"]


class Tolerance(NamedTuple):
    """An element may deviate by `relative` of itself and `of_rms` of the RMS of its row."""

    relative: float
    of_rms: float = 0.0


#: Rounding to bfloat16 (half a unit in the last place is 2^-9), and the sums before it.
BFLOAT16 = Tolerance(2.0**-8, 0.02)
FLOAT32 = Tolerance(1e-6, 5e-6)


class Agreement:
    """Compares an output with its reference, part by part, and counts what was compared.

    An error of the whole output hides a wrong tile, so each element is held against its own limit.
    """

    def __init__(self, num_elements: int, tolerance: Tolerance = BFLOAT16) -> None:
        """`num_elements`: how many elements the op writes; fewer compared is not right."""
        self.expected = num_elements
        self.tolerance = tolerance
        self.compared = 0
        self._sums: list[torch.Tensor] = []
        self._ratios: list[torch.Tensor] = []
        self._claims: list[torch.Tensor] = []

    def add(
        self, out: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance | None = None
    ) -> None:
        """Compares two tensors of one shape [..., columns]; the last axis is a row."""
        if out.shape != reference.shape:
            raise ValueError(
                f"out: expected shape {tuple(reference.shape)}, got {tuple(out.shape)}"
            )
        if out.numel() == 0:
            return
        limit = tolerance or self.tolerance
        exact = reference.double()
        difference = (out.double() - exact).abs()
        allowed = limit.relative * exact.abs()
        if limit.of_rms:
            allowed += limit.of_rms * exact.square().mean(-1, keepdim=True).sqrt()
        # Nothing is allowed where the reference is exactly 0, and 0 / 0 is right.
        ratio = torch.where(difference == 0, 0.0, difference / allowed)
        self._ratios.append(torch.where(ratio.isnan(), torch.inf, ratio).max())
        self._sums.append(torch.stack((difference.square().sum(), exact.square().sum())))
        self.compared += out.numel()

    def claim(self, holds: torch.Tensor) -> None:
        """A property of the output, of any shape, that must hold everywhere."""
        self._claims.append(holds.all())
        self.compared += holds.numel()

    @property
    def error(self) -> float:
        """Norm of the difference over the norm of the reference."""
        if not self._sums:
            return 0.0
        difference, norm = torch.stack(self._sums).sum(0).tolist()
        return float((difference / max(norm, 1e-60)) ** 0.5)

    @property
    def worst(self) -> float:
        """Largest deviation over what is allowed there; at most 1 is right, NaN is infinite."""
        if not all(bool(claim) for claim in self._claims):
            return float("inf")
        return float(torch.stack(self._ratios).max()) if self._ratios else 0.0

    @property
    def is_right(self) -> bool:
        return self.compared == self.expected and self.worst <= 1.0
