# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.checkpoint.auto_model`."""

from diffulex.checkpoint.auto_model import detect, load_model

__all__ = ["detect", "load_model"]
