# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.families.spec.decoder`."""

from diffulex.families.spec.decoder import FamilyTokens, read_decoder_spec

__all__ = ["FamilyTokens", "read_decoder_spec"]
