# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.families.spec`."""

from diffulex.families.spec import ModelSpec

__all__ = ["ModelSpec"]
