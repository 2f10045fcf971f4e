# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.families.spec.names`."""

from diffulex.families.spec.names import TensorNames

__all__ = ["TensorNames"]
