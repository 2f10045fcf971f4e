# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.nn.feed_forward`."""

from diffulex.nn.feed_forward import FeedForward

__all__ = ["FeedForward"]
