# SPDX-License-Identifier: Apache-2.0
"""Pipelines that take pictures.

They change one by an instruction, go on from a noisy copy (`strength`), take it apart into layers, or
begin a video with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diffulex.omni.errors import RequestError
from diffulex.omni.models import flux, qwen_image, wan
from diffulex.omni.pictures import size_like
from diffulex.omni.registry import ImageInput, PipelineSpec

if TYPE_CHECKING:
    from diffulex.omni.request import OmniDiffusionRequest

__all__ = [
    "FLUX_IMG2IMG",
    "FLUX_KONTEXT",
    "QWEN_EDIT",
    "QWEN_EDIT_PLUS",
    "QWEN_IMG2IMG",
    "QWEN_LAYERED",
    "WAN_I2V",
]

#: Sequence and tensor parallelism are for the pipelines without pictures.
_FLUX = replace(flux.SPEC, has_sequence_plan=False, tensor_plan=None)
_QWEN = replace(qwen_image.SPEC, has_sequence_plan=False, tensor_plan=None)
_STRENGTH = {"strength": 0.6}

FLUX_IMG2IMG = replace(
    _FLUX,
    name="FluxImg2ImgPipeline",
    defaults={**_FLUX.defaults, "guidance_scale": 7.0, **_STRENGTH},
    # Noise of a request would take the place of the picture.
    latents_shape=None,
    image_input=ImageInput(),
)
QWEN_IMG2IMG = replace(
    _QWEN,
    name="QwenImageImg2ImgPipeline",
    defaults={**_QWEN.defaults, **_STRENGTH},
    latents_shape=None,
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
        packages={"processor": "torchvision"},
    )


QWEN_EDIT = _edit("QwenImageEditPipeline", 1)
QWEN_EDIT_PLUS = _edit("QwenImageEditPlusPipeline", 3)


_RESOLUTIONS = (640, 1024)


def _layered_size(size: tuple[int, int], extra: Mapping[str, Any]) -> dict[str, int]:
    """Of the shape of the picture and the area of a square of the resolution."""
    resolution = extra.get("resolution", _RESOLUTIONS[0])
    if resolution not in _RESOLUTIONS:
        legal = " or ".join(map(str, _RESOLUTIONS))
        raise RequestError(f"resolution: expected {legal}, got {resolution!r}")
    return size_like(size, resolution**2, 32, 32)


def _layers(_request: OmniDiffusionRequest, images: list[Any]) -> list[Any]:
    """All layers of all images, in order."""
    return [layer for image in images for layer in image]


QWEN_LAYERED = replace(
    _QWEN,
    name="QwenImageLayeredPipeline",
    prompt_tokens=None,
    latents_shape=None,
    has_latents=False,
    # It would write a caption in place of the prompt.
    has_embeds=False,
    # Of several pictures, which have a place of their own in its latents.
    decode=None,
    image_input=ImageInput(own_size=_layered_size, mode="RGBA"),
    packages={"processor": "torchvision"},
    post_process=_layers,
)

assert wan.SPEC.tea_cache is not None
WAN_I2V = replace(
    wan.SPEC,
    name="WanImageToVideoPipeline",
    defaults={**wan.SPEC.defaults, "height": 480, "width": 832},
    image_encoders=("image_encoder",),
    float32_components=("vae", "image_encoder"),
    has_sequence_plan=False,
    # Those that are published depend on the size of the video.
    tea_cache=replace(wan.SPEC.tea_cache, coefficients=lambda _: None),
    image_input=ImageInput(),
    # It cleans prompts with it, and does not ask whether it is there.
    packages={"tokenizer": "ftfy"},
)
