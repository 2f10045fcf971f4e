# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.families.spec.moe`."""

from diffulex.families.spec.moe import MoeSpec

__all__ = ["MoeSpec"]
