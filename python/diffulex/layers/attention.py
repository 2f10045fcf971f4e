# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.nn.attention`."""

from diffulex.nn.attention import BlockAttention

__all__ = ["BlockAttention"]
