# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.families.spec`."""

from diffulex.families.spec import ModelSpec

__all__ = ["ModelSpec"]
