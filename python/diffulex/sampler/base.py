# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.samplers.base`."""

from diffulex.samplers.base import MaskFillSampler, SamplerInputs

__all__ = ["MaskFillSampler", "SamplerInputs"]
