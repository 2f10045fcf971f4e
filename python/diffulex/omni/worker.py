# SPDX-License-Identifier: Apache-2.0
"""Runs calls of a loaded pipeline in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.omni.errors import RequestAborted, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffulex.omni.loader import LoadedPipeline

__all__ = ["OnStep", "PipelineCall", "StepEvent", "Worker"]


@dataclass(frozen=True, slots=True)
class PipelineCall:
    """Images that are drawn together: one prompt and one seed each, everything else is shared.

    Attributes:
        request_ids: request of each image.
        arguments: the pipeline's further keyword arguments.
    """

    request_ids: tuple[str, ...]
    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...] | None
    seeds: tuple[int, ...]
    height: int
    width: int
    num_inference_steps: int
    output_type: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One denoising step of one call, as it is given to the callback.

    Attributes:
        request_ids: request of each image of the call.
        step: steps done in this call, from 1.
        num_steps: of this call.
        call, num_calls: which call this is, from 0, and how many there are.
    """

    request_ids: tuple[str, ...]
    step: int
    num_steps: int
    call: int
    num_calls: int
    _preview: Callable[[], list[Any]] = field(repr=False, compare=False)

    def preview(self) -> list[Any]:
        """PIL images of what the model expects the result to be, one per image of the call.

        The first step shows the noise itself. Costs one decode.

        Raises:
            UnsupportedFeatureError: the pipeline has no previews.
        """
        return self._preview()


#: Called after every step; `False` stops the call, which raises RequestAborted.
OnStep = Callable[[StepEvent], "bool | None"]


class Worker:
    """Owns a loaded pipeline; not thread-safe."""

    def __init__(self, loaded: LoadedPipeline) -> None:
        self.pipeline = loaded.pipeline
        self.spec = loaded.spec

    def run(self, calls: list[PipelineCall], on_step: OnStep | None) -> Iterator[list[Any]]:
        """The images of each call, in order.

        Raises:
            RequestAborted: the callback returned False.
        """
        for number, call in enumerate(calls):
            yield self._run_call(call, number, len(calls), on_step)

    def _run_call(
        self, call: PipelineCall, number: int, num_calls: int, on_step: OnStep | None
    ) -> list[Any]:
        import torch  # noqa: PLC0415 (slow; loaded with the model)

        arguments = dict(call.arguments)
        if call.negative_prompts is not None:
            arguments["negative_prompt"] = list(call.negative_prompts)
        watcher = None
        if on_step is not None:
            watcher = _Watcher(self, call, number, num_calls, on_step)
            arguments["callback_on_step_end"] = watcher
        with torch.inference_mode():
            result = self.pipeline(
                # A new list: some text encoders write into it.
                prompt=list(call.prompts),
                # On the CPU, one per image: an image depends on its seed alone.
                generator=[torch.Generator().manual_seed(seed) for seed in call.seeds],
                height=call.height,
                width=call.width,
                num_inference_steps=call.num_inference_steps,
                output_type=call.output_type,
                **arguments,
            )
        if watcher is not None and watcher.is_stopped:
            raise RequestAborted(f"request {', '.join(call.request_ids)}: stopped by its callback")
        return list(result.frames if self.spec.media == "video" else result.images)


class _Watcher:
    """`callback_on_step_end` of one call."""

    def __init__(
        self, worker: Worker, call: PipelineCall, number: int, num_calls: int, on_step: OnStep
    ) -> None:
        self.is_stopped = False
        self._worker = worker
        self._call = call
        self._number = number
        self._num_calls = num_calls
        self._on_step = on_step
        self._before: Any = None

    def __call__(
        self, pipeline: Any, step: int, _timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        latents, before = tensors["latents"], self._before
        event = StepEvent(
            self._call.request_ids,
            step + 1,
            # Schedulers of a higher order take more steps than the request asks for.
            len(pipeline.scheduler.timesteps),
            self._number,
            self._num_calls,
            lambda: self._decode(step, before, latents),
        )
        # Kept for the next preview; the steps make new tensors.
        self._before = latents
        if self._on_step(event) is False:
            self.is_stopped = True
            pipeline._interrupt = True
        return {}

    def _decode(self, step: int, before: Any, latents: Any) -> list[Any]:
        import torch  # noqa: PLC0415

        pipeline, spec = self._worker.pipeline, self._worker.spec
        if spec.decode is None:
            raise UnsupportedFeatureError(
                f"preview: expected a pipeline with previews, got {spec.name}"
            )
        sigmas = getattr(pipeline.scheduler, "sigmas", None)
        if before is not None and sigmas is not None:
            # Along a straight path the result is where this step's direction leads at sigma 0.
            now, after = float(sigmas[step]), float(sigmas[step + 1])
            latents = latents - after * (latents - before) / (after - now)
        with torch.inference_mode():
            decoded = spec.decode(pipeline, latents, self._call.height, self._call.width)
            images: list[Any] = pipeline.image_processor.postprocess(decoded, output_type="pil")
        return images
