# SPDX-License-Identifier: Apache-2.0
"""Normalised descriptions of checkpoints, read from ``config.json`` without running remote code."""

from __future__ import annotations

from diffulex.families.spec.model_spec import ModelSpec

__all__ = ["ModelSpec"]
