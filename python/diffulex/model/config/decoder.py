# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.families.spec.decoder`."""

from diffulex.families.spec.decoder import FamilyTokens, read_decoder_spec

__all__ = ["FamilyTokens", "read_decoder_spec"]
