# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.families.spec.names`."""

from diffulex.families.spec.names import TensorNames

__all__ = ["TensorNames"]
