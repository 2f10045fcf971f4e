# SPDX-License-Identifier: Apache-2.0
"""DiffuCoder and its D2F variants: Dream's files, told apart only by the name the user gives."""

from __future__ import annotations

from diffulex.families.base import Family
from diffulex.families.dream import DREAM_SETTINGS, DREAM_TOKENS
from diffulex.families.dream import FAMILY as DREAM
from diffulex.families.spec.decoder import decoder_reader

__all__ = ["FAMILY"]

FAMILY = Family(
    "diffucoder",
    decoder_reader("diffucoder", DREAM_TOKENS, **DREAM_SETTINGS),
    defaults=DREAM.defaults,
    is_bidirectional=DREAM.is_bidirectional,
)
