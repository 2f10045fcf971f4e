# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.runner.model_runner`."""

from diffulex.runner.model_runner import ModelRunner

__all__ = ["ModelRunner"]
