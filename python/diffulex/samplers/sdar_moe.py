# SPDX-License-Identifier: Apache-2.0
"""SDAR-MoE: decoded like the dense family."""

from __future__ import annotations

from diffulex.samplers.sdar import SdarSampler

__all__ = ["SdarMoeSampler"]


class SdarMoeSampler(SdarSampler):
    """Mask filling with the settings of the SDAR family."""
