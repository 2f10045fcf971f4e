# SPDX-License-Identifier: Apache-2.0
"""Requests in, images out: checks, defaults, seeds, batches."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.config.key import unknown_key
from diffulex.omni.errors import RequestError
from diffulex.omni.loader import load_pipeline
from diffulex.omni.outputs import OmniRequestOutput
from diffulex.omni.request import OmniDiffusionRequest
from diffulex.omni.worker import PipelineCall, Worker

if TYPE_CHECKING:
    from diffulex.omni.config import OmniDiffusionConfig
    from diffulex.omni.worker import OnStep

__all__ = ["DiffusionEngine"]

#: Request fields whose value the model may decide.
_MODEL_FIELDS = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "guidance_scale",
    "guidance_scale_2",
    "true_cfg_scale",
    "max_sequence_length",
)
#: Arguments of the pipelines that the engine sets itself, or that would bypass seeds and batches.
_OWN_ARGUMENTS = ("self", "prompt", "negative_prompt", "generator", "latents", "output_type")
_OWN_PARTS = ("embeds", "callback", "num_images", "num_videos", "return_dict", "image")


class _Resolved(NamedTuple):
    """A request with every field decided."""

    request: OmniDiffusionRequest
    seeds: tuple[int, ...]
    negative_prompt: str | None
    values: dict[str, Any]
    output_type: str


class _Sample(NamedTuple):
    """One image of one request."""

    owner: int
    prompt: str
    seed: int


class DiffusionEngine:
    """A loaded pipeline and the way from requests to results."""

    def __init__(self, config: OmniDiffusionConfig) -> None:
        loaded = load_pipeline(config)
        self.config = config
        self.spec = loaded.spec
        self.device = loaded.device
        self._defaults = {**loaded.spec.defaults, **loaded.defaults}
        self._worker: Worker | None = Worker(loaded)
        self._size_multiple = loaded.spec.size_multiple(loaded.pipeline)
        # Stretching a schedule to its last value divides by the distance between its ends.
        self._least_steps = 2 if loaded.pipeline.scheduler.config.get("shift_terminal") else 1
        parameters = inspect.signature(type(loaded.pipeline).__call__).parameters
        self._extra_names = tuple(
            name
            for name in parameters
            if name not in (*_OWN_ARGUMENTS, *_MODEL_FIELDS)
            and not any(part in name for part in _OWN_PARTS)
        )
        if config.engine.warmup:
            self.step([OmniDiffusionRequest("warm-up", num_inference_steps=2, seed=0)])

    @property
    def defaults(self) -> dict[str, Any]:
        """Request fields of this model and what they are when a request leaves them open."""
        return dict(self._defaults)

    def step(
        self, requests: Sequence[OmniDiffusionRequest], on_step: OnStep | None = None
    ) -> list[OmniRequestOutput]:
        """Draws all images of the requests; one result per request, in order.

        Raises:
            RequestError: a request does not fit the model; none has started.
            RequestAborted: the callback returned False.
        """
        worker = self._open_worker()
        start = time.perf_counter()
        if self.spec.pre_process is not None:
            requests = self.spec.pre_process(requests)
        resolved = [self._resolve(request) for request in requests]
        calls, owners = self._make_calls(resolved)
        prepared = time.perf_counter()
        images: list[list[Any]] = [[] for _ in requests]
        for owner, drawn in zip(owners, worker.run(calls, on_step)):
            for index, image in zip(owner, drawn):
                images[index].append(image)
        executed = time.perf_counter()
        times = {"preprocess_s": prepared - start, "execute_s": executed - prepared}
        return [self._output(item, drawn, times) for item, drawn in zip(resolved, images)]

    def close(self) -> None:
        """Gives the model's memory back; later steps are an error. May be called again."""
        self._worker = None

    def _open_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("image engine: expected an open engine, got a closed one")
        return self._worker

    def _resolve(self, request: OmniDiffusionRequest) -> _Resolved:
        values = {}
        for name in _MODEL_FIELDS:
            given = getattr(request, name)
            if given is not None and name not in self._defaults:
                fields = ", ".join(self._defaults)
                raise RequestError(
                    f"{name}: expected one of {fields} for {self.spec.name}, got {given}"
                )
            value = self._defaults.get(name) if given is None else given
            if value is not None:
                values[name] = value
        self._check_values(values)
        for name in request.extra:
            if name not in self._extra_names:
                text = unknown_key(name, name, self._extra_names).removeprefix("configuration: ")
                raise RequestError(f"extra: {text}; {self.spec.name} takes {self._shown_extra()}")
        return _Resolved(
            request,
            request.sample_seeds(),
            self._negative_prompt(request, values),
            values,
            request.output_type or self.config.engine.output_type,
        )

    def _shown_extra(self) -> str:
        return ", ".join(self._extra_names) or "none"

    def _check_values(self, values: dict[str, Any]) -> None:
        steps, least = values["num_inference_steps"], self._least_steps
        if steps < least:
            raise RequestError(
                f"num_inference_steps: expected at least {least} for the model's schedule, got {steps}"
            )
        multiple = self._size_multiple
        for name in ("height", "width"):
            if values[name] % multiple:
                raise RequestError(f"{name}: expected a multiple of {multiple}, got {values[name]}")
        pixels, most = values["height"] * values["width"], self.config.engine.max_pixels
        if pixels > most:
            size = f"{values['width']}x{values['height']}"
            raise RequestError(f"size: expected at most {most} pixels (max_pixels), got {size}")
        frames, step = values.get("num_frames", 1), self.spec.frame_multiple
        if (frames - 1) % step:
            raise RequestError(f"num_frames: expected a multiple of {step} plus 1, got {frames}")

    def _negative_prompt(self, request: OmniDiffusionRequest, values: dict[str, Any]) -> str | None:
        guidance = self.spec.guidance
        scale = values[guidance.argument]
        if scale > guidance.off:
            given = request.negative_prompt
            return guidance.negative_prompt if given is None else given
        if request.negative_prompt is not None:
            raise RequestError(
                f"negative_prompt: expected {guidance.argument} above {guidance.off:g} with it,"
                f" got {scale:g}"
            )
        return None

    def _make_calls(
        self, resolved: Sequence[_Resolved]
    ) -> tuple[list[PipelineCall], list[tuple[int, ...]]]:
        """Calls of at most `max_batch_size` neighbours that agree in all but prompt and seed."""
        samples = [
            _Sample(index, item.request.prompt, seed)
            for index, item in enumerate(resolved)
            for seed in item.seeds
        ]

        def shared(sample: _Sample) -> str:
            item = resolved[sample.owner]
            has_negative = item.negative_prompt is not None
            return repr((item.values, item.output_type, dict(item.request.extra), has_negative))

        calls, owners = [], []
        size = self.config.engine.max_batch_size
        for _, run in groupby(samples, key=shared):
            group = list(run)
            for start in range(0, len(group), size):
                batch = group[start : start + size]
                calls.append(_make_call(batch, resolved))
                owners.append(tuple(sample.owner for sample in batch))
        return calls, owners

    def _output(
        self, item: _Resolved, drawn: list[Any], times: dict[str, float]
    ) -> OmniRequestOutput:
        start = time.perf_counter()
        is_latent = item.output_type == "latent"
        if self.spec.post_process is not None and not is_latent:
            drawn = self.spec.post_process(item.request, drawn)
        metrics = {
            "seed": item.seeds[0],
            "seeds": list(item.seeds),
            **item.values,
            **times,
            "postprocess_s": time.perf_counter() - start,
        }
        return OmniRequestOutput(
            request_id=item.request.request_id,
            prompt=item.request.prompt,
            final_output_type="latents" if is_latent else self.spec.media,
            images=() if is_latent else tuple(drawn),
            latents=tuple(drawn) if is_latent else (),
            metrics=metrics,
        )


def _make_call(batch: Sequence[_Sample], resolved: Sequence[_Resolved]) -> PipelineCall:
    item = resolved[batch[0].owner]
    negatives = [resolved[sample.owner].negative_prompt for sample in batch]
    values = dict(item.values)
    return PipelineCall(
        request_ids=tuple(resolved[sample.owner].request.request_id for sample in batch),
        prompts=tuple(sample.prompt for sample in batch),
        negative_prompts=None if None in negatives else tuple(str(text) for text in negatives),
        seeds=tuple(sample.seed for sample in batch),
        height=values.pop("height"),
        width=values.pop("width"),
        num_inference_steps=values.pop("num_inference_steps"),
        output_type=item.output_type,
        arguments={**values, **item.request.extra},
    )
