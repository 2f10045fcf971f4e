# SPDX-License-Identifier: Apache-2.0
"""What a caller asks for, before and after the model's defaults are filled in."""

from __future__ import annotations

import dataclasses
import itertools
import math
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffulex.config.key import unknown_key
from diffulex.omni.config_table import OUTPUT_TYPES
from diffulex.omni.errors import RequestError

__all__ = [
    "MAX_OUTPUTS",
    "MAX_SEED",
    "MAX_STEPS",
    "MODEL_FIELDS",
    "OmniDiffusionRequest",
    "make_request",
]

MAX_STEPS = 1000
MAX_OUTPUTS = 64
MAX_SEED = 2**63
#: Request fields whose value the model may decide.
MODEL_FIELDS = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "guidance_scale",
    "guidance_scale_2",
    "true_cfg_scale",
    "strength",
    "max_sequence_length",
)


def _new_id() -> str:
    return f"diff-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class OmniDiffusionRequest:
    """One prompt and how to draw it; None means the model's default.

    Attributes:
        prompt: a text; None with embeddings in its place.
        num_outputs_per_prompt: images of the prompt, 1 to 64.
        seed: image j is drawn with `(seed + j) % 2**63`; None: drawn, see the result's metrics.
        seeds: one seed per image, instead of `seed`.
        latents: noise to start from in place of the seeds', one row per image, each of the shape that
            `output_type` latent gives.
        prompt_embeds: what the text encoders would give: names of the pipeline's arguments
            (`prompt_embeds`, `prompt_embeds_mask`, `negative_prompt_embeds`, ...) and tensors whose first
            axis is 1. A tensor alone is `prompt_embeds`.
        sigmas: noise that is left before each step, falling, in (0, 1], in place of
            `num_inference_steps`.
        pil_image: a picture of PIL, or a list of them, for pipelines that change pictures.
        strength: how much of the picture is given up, above 0 and up to 1; 1: all of it.
        timeout_s: until it is stopped with RequestTimeout; of requests that are drawn together the least
            counts, and in the caller's process only the end of a step is looked at.
        cache_backend, cache_config: a cache over steps and its settings, in place of the engine's; what
            they leave open is the engine's.
        output_type: pil, np ([H, W, 3] float32), pt ([3, H, W] float32) or latent.
        extra: further arguments of the pipeline's call, by name.
    """

    prompt: str | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    true_cfg_scale: float | None = None
    num_outputs_per_prompt: int = 1
    seed: int | None = None
    seeds: tuple[int, ...] | None = None
    latents: Any = None
    prompt_embeds: Any = None
    sigmas: Sequence[float] | None = None
    pil_image: Any = None
    strength: float | None = None
    max_sequence_length: int | None = None
    timeout_s: float | None = None
    cache_backend: str | None = None
    cache_config: Mapping[str, Any] | None = None
    output_type: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = field(default_factory=_new_id)

    def __post_init__(self) -> None:
        """Checks what needs no model.

        Raises:
            RequestError: a field has a wrong type or range.
        """
        _check_prompts(self)
        for name, high in (
            ("height", None),
            ("width", None),
            ("num_frames", None),
            ("max_sequence_length", None),
            ("num_inference_steps", MAX_STEPS),
            ("num_outputs_per_prompt", MAX_OUTPUTS),
        ):
            _check_count(name, getattr(self, name), high)
        for name in (
            "guidance_scale",
            "guidance_scale_2",
            "true_cfg_scale",
            "strength",
            "timeout_s",
        ):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value) and value >= 0):
                raise RequestError(f"{name}: expected a number >= 0, got {value!r}")
        if self.strength is not None and not 0 < self.strength <= 1:
            raise RequestError(f"strength: expected a number in (0, 1], got {self.strength!r}")
        if self.timeout_s == 0:
            raise RequestError(f"timeout_s: expected a number > 0, got {self.timeout_s!r}")
        _check_pictures(self.pictures)
        if self.output_type is not None and self.output_type not in OUTPUT_TYPES:
            kinds = ", ".join(OUTPUT_TYPES)
            raise RequestError(f"output_type: expected one of {kinds}, got {self.output_type!r}")
        if not isinstance(self.extra, Mapping):
            raise RequestError(f"extra: expected a mapping, got {self.extra!r}")
        _check_seeds(self)
        _check_sigmas(self)
        if self.latents is not None:
            _check_tensor("latents", self.latents, self.num_outputs_per_prompt)

    @property
    def embeds(self) -> dict[str, Any]:
        """What `prompt_embeds` holds, by the names of the pipeline's arguments."""
        given = self.prompt_embeds
        if given is None:
            return {}
        return dict(given) if isinstance(given, Mapping) else {"prompt_embeds": given}

    @property
    def pictures(self) -> tuple[Any, ...]:
        """What `pil_image` holds; none: empty."""
        given = self.pil_image
        if given is None:
            return ()
        return tuple(given) if isinstance(given, (list, tuple)) else (given,)

    def sample_seeds(self) -> tuple[int, ...]:
        """One seed per image; draws the first one when the request has none."""
        if self.seeds is not None:
            return tuple(self.seeds)
        first = secrets.randbelow(MAX_SEED) if self.seed is None else self.seed
        return tuple((first + j) % MAX_SEED for j in range(self.num_outputs_per_prompt))


def make_request(prompt: object, arguments: Mapping[str, Any]) -> OmniDiffusionRequest:
    """A request from keyword arguments.

    Raises:
        RequestError: unknown name, wrong type or range.
    """
    known = [item.name for item in dataclasses.fields(OmniDiffusionRequest)]
    for name in arguments:
        if name not in known:
            text = unknown_key(name, name, known).removeprefix("configuration: ")
            raise RequestError(f"request: {text}")
    return OmniDiffusionRequest(prompt, **arguments)  # type: ignore[arg-type]


def _check_prompts(request: OmniDiffusionRequest) -> None:
    embeds = request.embeds
    for name, value in embeds.items():
        _check_tensor(name, value, 1)
    is_text = isinstance(request.prompt, str) and bool(request.prompt.strip())
    if not is_text and not (request.prompt is None and "prompt_embeds" in embeds):
        raise RequestError(f"prompt: expected some text, got {request.prompt!r}")
    if request.negative_prompt is not None and not isinstance(request.negative_prompt, str):
        raise RequestError(f"negative_prompt: expected text, got {request.negative_prompt!r}")
    for name in ("prompt", "negative_prompt"):
        if getattr(request, name) is not None and f"{name}_embeds" in embeds:
            raise RequestError(f"{name}_embeds: expected no {name} beside it, got both")
    for name in ("prompt", "negative_prompt", "request_id", "extra"):
        _check_utf8(name, getattr(request, name))


def _check_utf8(name: str, value: object) -> None:
    """Of all texts in it: a part of a surrogate pair reaches neither a tokenizer nor a worker."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_utf8(name, item)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{name}: expected UTF-8 text, got {value!r:.100}") from None


def _check_tensor(name: object, value: object, rows: int) -> None:
    """Of numbers, with so many rows."""
    torch = sys.modules.get("torch")  # one that was made has imported what it is
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if not is_tensor or value.dim() < 2 or value.shape[0] != rows:  # type: ignore[attr-defined]
        found = list(value.shape) if is_tensor else type(value).__name__  # type: ignore[attr-defined]
        raise RequestError(f"{name}: expected a tensor with {rows} rows, got {found}")
    if not value.isfinite().all():  # type: ignore[attr-defined]
        raise RequestError(f"{name}: expected finite numbers, got some that are not")


def _check_sigmas(request: OmniDiffusionRequest) -> None:
    sigmas = request.sigmas
    if sigmas is None:
        return
    is_list = isinstance(sigmas, (list, tuple)) and all(
        isinstance(item, (int, float)) and not isinstance(item, bool) for item in sigmas
    )
    falls = is_list and all(now > after for now, after in itertools.pairwise(sigmas))
    if not falls or not 1 <= len(sigmas) <= MAX_STEPS or not (sigmas[0] <= 1 and sigmas[-1] > 0):
        raise RequestError(
            f"sigmas: expected 1 to {MAX_STEPS} falling numbers in (0, 1], got {sigmas!r:.100}"
        )
    if request.num_inference_steps not in (None, len(sigmas)):
        raise RequestError(
            f"num_inference_steps: expected {len(sigmas)} with so many sigmas, got"
            f" {request.num_inference_steps}"
        )


def _check_pictures(pictures: tuple[Any, ...]) -> None:
    for picture in pictures:
        # One that was made has imported what it is.
        images = sys.modules.get("PIL.Image")
        if images is None or not isinstance(picture, images.Image):
            raise RequestError(f"pil_image: expected pictures of PIL, got {picture!r:.100}")


def _check_count(name: str, value: object, high: int | None) -> None:
    if value is None and name != "num_outputs_per_prompt":
        return
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_count or (high is not None and isinstance(value, int) and value > high):
        legal = "an integer of at least 1" if high is None else f"an integer in [1, {high}]"
        raise RequestError(f"{name}: expected {legal}, got {value!r}")


def _check_seeds(request: OmniDiffusionRequest) -> None:
    def is_seed(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SEED

    if request.seed is not None and not is_seed(request.seed):
        raise RequestError(f"seed: expected an integer in [0, 2**63), got {request.seed!r}")
    if request.seeds is None:
        return
    if request.seed is not None:
        raise RequestError("seeds: expected either seed or seeds, got both")
    count = request.num_outputs_per_prompt
    is_list = isinstance(request.seeds, Sequence) and not isinstance(request.seeds, str)
    if not is_list or len(request.seeds) != count or not all(map(is_seed, request.seeds)):
        raise RequestError(f"seeds: expected {count} integers in [0, 2**63), got {request.seeds!r}")
