# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.runner.model_runner`."""

from diffulex.runner.model_runner import ModelRunner

__all__ = ["ModelRunner"]
