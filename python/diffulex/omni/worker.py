# SPDX-License-Identifier: Apache-2.0
"""Runs calls of a loaded pipeline in this process, one after the other."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.omni.errors import RequestAborted, RequestTimeout, UnsupportedFeatureError
from diffulex.omni.previews import SHARE, Previews
from diffulex.omni.request import MODEL_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffulex.omni.cfg_parallel import CfgHook
    from diffulex.omni.groups import RankGroups
    from diffulex.omni.loader import LoadedPipeline

__all__ = ["DrawnCall", "OnStep", "PipelineCall", "PipelineFacts", "StepEvent", "Worker"]

#: Arguments of the pipelines that the engine sets itself, or that would bypass seeds and batches.
_OWN_ARGUMENTS = (
    "self",
    "prompt",
    "negative_prompt",
    "generator",
    "latents",
    "sigmas",
    "output_type",
    "max_area",
)
#: Arguments that hold embeddings of prompts, and masks of them.
_EMBEDS = ("prompt_embeds", "prompt_embeds_mask")
#: Keys of transformers for the width of embeddings.
_WIDTHS = ("joint_attention_dim", "text_dim", "cap_feat_dim")
_OWN_PARTS = ("embeds", "callback", "num_images", "num_videos", "return_dict", "image")


class PipelineFacts(NamedTuple):
    """What checks of requests need to know of a loaded pipeline; plain data.

    Attributes:
        device: where it runs.
        defaults: request fields its checkpoint has defaults for.
        size_multiple: pixels that height and width are multiples of.
        least_steps: denoising steps that its schedule needs.
        inputs: noise, sigmas and embeddings that requests may bring, by the names of its arguments, and
            how wide they have to be where that is known.
        extra_names: further arguments of its call.
    """

    device: str
    defaults: dict[str, Any]
    size_multiple: int
    least_steps: int
    inputs: dict[str, int | None]
    extra_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PipelineCall:
    """Images that are drawn together: one prompt and one seed each, everything else is shared.

    Attributes:
        request_ids: request of each image.
        prompts: None in place of each where there are embeddings.
        arguments: the pipeline's further keyword arguments.
        latents: noise of each image, [1, ...]; empty: drawn from the seeds.
        embeds: of one prompt, for every image the same.
        pictures: that are changed, for every image the same.
        replica: who draws it.
        cache: all settings of its cache; None: the engine's.
    """

    request_ids: tuple[str, ...]
    prompts: tuple[str | None, ...]
    negative_prompts: tuple[str, ...] | None
    seeds: tuple[int, ...]
    height: int
    width: int
    num_inference_steps: int
    output_type: str
    arguments: Mapping[str, Any]
    latents: tuple[Any, ...] = ()
    embeds: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[Any, ...] = ()
    replica: int = 0
    cache: Mapping[str, Any] | None = None

    @property
    def is_guided(self) -> bool:
        """Whether both branches of guidance are drawn."""
        return self.negative_prompts is not None or "negative_prompt_embeds" in self.embeds


class DrawnCall(NamedTuple):
    """What a call gives: its images, and what its cache has done where there is one."""

    images: list[Any]
    cache: dict[str, Any] | None


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

        Within the callback alone. The first step shows the noise itself. Decoding takes at most a
        twentieth of the time of the steps so far; beyond it they are estimated cell by cell.

        Raises:
            UnsupportedFeatureError: the pipeline has no previews.
        """
        return self._preview()


#: Called after every step; `False` stops the call, which raises RequestAborted.
OnStep = Callable[[StepEvent], "bool | None"]


class Worker:
    """Owns a loaded pipeline; not thread-safe.

    Args:
        loaded: the pipeline.
        groups: of this process, where there are several.
    """

    def __init__(self, loaded: LoadedPipeline, groups: RankGroups | None = None) -> None:
        self.pipeline = loaded.pipeline
        self.spec = loaded.spec
        self._replica = 0 if groups is None else groups.coords["dp"]
        self._is_leader = groups is None or groups.is_leader
        self._groups = groups
        self._cache = self._own_cache = loaded.cache
        #: Of the cache that is on the blocks; None: the engine's.
        self._cache_settings: Mapping[str, Any] | None = None
        # Not at the top: they import torch and diffusers, which requests can be checked without.
        import torch  # noqa: PLC0415

        from diffulex.omni.attention.seam import make_seam  # noqa: PLC0415

        self.previews = Previews(loaded.pipeline, loaded.spec, loaded.device)
        if loaded.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(loaded.device)  # perhaps of an earlier model here
        self._seam = make_seam(loaded, groups)
        self._cfg_hooks = _attach(loaded, groups)
        self._copies_length = "qwenimage" in type(self._transformer).__module__ and any(
            module._compiled_call_impl is not None for module in self._transformer.modules()
        )
        parameters = inspect.signature(type(loaded.pipeline).__call__).parameters
        self._parameters = frozenset(parameters)
        defaults = loaded.spec.call_defaults
        self._call_defaults = {} if defaults is None else defaults(loaded.pipeline)
        #: Of the pipeline.
        self.facts = PipelineFacts(
            loaded.device,
            loaded.defaults,
            loaded.spec.size_multiple(loaded.pipeline),
            # Stretching a schedule to its last value divides by the distance between its ends.
            2 if loaded.pipeline.scheduler.config.get("shift_terminal") else 1,
            self._inputs(parameters),
            tuple(
                name
                for name in parameters
                if name not in (*_OWN_ARGUMENTS, *MODEL_FIELDS)
                and not any(part in name for part in _OWN_PARTS)
            ),
        )

    def prompt_tokens(self, prompt: str, values: dict[str, Any]) -> tuple[int, int]:
        """Tokens of a prompt, and the most that the pipeline reads."""
        assert self.spec.prompt_tokens is not None
        return self.spec.prompt_tokens(self.pipeline, prompt, values)

    def latents_shape(self, arguments: dict[str, Any]) -> tuple[int, ...]:
        """Shape of the latents of one image."""
        assert self.spec.latents_shape is not None
        return self.spec.latents_shape(self.pipeline, arguments)

    def memory_stats(self) -> dict[str, int]:
        """Bytes on the device: `allocated`, `peak`; zeros on the CPU."""
        import torch  # noqa: PLC0415 (slow; loaded with the model)

        if not self.facts.device.startswith("cuda"):
            return {"allocated": 0, "peak": 0}
        device = self.facts.device
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "peak": torch.cuda.max_memory_allocated(device),
        }

    def close(self) -> None:
        """Gives the memory of the model back; nothing can be drawn afterwards."""
        import torch  # noqa: PLC0415

        is_cuda = self.facts.device.startswith("cuda")
        del self.pipeline, self.previews, self._seam, self._cfg_hooks, self._cache, self._own_cache
        gc.collect()  # hooks and the modules around which they are know each other
        if is_cuda:
            torch.cuda.empty_cache()

    def cache_summary(self) -> dict[str, Any] | None:
        """What the cache has done in the last call; None without one."""
        return None if self._cache is None else self._cache.summary()

    def run(
        self, calls: Sequence[PipelineCall], on_step: OnStep | None, timeout_s: float | None = None
    ) -> Iterator[DrawnCall]:
        """The images of each call of this process's replica, in order.

        Ranks that do not lead their replica give latents, which nobody needs.

        Raises:
            RequestAborted: the callback returned False.
            RequestTimeout: `timeout_s` has passed at the end of a step.
        """
        if timeout_s is not None:
            on_step = _limited(on_step, timeout_s)
        for number, call in enumerate(calls):
            if call.replica == self._replica:
                try:
                    drawn = self._run_call(call, number, len(calls), on_step)
                finally:
                    # The engine's own tells of its last call.
                    if self._cache is not None and self._cache is not self._own_cache:
                        self._cache.refresh(self.pipeline, call.num_inference_steps)
                yield drawn

    def _run_call(
        self, call: PipelineCall, number: int, num_calls: int, on_step: OnStep | None
    ) -> DrawnCall:
        import torch  # noqa: PLC0415 (slow; loaded with the model)

        from diffulex.omni._diffusers_compat import (  # noqa: PLC0415
            active_attention,
            capturable_text_length,
        )

        arguments = {**self._call_defaults, **call.arguments}
        if call.negative_prompts is not None:
            arguments["negative_prompt"] = list(call.negative_prompts)
        arguments |= self._given(call)
        if call.pictures:
            several = list(call.pictures)
            arguments["image"] = several if len(several) > 1 else several[0]
        if self.spec.image_input is not None and self.spec.image_input.arguments is not None:
            arguments |= self.spec.image_input.arguments(call.height, call.width)
        for hook in self._cfg_hooks:
            hook.reset_state(None)
            hook.is_active = call.is_guided
            hook.batch = len(call.seeds)
        self._choose_cache(call.cache)
        if self._cache is not None:
            self._cache.refresh(self.pipeline, call.num_inference_steps)
        size = {"height": call.height, "width": call.width}
        arguments |= {name: size[name] for name in size if name in self._parameters}
        watcher = None
        watching: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if on_step is not None:
            watcher = _Watcher(self, call, number, num_calls, on_step)
            if "callback_on_step_end" in self._parameters:
                arguments["callback_on_step_end"] = watcher
            else:
                watching = _watched_steps(self.pipeline, watcher)
        # A copy from the host between compiled blocks, which may be graphs, would wait for them.
        compiled = capturable_text_length() if self._copies_length else contextlib.nullcontext()
        with torch.inference_mode(), active_attention(self._seam), watching, compiled:
            result = self.pipeline(
                # A new list: some text encoders write into it.
                prompt=None if None in call.prompts else list(call.prompts),
                # On the CPU, one per image: an image depends on its seed alone.
                generator=[torch.Generator().manual_seed(seed) for seed in call.seeds],
                num_inference_steps=call.num_inference_steps,
                output_type=call.output_type if self._is_leader else "latent",
                **arguments,
            )
        if watcher is not None and watcher.is_stopped:
            raise RequestAborted(f"request {', '.join(call.request_ids)}: stopped by its callback")
        images = list(result.frames if self.spec.media == "video" else result.images)
        return DrawnCall(images, self._shared_summary())

    def _choose_cache(self, settings: Mapping[str, Any] | None) -> None:
        """Puts the cache of a call on the blocks, unless it is there."""
        if settings == self._cache_settings:
            return
        from diffulex.omni.cache.selector import NO_CACHE, get_cache_backend  # noqa: PLC0415
        from diffulex.omni.config_table import DiffusionCacheConfig  # noqa: PLC0415

        if self._cache is not None:
            self._cache.disable(self.pipeline)
        # So it is if the next one fails.
        self._cache, self._cache_settings = None, {"cache_backend": NO_CACHE}
        cache = self._own_cache
        if settings is not None:
            config = DiffusionCacheConfig(**settings)
            cache = get_cache_backend(config.cache_backend, config)
        if cache is not None:
            cache.enable(self.pipeline, self._groups)
        self._cache, self._cache_settings = cache, settings

    def _inputs(self, parameters: Mapping[str, Any]) -> dict[str, int | None]:
        config, scheduler = self._transformer.config, self.pipeline.scheduler
        width = next((config[name] for name in _WIDTHS if config.get(name)), None)
        found: dict[str, int | None] = {}
        for name in parameters if self.spec.has_embeds else ():
            if name.endswith(_EMBEDS):
                pooled = config.get("pooled_projection_dim") if "pooled" in name else width
                found[name] = None if name.endswith("mask") else pooled
        if self.spec.latents_shape is not None:
            found["latents"] = None
        # Some schedulers take no sigmas, and pipelines do not hand them to others.
        takes = inspect.signature(scheduler.set_timesteps).parameters
        is_fixed = "sigmas" not in takes or scheduler.config.get("use_flow_sigmas")
        if "sigmas" in parameters and not is_fixed:
            found["sigmas"] = None
        return found

    @property
    def _transformer(self) -> Any:
        """The first that there is."""
        parts = (getattr(self.pipeline, name, None) for name in self.spec.transformers)
        return next(part for part in parts if part is not None)

    def _given(self, call: PipelineCall) -> dict[str, Any]:
        """Noise and embeddings that the requests bring, on the device, for all images of the call."""
        import torch  # noqa: PLC0415

        count, device, dtype = len(call.seeds), self.facts.device, self._transformer.dtype
        # One pipeline has a negative prompt by default, which it then refuses.
        given: dict[str, Any] = (
            {"negative_prompt": None} if "negative_prompt_embeds" in call.embeds else {}
        )
        for name, value in call.embeds.items():
            row = value.to(device, dtype if value.is_floating_point() else value.dtype)
            repeats = (count, *[1] * (row.dim() - 1))
            given[name] = [row[0]] * count if self.spec.lists_embeds else row.repeat(repeats)
        if call.latents:
            given["latents"] = torch.cat(call.latents).to(device)
        return given

    def _shared_summary(self) -> dict[str, Any] | None:
        """Of both branches, where two ranks share them; the leader needs it."""
        summary = self.cache_summary()
        if summary is None or self._groups is None or self._groups.group("cfg") is None:
            return summary
        gathered = self._groups.gather(summary, "mp")
        for other in gathered or ():
            for name, branches in other.items():
                summary[name] = {**branches, **summary[name]}
        return summary


@contextlib.contextmanager
def _watched_steps(pipeline: Any, watcher: _Watcher) -> Iterator[None]:
    """Calls the watcher after every step of the schedule, for pipelines that have no callback."""
    scheduler, numbers = pipeline.scheduler, itertools.count()
    step = scheduler.step

    def watched(output: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(output, timestep, *args, **kwargs)
        watcher(pipeline, next(numbers), timestep, {"latents": result[0]})
        return result

    scheduler.step = watched
    try:
        yield
    finally:
        del scheduler.step


def _limited(on_step: OnStep | None, timeout_s: float) -> OnStep:
    end = time.monotonic() + timeout_s

    def look(event: StepEvent) -> bool | None:
        if time.monotonic() > end:
            raise RequestTimeout.after(timeout_s, "timeout_s")
        return None if on_step is None else on_step(event)

    return look


def _attach(loaded: LoadedPipeline, groups: RankGroups | None) -> list[CfgHook]:
    """Attaches the cache, and what makes a pipeline one of several ranks'.

    The hook that is registered last is outermost: the cache sees the tokens of this rank.
    """
    cache = loaded.cache
    if groups is None:
        if cache is not None:
            cache.enable(loaded.pipeline)
        return []
    from diffulex.omni import (  # noqa: PLC0415 (they import diffusers)
        cfg_parallel,
        pipeline_parallel,
        sequence_parallel,
        tensor_parallel,
    )

    for axis, part in (("tp", tensor_parallel), ("pp", pipeline_parallel)):
        if groups.group(axis) is not None:
            part.attach(loaded.pipeline, loaded.spec, groups)
    if cache is not None:
        cache.enable(loaded.pipeline, groups)
    if groups.group("sp") is not None:
        sequence_parallel.attach(loaded.pipeline, loaded.spec, groups)
    if groups.group("cfg") is not None:
        return cfg_parallel.attach(loaded.pipeline, loaded.spec, groups)
    return []


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
        #: Ends of the first step and of the last one; seconds since of the callback, of decoding.
        self._first = self._last = 0.0
        self._outside_s = self._decode_s = 0.0

    def __call__(
        self, pipeline: Any, step: int, _timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        latents, before = tensors["latents"], self._before
        self._last = time.perf_counter()
        self._first = self._first or self._last
        event = StepEvent(
            self._call.request_ids,
            step + 1,
            # Schedulers of a higher order take more steps than the request asks for.
            len(pipeline.scheduler.timesteps) - self._first_step(),
            self._number,
            self._num_calls,
            lambda: self._decode(step, before, latents),
        )
        # Kept for the next preview; the steps make new tensors.
        self._before = latents
        if self._on_step(event) is False:
            self.is_stopped = True
            pipeline._interrupt = True
        self._outside_s += time.perf_counter() - self._last
        return {}

    def _first_step(self) -> int:
        """Steps of the schedule that are left out, as its noise has been added to a picture."""
        return getattr(self._worker.pipeline.scheduler, "begin_index", None) or 0

    def _decode(self, step: int, before: Any, latents: Any) -> list[Any]:
        pipeline, spec = self._worker.pipeline, self._worker.spec
        if spec.decode is None:
            raise UnsupportedFeatureError(
                f"preview: expected a pipeline with previews, got {spec.name}"
            )
        drawing = self._worker.previews
        # The device may still be at the steps that were told to it.
        self._outside_s -= drawing.wait()
        sigmas = getattr(pipeline.scheduler, "sigmas", None)
        if before is not None and sigmas is not None:
            # Along a straight path the result is where this step's direction leads at sigma 0.
            place = self._first_step() + step
            now, after = float(sigmas[place]), float(sigmas[place + 1])
            latents = latents - after * (latents - before) / (after - now)
        steps_s = self._last - self._first - self._outside_s
        images, seconds = drawing.draw(
            latents, self._call.height, self._call.width, SHARE * steps_s - self._decode_s
        )
        self._decode_s += seconds
        return images
