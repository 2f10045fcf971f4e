# SPDX-License-Identifier: Apache-2.0
"""The tolerance rule of the kernel specification."""

from __future__ import annotations

import numpy as np
import torch


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Exact fp64 copy."""
    return tensor.detach().cpu().double().numpy()


def assert_accurate(
    out: torch.Tensor,
    reference: np.ndarray,
    base: torch.Tensor,
    *,
    cap: float | None = None,
    slack: float = 1e-5,
) -> None:
    """max |out - ref| <= 2 max |base - ref| + slack, and <= cap.

    `reference` is fp64 from the rounded inputs, `base` the same math in plain torch in the dtype of
    the op. Infinities have to agree exactly.
    """
    actual = to_numpy(out)
    assert actual.shape == reference.shape
    assert not np.isnan(actual).any()
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(actual[~finite], reference[~finite])
    if not finite.any():
        return
    error = np.abs(actual - reference)[finite].max()
    allowed = 2 * np.abs(to_numpy(base) - reference)[finite].max() + slack
    assert error <= allowed, f"error {error} > {allowed}"
    if cap is not None:
        assert error <= cap, f"error {error} > cap {cap}"
