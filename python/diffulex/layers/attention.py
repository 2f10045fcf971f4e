# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.nn.attention`."""

from diffulex.nn.attention import BlockAttention

__all__ = ["BlockAttention"]
