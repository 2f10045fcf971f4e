# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.families.spec.moe`."""

from diffulex.families.spec.moe import MoeSpec

__all__ = ["MoeSpec"]
