# SPDX-License-Identifier: Apache-2.0
"""Pipelines that change pictures: by an instruction, or by going on from a noisy copy (`strength`)."""

from __future__ import annotations

from dataclasses import replace

from diffulex.omni.models import flux, qwen_image
from diffulex.omni.registry import ImageInput, PipelineSpec

__all__ = ["FLUX_IMG2IMG", "FLUX_KONTEXT", "QWEN_EDIT", "QWEN_EDIT_PLUS", "QWEN_IMG2IMG"]

#: Sequence and tensor parallelism are for the pipelines without pictures.
_FLUX = replace(flux.SPEC, has_sequence_plan=False, tensor_plan=None)
_QWEN = replace(qwen_image.SPEC, has_sequence_plan=False, tensor_plan=None)
_STRENGTH = {"strength": 0.6}

FLUX_IMG2IMG = replace(
    _FLUX,
    name="FluxImg2ImgPipeline",
    defaults={**_FLUX.defaults, "guidance_scale": 7.0, **_STRENGTH},
    image_input=ImageInput(),
)
QWEN_IMG2IMG = replace(
    _QWEN,
    name="QwenImageImg2ImgPipeline",
    defaults={**_QWEN.defaults, **_STRENGTH},
    image_input=ImageInput(),
)

_KONTEXT_COEFFICIENTS = (-1.04655119e3, 3.12563399e2, -1.69500694e1, 4.10995971e-1, 3.74537863e-2)
assert flux.SPEC.tea_cache is not None
FLUX_KONTEXT = replace(
    _FLUX,
    name="FluxKontextPipeline",
    defaults={**_FLUX.defaults, "guidance_scale": 2.5},
    # The pipeline would scale every size to this area.
    image_input=ImageInput(least=0, arguments=lambda height, width: {"max_area": height * width}),
    tea_cache=replace(flux.SPEC.tea_cache, coefficients=lambda _: _KONTEXT_COEFFICIENTS),
)


def _edit(name: str, most: int) -> PipelineSpec:
    return replace(
        _QWEN,
        name=name,
        # It reads the picture as a part of the prompt.
        prompt_tokens=None,
        image_input=ImageInput(most=most, side_multiple=32),
        packages=("torchvision",),
    )


QWEN_EDIT = _edit("QwenImageEditPipeline", 1)
QWEN_EDIT_PLUS = _edit("QwenImageEditPlusPipeline", 3)
