# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.nn.feed_forward`."""

from diffulex.nn.feed_forward import FeedForward

__all__ = ["FeedForward"]
