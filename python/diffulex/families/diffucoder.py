# SPDX-License-Identifier: Apache-2.0
"""DiffuCoder and its D2F variants: Dream's files, told apart only by the name the user gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.dream import read_dream_spec
from diffulex.nn.decoder import DecoderForDiffusionLM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.families.spec import ModelSpec

__all__ = ["DiffuCoderForDiffusionLM"]


def read_diffucoder_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> ModelSpec:
    """Description of a DiffuCoder checkpoint; see `read_decoder_spec` for the errors."""
    return read_dream_spec(config, model_dir, mask_token_id=mask_token_id, family="diffucoder")


class DiffuCoderForDiffusionLM(DecoderForDiffusionLM):
    """A position's logits predict the next position."""

    read_spec = staticmethod(read_diffucoder_spec)
