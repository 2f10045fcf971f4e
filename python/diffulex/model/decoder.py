# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.nn.decoder`."""

from diffulex.nn.decoder import DecoderForDiffusionLM, build_feed_forward

__all__ = ["DecoderForDiffusionLM", "build_feed_forward"]
