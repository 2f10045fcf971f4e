# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.nn.decoder`."""

from diffulex.nn.decoder import DecoderForDiffusionLM, build_feed_forward

__all__ = ["DecoderForDiffusionLM", "build_feed_forward"]
