# SPDX-License-Identifier: Apache-2.0
"""Ovis-Image and LongCat-Image: transformers like FLUX's, with a second branch of guidance.

diffusers describes neither their blocks nor how their layers can be shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from diffulex.log import get_logger
from diffulex.omni.models import flux
from diffulex.omni.models.decoding import like_projection, packed_latents, spatial_multiple
from diffulex.omni.registry import CfgBranches, Guidance, ImageInput, PipelineSpec

__all__ = ["LONGCAT", "LONGCAT_EDIT", "OVIS"]

logger = get_logger(__name__)

_SIZE = {"height": 1024, "width": 1024, "num_inference_steps": 50}

OVIS = PipelineSpec(
    name="OvisImagePipeline",
    media="image",
    size_multiple=spatial_multiple,
    defaults={**_SIZE, "guidance_scale": 5.0, "max_sequence_length": None},
    guidance=Guidance("guidance_scale"),
    latents_shape=packed_latents,
    decode=flux.SPEC.decode,
    cfg=CfgBranches(output_like=like_projection),
)


def _plain_without_processor(pipeline: Any) -> dict[str, Any]:
    """Prompts stay as they are where the checkpoint lacks what rewrites them."""
    if pipeline.text_processor is not None:
        return {}
    logger.info("LongCatImagePipeline: no text_processor, so prompts are not rewritten")
    return {"enable_prompt_rewrite": False}


#: It writes a longer prompt by itself, with the text encoder and its processor.
LONGCAT = PipelineSpec(
    name="LongCatImagePipeline",
    media="image",
    size_multiple=spatial_multiple,
    defaults={**_SIZE, "guidance_scale": 4.5},
    guidance=Guidance("guidance_scale"),
    latents_shape=packed_latents,
    # It counts its prompts by their texts, which it takes none of beside embeddings.
    has_embeds=False,
    decode=flux.SPEC.decode,
    cfg=CfgBranches(output_like=like_projection),
    call_defaults=_plain_without_processor,
    packages={"text_processor": "torchvision"},
)

_EDIT_AREA, _EDIT_MULTIPLE = 1024 * 1024, 16


def _edit_size(size: tuple[int, int], _extra: Mapping[str, Any]) -> dict[str, int]:
    """Of the shape of the picture, with sides rounded up."""
    ratio = size[0] / size[1]
    width = math.sqrt(_EDIT_AREA * ratio)
    sides = {"height": width / ratio, "width": width}
    return {name: math.ceil(side / _EDIT_MULTIPLE) * _EDIT_MULTIPLE for name, side in sides.items()}


LONGCAT_EDIT = PipelineSpec(
    name="LongCatImageEditPipeline",
    media="image",
    size_multiple=spatial_multiple,
    defaults=LONGCAT.defaults,
    guidance=LONGCAT.guidance,
    has_embeds=False,
    decode=flux.SPEC.decode,
    cfg=LONGCAT.cfg,
    image_input=ImageInput(own_size=_edit_size),
    packages=LONGCAT.packages,
)
