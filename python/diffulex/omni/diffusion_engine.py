# SPDX-License-Identifier: Apache-2.0
"""Requests in, images out: checks, defaults, seeds, batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from diffulex.config.key import unknown_key
from diffulex.omni.cache.choice import chosen_cache
from diffulex.omni.cache.selector import NO_CACHE, AutoCacheBackend
from diffulex.omni.errors import RequestError, UnsupportedFeatureError
from diffulex.omni.loader import cache_settings, find_model, load_pipeline
from diffulex.omni.outputs import OmniRequestOutput
from diffulex.omni.pictures import as_mode, size_like, steps_run
from diffulex.omni.request import MODEL_FIELDS, OmniDiffusionRequest, make_request
from diffulex.omni.scheduler import Scheduler
from diffulex.omni.support import check_chosen_cache, check_engine
from diffulex.omni.worker import PipelineCall, Worker
from diffulex.omni.worker_process import import_modules

if TYPE_CHECKING:
    from diffulex.omni.config import OmniDiffusionConfig
    from diffulex.omni.worker import DrawnCall, OnStep, PipelineFacts

__all__ = ["DiffusionEngine"]


class _Resolved(NamedTuple):
    """A request with every field decided."""

    request: OmniDiffusionRequest
    seeds: tuple[int, ...]
    negative_prompt: str | None
    values: dict[str, Any]
    output_type: str
    #: All settings of its cache; None: the engine's.
    cache: dict[str, Any] | None


class _Sample(NamedTuple):
    """One image of one request: its `number`-th, from 0."""

    owner: int
    number: int
    prompt: str | None
    seed: int


class _Worker(Protocol):
    """What draws: `Worker` in this process, or the `Scheduler` of several."""

    facts: PipelineFacts

    def prompt_tokens(self, prompt: str, values: dict[str, Any]) -> tuple[int, int]: ...

    def latents_shape(self, arguments: dict[str, Any]) -> tuple[int, ...]: ...

    def run(
        self, calls: Sequence[PipelineCall], on_step: OnStep | None, timeout_s: float | None = None
    ) -> Iterable[DrawnCall]: ...

    def close(self) -> None: ...


def _make_worker(config: OmniDiffusionConfig) -> _Worker:
    found = check_engine(config)
    if config.parallel.is_inproc:
        return Worker(load_pipeline(config))
    scheduler = Scheduler()
    scheduler.initialize(config, str(found.directory))
    return scheduler


class DiffusionEngine:
    """A loaded pipeline and the way from requests to results."""

    def __init__(self, config: OmniDiffusionConfig) -> None:
        self.config = config
        import_modules(config.engine.worker_imports)
        self._found = find_model(config)
        self.spec = self._found.spec
        self._worker: _Worker | None = _make_worker(config)
        self._facts = facts = self._worker.facts
        self.device = facts.device
        self._defaults = {**self.spec.defaults, **facts.defaults}
        if config.engine.warmup:
            self._warm_up()

    def _warm_up(self) -> None:
        request = OmniDiffusionRequest(
            "warm-up", num_inference_steps=2, seed=0, pil_image=self._blank_pictures()
        )
        try:
            self.step([request])
        except BaseException:
            self.close()
            raise

    def _blank_pictures(self) -> list[Any] | None:
        """As many of the default size as the pipeline cannot do without."""
        takes = self.spec.image_input
        if takes is None or not takes.least:
            return None
        from PIL import Image  # noqa: PLC0415 (of the extra)

        size = (self._defaults["width"], self._defaults["height"])
        return [Image.new("RGB", size, "white") for _ in range(takes.least)]

    @property
    def defaults(self) -> dict[str, Any]:
        """Request fields of this model and what they are when a request leaves them open."""
        return dict(self._defaults)

    @property
    def has_sigmas(self) -> bool:
        """Whether requests may bring their own schedule."""
        return "sigmas" in self._facts.inputs

    def caches(self, settings: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """What `cache_backend` of a request may be, with these in its `cache_config`."""
        found = []
        for name in (NO_CACHE, *AutoCacheBackend.available()):
            given = settings if name != NO_CACHE else None
            with suppress(RequestError):
                self._cache_of(OmniDiffusionRequest("-", cache_backend=name, cache_config=given))
                found.append(name)
        return tuple(found)

    @property
    def size_multiple(self) -> int:
        """Pixels that height and width are multiples of."""
        return self._facts.size_multiple

    @property
    def least_steps(self) -> int:
        """Denoising steps that the model's schedule needs."""
        return self._facts.least_steps

    def size_of(self, fields: Mapping[str, Any]) -> dict[str, int]:
        """Height and width that follow from the pictures of a request; empty where none do.

        Raises:
            RequestError: the fields are none of a request, or too many pictures.
        """
        return self._picture_size(make_request("-", dict(fields)))

    def check(self, request: OmniDiffusionRequest) -> None:
        """Compares a request with the model, as far as it takes no tokenizer; from any thread.

        The pipeline's `pre_process` is applied before, as in `step`.

        Raises:
            RequestError: it does not fit.
        """
        for prepared in self._prepared([request]):
            self._resolve(prepared)

    def step(
        self, requests: Sequence[OmniDiffusionRequest], on_step: OnStep | None = None
    ) -> list[OmniRequestOutput]:
        """Draws all images of the requests; one result per request, in order.

        Raises:
            RequestError: a request does not fit the model; none has started.
            RequestAborted: the callback returned False.
            RequestTimeout: the least `timeout_s` has passed.
        """
        worker = self._open_worker()
        start = time.perf_counter()
        requests = self._prepared(requests)
        resolved = [self._resolve(request) for request in requests]
        for item in resolved:
            self._check_length("prompt", item.request.prompt or "", item.values)
            self._check_length("negative_prompt", item.negative_prompt or "", item.values)
            self._check_latents(item)
        calls, owners = self._make_calls(resolved)
        prepared = time.perf_counter()
        images: list[list[Any]] = [[] for _ in requests]
        caches: list[list[Any]] = [[] for _ in requests]
        limit = min((r.timeout_s for r in requests if r.timeout_s is not None), default=None)
        for owner, drawn in zip(owners, worker.run(calls, on_step, limit)):
            for index, image in zip(owner, drawn.images):
                images[index].append(image)
                caches[index].append(drawn.cache)
        executed = time.perf_counter()
        times = {"preprocess_s": prepared - start, "execute_s": executed - prepared}
        return [
            self._output(item, drawn, times, cache)
            for item, drawn, cache in zip(resolved, images, caches)
        ]

    def close(self) -> None:
        """Ends the workers and gives their memory back; later steps are an error. May be repeated."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stops the running step if it draws one of these; from any thread.

        Only of worker processes: in this process the callback of `step` does it.
        """
        if isinstance(self._worker, Scheduler):
            self._worker.abort(request_ids)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """`cache_summary`, `latents_shape`, `memory_stats` or `prompt_tokens` of every worker, or of one."""
        return self._processes("collective_rpc").collective_rpc(
            method, timeout, args, kwargs, unique_reply_rank
        )

    def memory_stats(self) -> list[dict[str, int]]:
        """Bytes on the device of every process: `allocated`, `peak`; zeros on the CPU."""
        worker = self._open_worker()
        if isinstance(worker, Scheduler):
            found: list[dict[str, int]] = worker.collective_rpc("memory_stats")
            return found
        assert isinstance(worker, Worker)
        return [worker.memory_stats()]

    def health(self) -> dict[str, Any]:
        """`state` (ready, dead, closed), the processes' `pids`, and for dead ones the `reason`.

        Of worker processes also `step_age_s`, how long ago the running request made its last step; None
        without one.

        Only looks, and may be called by any thread: the next request ends what is left of dead workers.
        """
        worker = self._worker
        if not isinstance(worker, Scheduler):
            return {"state": "closed" if worker is None else "ready", "pids": []}
        death = worker.death()
        if death is not None:
            return {"state": "dead", "pids": [], "reason": str(death)}
        return {"state": worker.state, "pids": worker.pids, "step_age_s": worker.step_age_s}

    def restart(self) -> None:
        """New workers in place of the old ones, dead or not. Raises: as the constructor."""
        self._processes("restart").restart()

    def _processes(self, name: str) -> Scheduler:
        worker = self._open_worker()
        if not isinstance(worker, Scheduler):
            raise UnsupportedFeatureError(
                f"{name}: expected distributed_executor_backend mp with it, got inproc"
            )
        return worker

    def _open_worker(self) -> _Worker:
        if self._worker is None:
            raise RuntimeError("image engine: expected an open engine, got a closed one")
        return self._worker

    def _prepared(self, requests: Sequence[OmniDiffusionRequest]) -> Sequence[OmniDiffusionRequest]:
        hook = self.spec.pre_process
        return requests if hook is None else hook(requests)

    def _resolve(self, request: OmniDiffusionRequest) -> _Resolved:
        values = {}
        defaults = {**self._defaults, **self._picture_size(request)}
        for name in MODEL_FIELDS:
            given = getattr(request, name)
            if given is not None and name not in self._defaults:
                fields = ", ".join(self._defaults)
                raise RequestError(
                    f"{name}: expected one of {fields} for {self.spec.name}, got {given}"
                )
            value = defaults.get(name) if given is None else given
            if value is not None:
                values[name] = value
        if request.sigmas is not None:
            values["num_inference_steps"] = len(request.sigmas)
        self._check_values(values)
        self._check_inputs(request, values)
        for name in request.extra:
            if name not in self._facts.extra_names:
                text = unknown_key(name, name, self._facts.extra_names).removeprefix(
                    "configuration: "
                )
                raise RequestError(f"extra: {text}; {self.spec.name} takes {self._shown_extra()}")
        output_type = request.output_type or self.config.engine.output_type
        if output_type == "latent" and not self.spec.has_latents:
            raise RequestError(f"output_type: expected pictures of {self.spec.name}, got latent")
        negative_prompt = self._negative_prompt(request, values)
        cache = self._cache_of(request)
        return _Resolved(
            request, request.sample_seeds(), negative_prompt, values, output_type, cache
        )

    def _cache_of(self, request: OmniDiffusionRequest) -> dict[str, Any] | None:
        if request.cache_backend is None and request.cache_config is None:
            return None
        if not self.config.engine.allow_request_cache:
            name = "cache_config" if request.cache_backend is None else "cache_backend"
            raise RequestError(
                f"{name}: expected to be left out with allow_request_cache false, got"
                f" {getattr(request, name)!r:.100}"
            )
        cache = chosen_cache(self.config.cache, request.cache_backend, request.cache_config)
        try:
            check_chosen_cache(self.config, cache, self._found)
        except UnsupportedFeatureError as error:
            raise RequestError(str(error)) from None
        return dataclasses.asdict(cache_settings(cache, self._found))

    def _check_inputs(self, request: OmniDiffusionRequest, values: dict[str, Any]) -> None:
        """Noise, sigmas and embeddings, as far as it takes no pipeline."""
        inputs, embeds = self._facts.inputs, request.embeds
        for name in ("latents", "sigmas"):
            if getattr(request, name) is not None and name not in inputs:
                raise RequestError(f"{name}: expected none for {self.spec.name}, got some")
        for name, value in embeds.items():
            known = [item for item in inputs if "prompt_embeds" in item]
            if name not in known:
                text = ", ".join(known) or "none"
                raise RequestError(
                    f"prompt_embeds: expected {text} for {self.spec.name}, got {name!r}"
                )
            main = "negative_prompt_embeds" if name.startswith("negative") else "prompt_embeds"
            pooled = main.replace("prompt", "pooled_prompt")
            for other in {main, *({pooled} & set(inputs))} - set(embeds):
                raise RequestError(f"{other}: expected it beside {name}, got none")
            self._check_embeds(name, value, list(embeds[main].shape), values)

    def _check_embeds(self, name: str, value: Any, main: list[int], values: dict[str, Any]) -> None:
        """Shapes: [1, tokens, width], [1, width] of what is pooled, [1, tokens] of masks."""
        length, width = main[1], self._facts.inputs[name] or value.shape[-1]
        expected = [1, length, width]
        if name.endswith("mask"):
            expected = [1, length]
        elif "pooled" in name:
            expected = [1, width]
        if list(value.shape) != expected:
            raise RequestError(f"{name}: expected the shape {expected}, got {list(value.shape)}")
        # Where a prompt is not cut, they are not either.
        most = values.get("max_sequence_length")
        if self.spec.prompt_tokens is not None and most is not None and length > most:
            raise RequestError(
                f"{name}: expected at most {most} tokens (max_sequence_length), got {length}"
            )

    def _check_latents(self, item: _Resolved) -> None:
        given = item.request.latents
        if given is None:
            return
        arguments = {**item.request.extra, **item.values}
        expected = list(self._open_worker().latents_shape(arguments))
        if list(given.shape[1:]) != expected:
            raise RequestError(
                f"latents: expected the shape {[len(item.seeds), *expected]}, got {list(given.shape)}"
            )

    def _picture_size(self, request: OmniDiffusionRequest) -> dict[str, int]:
        """Height and width that follow from the first picture when the request says none of them."""
        takes, pictures = self.spec.image_input, request.pictures
        least, most = (0, 0) if takes is None else (takes.least, takes.most)
        if not least <= len(pictures) <= most:
            expected = f"{least}" if least == most else f"{least} to {most}"
            raise RequestError(
                f"pil_image: expected {expected} pictures for {self.spec.name}, got {len(pictures)}"
            )
        if takes is None or not pictures:
            return {}
        if takes.own_size is not None:
            for name in ("height", "width"):
                if getattr(request, name) is not None:
                    raise RequestError(
                        f"{name}: expected none for {self.spec.name}, which takes it from the picture"
                    )
            return takes.own_size(pictures[0].size, request.extra)
        if request.height or request.width:
            return {}
        area = self._defaults["height"] * self._defaults["width"]
        return size_like(pictures[0].size, area, takes.side_multiple, self.size_multiple)

    def _check_length(self, name: str, prompt: str, values: dict[str, Any]) -> None:
        if self.spec.prompt_tokens is None:
            return
        count, most = self._open_worker().prompt_tokens(prompt, values)
        if count > most:
            raise RequestError(
                f"{name}: expected at most {most} tokens (max_sequence_length), got {count}"
            )

    def _shown_extra(self) -> str:
        return ", ".join(self._facts.extra_names) or "none"

    def _check_values(self, values: dict[str, Any]) -> None:
        steps, least = values["num_inference_steps"], self._facts.least_steps
        if steps < least:
            raise RequestError(
                f"num_inference_steps: expected at least {least} for the model's schedule, got {steps}"
            )
        if steps_run(steps, values.get("strength")) < 1:
            raise RequestError(
                f"strength: expected at least 1 step of {steps} to be run, got {values['strength']:g}"
            )
        multiple = self._facts.size_multiple
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
        name, is_embedded = "negative_prompt", "negative_prompt_embeds" in request.embeds
        if scale <= guidance.off:
            if request.negative_prompt is None and not is_embedded:
                return None
            name += "_embeds" if is_embedded else ""
            raise RequestError(
                f"{name}: expected {guidance.argument} above {guidance.off:g} with it, got {scale:g}"
            )
        if is_embedded:
            return None
        if request.prompt is None and self.spec.lists_embeds:
            # It counts its prompts by their texts.
            raise RequestError("negative_prompt_embeds: expected it beside prompt_embeds, got none")
        given = request.negative_prompt
        return guidance.negative_prompt if given is None else given

    def _make_calls(
        self, resolved: Sequence[_Resolved]
    ) -> tuple[list[PipelineCall], list[tuple[int, ...]]]:
        """Calls of at most `max_batch_size` neighbours that agree in all but prompt and seed.

        Every replica draws a run of neighbours.
        """
        samples = [
            _Sample(owner, number, item.request.prompt, seed)
            for owner, item in enumerate(resolved)
            for number, seed in enumerate(item.seeds)
        ]

        def shared(sample: _Sample) -> str:
            item = resolved[sample.owner]
            has_negative = item.negative_prompt is not None
            request = item.request
            objects = [id(given) for given in (*request.pictures, *request.embeds.values())]
            options = (item.values, item.output_type, item.cache)
            settings = (*options, dict(request.extra), request.sigmas)
            return repr((settings, has_negative, objects, request.latents is None))

        calls, owners = [], []
        mode = "RGB" if self.spec.image_input is None else self.spec.image_input.mode
        size, replicas = self.config.engine.max_batch_size, self.config.parallel.data_parallel_size
        least, more = divmod(len(samples), replicas)
        parts = iter(samples)
        for replica in range(replicas):
            share = list(islice(parts, least + (replica < more)))
            for _, run in groupby(share, key=shared):
                group = list(run)
                # Pipelines draw the noise of a picture's code from the first generator alone.
                has_pictures = resolved[group[0].owner].request.pictures
                most = 1 if has_pictures else size
                for start in range(0, len(group), most):
                    batch = group[start : start + most]
                    calls.append(_make_call(batch, resolved, replica, mode))
                    owners.append(tuple(sample.owner for sample in batch))
        return calls, owners

    def _output(
        self, item: _Resolved, drawn: list[Any], times: dict[str, float], caches: list[Any]
    ) -> OmniRequestOutput:
        start = time.perf_counter()
        is_latent = item.output_type == "latent"
        if self.spec.post_process is not None and not is_latent:
            drawn = self.spec.post_process(item.request, drawn)
        has_cache = bool(caches) and caches[0] is not None
        metrics = {
            **({"cache": caches[0], "caches": caches} if has_cache else {}),
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


def _make_call(
    batch: Sequence[_Sample], resolved: Sequence[_Resolved], replica: int, mode: str
) -> PipelineCall:
    item = resolved[batch[0].owner]
    negatives = [resolved[sample.owner].negative_prompt for sample in batch]
    values, request = dict(item.values), item.request
    sigmas = {} if request.sigmas is None else {"sigmas": list(request.sigmas)}
    rows = [(resolved[sample.owner].request.latents, sample.number) for sample in batch]
    return PipelineCall(
        request_ids=tuple(resolved[sample.owner].request.request_id for sample in batch),
        prompts=tuple(sample.prompt for sample in batch),
        negative_prompts=None if None in negatives else tuple(str(text) for text in negatives),
        seeds=tuple(sample.seed for sample in batch),
        height=values.pop("height"),
        width=values.pop("width"),
        num_inference_steps=values.pop("num_inference_steps"),
        output_type=item.output_type,
        arguments={**values, **sigmas, **request.extra},
        latents=() if request.latents is None else tuple(given[i : i + 1] for given, i in rows),
        embeds=request.embeds,
        pictures=tuple(as_mode(picture, mode) for picture in request.pictures),
        replica=replica,
        cache=item.cache,
    )
