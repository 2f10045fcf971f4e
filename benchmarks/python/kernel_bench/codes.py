# SPDX-License-Identifier: Apache-2.0
"""What codes with scales say, in float64."""

from __future__ import annotations

import torch

from diffulex import ops
from kernel_bench.agreement import Agreement, Tolerance

__all__ = ["codes_agreement", "nibble_values", "rounded", "row_values"]

#: Rounding to e4m3, half a unit in the last of 4 places, and to multiples of 2^-9 of the scale.
CODES = Tolerance(2.0**-4, 0.005)


def row_values(coded: ops.QuantizedRows) -> torch.Tensor:
    """Rows of codes with a scale of a row, or one of each group of its columns."""
    num_rows, depth = coded.codes.shape
    group = depth if len(coded.scale) == 1 else ops.QUANT_GROUP
    scale = coded.scale[:, :num_rows].double().T.repeat_interleave(group, 1)
    return coded.codes.double() * scale[:, :depth]


def nibble_values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of W as products take them, of two codes a byte and scales by group and row."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).float() - ops.INT4_ZERO
    wide = scale.float().T.repeat_interleave(nibbles.size(1) // len(scale), 1)
    return (nibbles * wide).bfloat16().double()


def rounded(rows: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """Rows as their codes say."""
    return row_values(ops.quantize_rows(rows, code))


def codes_agreement(coded: ops.QuantizedRows, exact: torch.Tensor) -> Agreement:
    agreement = Agreement(coded.codes.numel(), CODES)
    agreement.add(row_values(coded), exact)
    return agreement
