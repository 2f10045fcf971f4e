# SPDX-License-Identifier: Apache-2.0
"""DiffuCoder: Dream's architecture, decoded like Dream."""

from __future__ import annotations

from diffulex.samplers.dream import DreamSampler

__all__ = ["DiffuCoderSampler"]


class DiffuCoderSampler(DreamSampler):
    """Mask filling with the settings of D2F-DiffuCoder."""
