# SPDX-License-Identifier: Apache-2.0
"""DiffuCoder and its D2F variants: Dream's files, told apart only by the name the user gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.base import Family
from diffulex.families.dream import FAMILY as DREAM
from diffulex.families.dream import read_dream_spec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.families.spec import ModelSpec

__all__ = ["FAMILY"]


def read_diffucoder_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> ModelSpec:
    """Description of a DiffuCoder checkpoint; see `read_decoder_spec` for the errors."""
    return read_dream_spec(config, model_dir, mask_token_id=mask_token_id, family="diffucoder")


FAMILY = Family(
    "diffucoder",
    read_diffucoder_spec,
    defaults=DREAM.defaults,
    is_bidirectional=DREAM.is_bidirectional,
)
