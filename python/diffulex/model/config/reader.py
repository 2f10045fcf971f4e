# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.families.spec.reader`."""

from diffulex.families.spec.reader import ConfigReader

__all__ = ["ConfigReader"]
