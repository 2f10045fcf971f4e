# SPDX-License-Identifier: Apache-2.0
"""Pipelines by the class name of `model_index.json`.

An installed package adds its own as an entry point `AutoOmniPipeline.<class name>` of the group
`diffulex.plugins`, a program with `register_pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.omni.errors import UnsupportedModelError
from diffulex.registry import Registry

if TYPE_CHECKING:
    from diffulex.omni.request import OmniDiffusionRequest

__all__ = [
    "AutoOmniPipeline",
    "CfgBranches",
    "Guidance",
    "ImageInput",
    "PipelineSpec",
    "TeaCacheSpec",
    "find_pipeline",
    "register_pipeline",
]


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance of a pipeline.

    Attributes:
        argument: request field that holds its scale.
        off: largest scale that turns it off.
        negative_prompt: used when the request has none.
    """

    argument: str
    off: float = 1.0
    negative_prompt: str = ""


@dataclass(frozen=True, slots=True)
class CfgBranches:
    """How a pipeline calls its transformer for the two branches of guidance, for two ranks.

    Attributes:
        output_like: (transformer, arguments of the call) -> shape of its output; for pipelines with a
            call `cond` and then a call `uncond`.
        batched: arguments that hold both branches, one after the other, along their first axis; for
            pipelines with one call.
    """

    output_like: Callable[[Any, Mapping[str, Any]], tuple[int, ...]] | None = None
    batched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TeaCacheSpec:
    """What TeaCache needs to know about a pipeline.

    Attributes:
        indicator: (first block, arguments of its call) -> what is compared between steps.
        coefficients: configuration of the transformer -> five numbers, highest power first; None: the
            caller has to give them.
        threshold: its default; None: that of TeaCache.
        first_steps: steps that are always computed.
    """

    indicator: Callable[[Any, Mapping[str, Any]], Any]
    coefficients: Callable[[Mapping[str, Any]], tuple[float, ...] | None]
    threshold: float | None = None
    first_steps: int = 1


@dataclass(frozen=True, slots=True)
class ImageInput:
    """Pictures that a pipeline takes beside the prompt.

    Attributes:
        least, most: how many of a request.
        side_multiple: height and width that follow from the first picture are rounded to it.
        arguments: (height, width) -> further arguments of the call, which the engine sets itself.
        own_size: (width and height of the first picture, further arguments of the request) -> `height`
            and `width` that the pipeline gives the result, where requests may not say them.
        mode: of PIL, in which the pipeline takes them.
    """

    least: int = 1
    most: int = 1
    side_multiple: int = 1
    arguments: Callable[[int, int], dict[str, Any]] | None = None
    own_size: Callable[[tuple[int, int], Mapping[str, Any]], dict[str, int]] | None = None
    mode: str = "RGB"


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """What the engine has to know about a pipeline class of diffusers.

    Attributes:
        name: class name in diffusers.
        media: `image` or `video`.
        size_multiple: pixels that height and width are multiples of, from the loaded pipeline.
        defaults: request fields and their defaults; a field outside them is an error of the request.
        guidance: which scale decides whether the negative prompt is used.
        transformers: attribute names of the denoisers, for offloading.
        text_encoders: attribute names of the text encoders, for offloading.
        image_encoders: of those that see pictures beside the VAE; a checkpoint may lack them.
        schedule_keys: `flow_shift`, `boundary_ratio`: keys of the engine that change its schedule.
        float32_components: components that keep float32 whatever the dtype.
        frame_multiple: num_frames - 1 is a multiple of it; videos only.
        prompt_tokens: (pipeline, prompt, field values) -> its tokens and the most that the pipeline
            reads, so that a longer prompt is an error; None: the pipeline cuts it.
        latents_shape: (pipeline, arguments of its call) -> shape of the latents of one image, which a
            request may bring; None: it may not.
        has_latents: its call can end before the VAE; without it neither requests nor ranks that do
            not lead can have latents of it.
        has_embeds: whether requests may bring embeddings, where its call has arguments for them.
        lists_embeds: it takes embeddings as a list of tensors, one per prompt.
        decode: (pipeline, latents, height, width) -> pictures [B, 3, H, W] in -1..1, for previews, by
            `pipeline.vae.decode`, which an estimate may stand in for; None: no previews.
        has_sequence_plan: the transformer says how its tokens can be shared (`_cp_plan`).
        tensor_plan: transformer -> paths of its layers and `colwise`, `rowwise` or an object for
            several inputs side by side, to share its heads; None: it cannot be shared.
        has_own_attention: its processors compute attention by themselves, so that it stays theirs.
        has_own_heads: its attention counts heads by itself, not by the width of its layers.
        cfg: how two ranks can share the branches of guidance; None: they cannot.
        block_lists: attribute names of a transformer's lists of blocks, in their order.
        tea_cache: what TeaCache compares; None: the pipeline cannot have it.
        image_input: which pictures it takes; None: none.
        call_defaults: loaded pipeline -> arguments of its call where a request says none of them.
        packages: components and what they import beside the packages of the extra.
        pre_process: replaces the requests before they are checked.
        post_process: replaces a request's list of images.
    """

    name: str
    media: str
    size_multiple: Callable[[Any], int]
    defaults: dict[str, Any]
    guidance: Guidance
    transformers: tuple[str, ...] = ("transformer",)
    text_encoders: tuple[str, ...] = ("text_encoder",)
    image_encoders: tuple[str, ...] = ()
    schedule_keys: tuple[str, ...] = ()
    float32_components: tuple[str, ...] = ()
    frame_multiple: int = 1
    prompt_tokens: Callable[[Any, str, dict[str, Any]], tuple[int, int]] | None = None
    latents_shape: Callable[[Any, Mapping[str, Any]], tuple[int, ...]] | None = None
    has_latents: bool = True
    has_embeds: bool = True
    lists_embeds: bool = False
    decode: Callable[[Any, Any, int, int], Any] | None = None
    has_sequence_plan: bool = False
    tensor_plan: Callable[[Any], dict[str, Any]] | None = None
    has_own_attention: bool = False
    has_own_heads: bool = False
    cfg: CfgBranches | None = None
    block_lists: tuple[str, ...] = ()
    tea_cache: TeaCacheSpec | None = None
    image_input: ImageInput | None = None
    call_defaults: Callable[[Any], dict[str, Any]] | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    pre_process: (
        Callable[[Sequence[OmniDiffusionRequest]], Sequence[OmniDiffusionRequest]] | None
    ) = None
    post_process: Callable[[OmniDiffusionRequest, list[Any]], list[Any]] | None = None


def _class_name(config: Any) -> str:
    name: str = config.model.model_class_name
    return name


#: Class name in diffusers -> `PipelineSpec`.
AutoOmniPipeline: Registry[PipelineSpec] = Registry(
    "AutoOmniPipeline",
    {
        "FluxImg2ImgPipeline": "diffulex.omni.models.edits:FLUX_IMG2IMG",
        "FluxKontextPipeline": "diffulex.omni.models.edits:FLUX_KONTEXT",
        "FluxPipeline": "diffulex.omni.models.flux:SPEC",
        "LongCatImageEditPipeline": "diffulex.omni.models.flux_like:LONGCAT_EDIT",
        "LongCatImagePipeline": "diffulex.omni.models.flux_like:LONGCAT",
        "OvisImagePipeline": "diffulex.omni.models.flux_like:OVIS",
        "QwenImageEditPipeline": "diffulex.omni.models.edits:QWEN_EDIT",
        "QwenImageEditPlusPipeline": "diffulex.omni.models.edits:QWEN_EDIT_PLUS",
        "QwenImageImg2ImgPipeline": "diffulex.omni.models.edits:QWEN_IMG2IMG",
        "QwenImageLayeredPipeline": "diffulex.omni.models.edits:QWEN_LAYERED",
        "QwenImagePipeline": "diffulex.omni.models.qwen_image:SPEC",
        "StableDiffusion3Pipeline": "diffulex.omni.models.stable_diffusion_3:SPEC",
        "WanImageToVideoPipeline": "diffulex.omni.models.edits:WAN_I2V",
        "WanPipeline": "diffulex.omni.models.wan:SPEC",
        "ZImagePipeline": "diffulex.omni.models.z_image:SPEC",
    },
    _class_name,
)


def register_pipeline(spec: PipelineSpec, *, exist_ok: bool = False) -> PipelineSpec:
    """Adds a pipeline and returns it.

    Raises:
        ValueError: the name is taken and `exist_ok` is false.
    """
    return AutoOmniPipeline.register(spec.name, spec, exist_ok=exist_ok)


def find_pipeline(name: str) -> PipelineSpec:
    """The entry of a class name.

    Raises:
        UnsupportedModelError: there is none; the message lists the names.
    """
    try:
        return AutoOmniPipeline.get(name)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from None
