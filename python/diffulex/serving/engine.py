# SPDX-License-Identifier: Apache-2.0
"""The real engine as it is served."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.config.sampling_params import greedy_if_tiny
from diffulex.distributed.layout import Sizes
from diffulex.serving.admission import AdmissionLimits
from diffulex.serving.engine_line import EngineLine
from diffulex.serving.stats import ServingStats
from diffulex.serving.tick import DiffulexAsyncEngineMixin

if TYPE_CHECKING:
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.engine.engine import Diffulex
    from diffulex.engine.metrics import RequestRecord
    from diffulex.engine.output import StepOutput

__all__ = ["ServingEngine"]


class ServingEngine(DiffulexAsyncEngineMixin):
    """A `Diffulex` that serves.

    Args:
        engine: owned from now on; `exit` closes it.
        load_time_s: of the whole engine, for the readiness report.
        chat_template: text of a template that replaces the tokenizer's.
        detokenize_snapshots: False: the frontend makes the text of snapshots.
    """

    def __init__(
        self,
        engine: Diffulex,
        *,
        load_time_s: float = 0.0,
        chat_template: str | None = None,
        detokenize_snapshots: bool = True,
    ) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        if chat_template is not None:
            self.tokenizer.use_chat_template(chat_template)
        self.detokenize_snapshots = detokenize_snapshots
        #: Records of requests that are neither finished nor aborted.
        self._live: dict[int, RequestRecord] = {}
        self._limits = _limits_of(engine)
        has_masks = not engine.config.decoding.traits.has_canvas
        self.mask_token_id = engine.config.model.mask_token_id if has_masks else None
        self._stats = ServingStats()
        self._line = EngineLine(engine)
        engine.observe_blocks(self._stats.add_block)
        self._load_time_s = load_time_s

    def serving_limits(self) -> AdmissionLimits:
        return self._limits

    def add_request(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        has_text: bool = False,
        has_snapshots: bool = False,
    ) -> int:
        """Enqueues a prompt."""
        temperature = greedy_if_tiny(sampling_params.temperature)
        if temperature != sampling_params.temperature:
            sampling_params = dataclasses.replace(sampling_params, temperature=temperature)
        req_id = self.engine.add_request(
            prompt, sampling_params, has_text=has_text, has_snapshots=has_snapshots
        )
        self._live[req_id] = self.engine.record(req_id)
        return req_id

    def record(self, req_id: int) -> RequestRecord:
        """The record of a request that is not finished, which goes on being written."""
        return self._live[req_id]

    def step(self) -> list[StepOutput]:
        """One step; what it did to the requests that are not aborted."""
        start = time.perf_counter()
        self._line.before_step(start, len(self._live))
        try:
            steps = self.engine.step()
        except BaseException:
            self._line.end_step()
            raise
        outputs = [output for output in steps if output.req_id in self._live]
        records = [self._live[output.req_id] for output in outputs]
        for output in outputs:
            if output.is_finished:
                del self._live[output.req_id]
        end = time.perf_counter()
        seconds = end - start
        num_tokens = sum(output.new_tokens for output in outputs)
        num_prefilling = sum(record.is_prefilling for record in records)
        self._stats.add_step(seconds, len(outputs), num_tokens, num_prefilling=num_prefilling)
        self._line.after_step(end)
        return outputs

    def is_finished(self) -> bool:
        """Whether a step would have nothing to do; with broken weights it would fail, and shall."""
        return not (self.engine.has_unfinished() or self.engine.has_broken_weights)

    def abort_request(self, req_id: int) -> bool:
        """Frees the request at the next step boundary."""
        self._live.pop(req_id, None)
        return self.engine.abort(req_id)

    def start_profile(self, prefix: str | None = None) -> dict[str, Any]:
        """Starts the profiler; RuntimeError when it is off or running."""
        return self.engine.start_profile(prefix)

    def stop_profile(self) -> dict[str, Any]:
        """Stops the profiler; RuntimeError when it does not run."""
        return self.engine.stop_profile()

    def flush_cache(self) -> dict[str, Any]:
        """Drops the prefix cache's pages that no request uses."""
        return {"num_dropped_units": self.engine.flush_prefix_cache()}

    def control(self, action: str, path: str | None) -> dict[str, Any]:
        """Pauses, resumes, or changes the weights from files of this machine."""
        engine = self.engine
        if action in ("update_weights", "load_lora"):
            if path is None:
                raise ValueError(f"{action}: expected a path, got none")
            change = engine.update_weights if action == "update_weights" else engine.load_lora
            return {"num_tensors": change(path)}
        if action == "unload_lora":
            return {"num_tensors": engine.unload_lora()}
        engine.pause() if action == "pause" else engine.resume()
        return {"paused": engine.is_paused}

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for a `resume`."""
        return self.engine.is_paused

    def exit(self) -> None:
        """Releases the engine."""
        with contextlib.suppress(RuntimeError):  # an engine that is closed or dead has no numbers
            self._line.final()
        self._line.close()
        self.engine.close()

    # Reports.

    def serving_info(self) -> dict[str, Any]:
        """What the backend reports when it is ready."""
        from diffulex_ext import __version__  # noqa: PLC0415

        config = self.engine.config
        decoding, model = config.decoding, config.model
        info: dict[str, Any] = {
            "model": str(model.model),
            "model_name": model.model_name,
            "decoding_strategy": decoding.decoding_strategy,
            "sampling_mode": decoding.sampling_mode,
            "draws_at_zero": decoding.traits.draws_at_zero,
            "seed": config.sampler.seed,
            # Of all its replicas, where this engine is several.
            "max_num_reqs": config.scheduler.max_num_reqs * config.parallel.data_parallel_size,
            "eos_token_ids": list(model.eos),
            "device": model.device,
            "devices": [rank["device"] for rank in self.engine.parallel_info()["ranks"]],
            "dtype": model.dtype,
            "world_size": Sizes.of_weights(config.parallel).world,
            "tensor_parallel_size": config.parallel.tensor_parallel_size,
            "expert_parallel_size": config.parallel.expert_parallel_size,
            "data_parallel_size": config.parallel.data_parallel_size,
            "extension_version": __version__,
            "python_version": platform.python_version(),
            "load_time_s": max(0.0, self._load_time_s - self.engine.warm_up_s),
            "warmup_time_s": self.engine.warm_up_s,
            "has_chat_template": self.tokenizer.has_chat_template,
            "model_dir": str(Path(model.model_dir)),
            "decoding": {
                "accept_threshold": decoding.accept_threshold,
                "edit_threshold": decoding.edit_threshold,
                "remask_threshold": config.ignored.remask_threshold,
                "add_block_threshold": decoding.add_block_threshold,
                "semi_complete_threshold": decoding.semi_complete_threshold,
                "token_stability_threshold": decoding.token_stability_threshold,
                "max_post_edit_steps": decoding.max_post_edit_steps,
                "penalty_lambda": decoding.penalty_lambda,
            },
        }
        info.update(dataclasses.asdict(self._limits))
        return info

    def serving_stats(self) -> dict[str, Any]:
        """Gauges and counters for heartbeats; cheap, and safe to call between steps only."""
        skew = self.engine._loop.rank_skew_s
        return self._stats.report(
            self.engine.stats(),
            self._limits.page_size,
            {
                # Those of the last step, which between requests is over.
                "active_blocks": 0 if self.is_finished() else self.engine.num_active_blocks,
                # A request is in one of them, or in both.
                "requests_known": len(
                    self._live.keys() | self.init_serving_state().requests.keys()
                ),
                "sampler_states": self.engine.num_watched_requests,
                **({} if skew is None else {"rank_step_skew_seconds": skew}),
            },
        )


def _limits_of(engine: Diffulex) -> AdmissionLimits:
    config = engine.config
    has_masks = not config.decoding.traits.has_canvas
    return AdmissionLimits(
        max_model_len=config.scheduler.max_model_len,
        vocab_size=config.model.spec.vocab_size,
        block_size=config.decoding.block_size,
        buffer_size=config.decoding.buffer_size,
        page_size=config.cache.page_size,
        num_pages=config.cache.num_pages,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        mask_token_id=config.model.mask_token_id if has_masks else None,
        allows_mask_in_prompt=has_masks and config.decoding.allow_mask_in_prompt,
        is_prefill_chunked=config.scheduler.enable_chunked_prefill,
        longest_whole_prompt=config.longest_whole_prompt,
    )
