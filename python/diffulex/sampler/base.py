# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.samplers.base`."""

from diffulex.samplers.base import MaskFillSampler, SamplerInputs

__all__ = ["MaskFillSampler", "SamplerInputs"]
