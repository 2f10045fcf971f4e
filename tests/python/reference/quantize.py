# SPDX-License-Identifier: Apache-2.0
"""Low precision as its formats define it, in NumPy; shares nothing with the kernels."""

from __future__ import annotations

import numpy as np
import torch


def _e4m3_table() -> np.ndarray:
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10.0))


E4M3 = _e4m3_table()


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """Nearest codes of float32 values, ties to even, saturated at 448; NaN 0x7F."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    upper = np.minimum(np.searchsorted(E4M3, np.nan_to_num(magnitude)), 126)
    lower = np.maximum(upper - 1, 0)
    to_lower, to_upper = magnitude - E4M3[lower], E4M3[upper] - magnitude
    is_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (lower % 2 == 0))
    codes = np.where(is_lower, lower, upper) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    magnitude = np.append(E4M3, np.nan)[codes & 0x7F]
    return np.where(codes & 0x80, -magnitude, magnitude)


def int8_codes(values: np.ndarray) -> np.ndarray:
    clamped = np.clip(np.nan_to_num(values.astype(np.float64), posinf=127, neginf=-127), -127, 127)
    return np.rint(clamped).astype(np.int8)


def values_of(codes: torch.Tensor) -> np.ndarray:
    """What float8_e4m3fn or int8 codes stand for, without their scale."""
    if codes.dtype == torch.int8:
        return codes.numpy().astype(np.float64)
    return e4m3_values(codes.view(torch.uint8).numpy())


def quantize_group(values: np.ndarray, is_int8: bool) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of float32 values that share one scale."""
    limit = np.float32(127 if is_int8 else 448)
    known = values[~np.isnan(values)]
    largest = np.float32(np.abs(known).max()) if known.size else np.float32(0)
    code = int8_codes if is_int8 else e4m3_codes
    with np.errstate(all="ignore"):
        if np.isinf(largest):
            return code(values), np.float32(1)
        factor = limit / largest
        if largest == 0 or np.isinf(factor):
            return np.zeros(values.shape, np.int8 if is_int8 else np.uint8), np.float32(1)
        return code(values * factor), largest / limit


def quantize_rows(x: np.ndarray, is_int8: bool, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [T, K] and scales [ceil(K / group), T]."""
    codes = np.empty(x.shape, np.int8 if is_int8 else np.uint8)
    scale = np.empty((-(-x.shape[1] // group), x.shape[0]), np.float32)
    for row in range(x.shape[0]):
        for index in range(scale.shape[0]):
            part = slice(index * group, (index + 1) * group)
            codes[row, part], scale[index, row] = quantize_group(x[row, part], is_int8)
    return codes, scale


def int4_group(values: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """q in [-8, 7] and the bfloat16 scale of one group of float32 values."""
    largest = np.abs(values).max()
    best = None
    for factor in (1.0, 0.95, 0.9, 0.85):
        exact = np.float32(np.float32(np.float32(factor) * largest) / np.float32(7))
        scale = np.float32(torch.tensor(exact).bfloat16().float().item())
        if scale == 0:
            return np.zeros(values.shape, np.int64), np.float32(1)
        q = np.clip(np.rint(values / scale), -8, 7)
        error = np.float32(0)
        for difference in values - (q * scale).astype(np.float32):
            error = np.float32(error + np.float32(difference * difference))
        if best is None or error < best[0]:
            best = (error, q.astype(np.int64), scale)
    assert best is not None
    return best[1], best[2]


def kv_head(values: np.ndarray) -> tuple[np.ndarray, int]:
    """e4m3 codes of one head of K or V, and its scale byte e + 127.

    e = clamp(ceil(log2(a / 448)), -100, 7) for the largest magnitude a; 0 for zeros; 255 with codes 0
    where a value is NaN.
    """
    wide = values.astype(np.float64)
    if np.isnan(wide).any():
        return np.zeros(wide.shape, np.uint8), 255
    largest = np.abs(wide).max(initial=0)
    if largest == 0:
        return np.zeros(wide.shape, np.uint8), 0
    exponent = 7
    if np.isfinite(largest):
        fraction, power = np.frexp(largest / 448)
        exponent = int(np.clip(power - 1 if fraction == 0.5 else power, -100, 7))
    return e4m3_codes(wide * 2.0**-exponent), exponent + 127


def kv_values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values of codes [..., D] below scale bytes [...], in float64."""
    exponents = scales.astype(np.int64)[..., None] - 127
    values = e4m3_values(codes) * np.where(exponents == -127, 0.0, 2.0**exponents)
    return np.where(scales[..., None] == 255, np.nan, values)
