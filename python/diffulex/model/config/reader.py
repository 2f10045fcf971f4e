# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.families.spec.reader`."""

from diffulex.families.spec.reader import ConfigReader

__all__ = ["ConfigReader"]
