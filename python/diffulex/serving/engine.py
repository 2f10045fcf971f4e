# SPDX-License-Identifier: Apache-2.0
"""The real engine as the serving mixin sees it."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.engine.profiling import Profiler
from diffulex.serving.admission import AdmissionLimits
from diffulex.serving.request import ServedRequest
from diffulex.serving.stats import ServingStats
from diffulex.serving.tick import DiffulexAsyncEngineMixin
from diffulex.strategies.rules import rules_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.config.sampling_params import SamplingParams
    from diffulex.engine.engine import Diffulex

__all__ = ["ServingEngine"]


class ServingEngine(DiffulexAsyncEngineMixin):
    """A `Diffulex` with the interface that the mixin needs.

    Args:
        engine: owned from now on; `exit` closes it.
        profiler_config: what the profiler flags of docs/server_flags.md say; None: profiling is off.
        load_time_s: of the whole engine, for the readiness report.
        chat_template: text of a template that replaces the tokenizer's.
    """

    def __init__(
        self,
        engine: Diffulex,
        *,
        profiler_config: Mapping[str, Any] | None = None,
        load_time_s: float = 0.0,
        chat_template: str | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        if chat_template is not None:
            self.tokenizer.use_chat_template(chat_template)
        self.detokenize_snapshots = True
        self._live: dict[int, ServedRequest] = {}
        self._profiler = Profiler(profiler_config)
        self._limits = _limits_of(engine)
        self._stats = ServingStats()
        engine.observe_blocks(self._stats.add_block)
        self._load_time_s = load_time_s

    # What the mixin calls.

    def serving_limits(self) -> AdmissionLimits:
        return self._limits

    def add_request(self, prompt: Sequence[int], sampling_params: SamplingParams) -> int:
        """Enqueues a prompt; stop texts are the mixin's."""
        # A temperature that close to 0 is meant to be 0.
        temperature = sampling_params.temperature
        if temperature is not None and temperature < 1e-5:
            temperature = 0.0
        params = dataclasses.replace(sampling_params, stop=(), temperature=temperature)
        req_id = self.engine.add_request(prompt, params)
        self._live[req_id] = ServedRequest(self.engine, req_id, params)
        return req_id

    def report_buffer(self, req_id: int) -> None:
        """Makes steps report the buffer of the request from now on."""
        self.engine.watch_buffer(req_id)

    def step(self) -> tuple[list[ServedRequest], bool]:
        """One step; the requests it touched."""
        start = time.perf_counter()
        touched, is_prefill = [], False
        for output in self.engine.step():
            request = self._live.get(output.req_id)
            if request is None:
                continue
            request.update(output)
            is_prefill = is_prefill or request._last_execution_is_prefill
            if output.is_finished:
                del self._live[output.req_id]
            touched.append(request)
        self._profiler.count_step()
        self._stats.add_step(time.perf_counter() - start, touched, is_prefill)
        return touched, is_prefill

    def is_finished(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self.engine.has_unfinished()

    def abort_request(self, req_id: int) -> bool:
        """Frees the request at the next step boundary."""
        self._live.pop(req_id, None)
        return self.engine.abort(req_id)

    def start_profile(self, prefix: str | None = None) -> dict[str, Any]:
        """Starts the profiler; RuntimeError when it is off or running."""
        return self._profiler.start(prefix)

    def stop_profile(self) -> dict[str, Any]:
        """Stops the profiler; RuntimeError when it does not run."""
        return self._profiler.stop()

    def flush_cache(self) -> dict[str, Any]:
        """Drops the prefix cache's pages that no request uses."""
        return {"num_dropped_units": self.engine.flush_prefix_cache()}

    def exit(self) -> None:
        """Releases the engine."""
        self._profiler.close()
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
            "draws_at_zero": rules_of(decoding.decoding_strategy).draws_at_zero,
            "seed": config.sampler.seed,
            "max_num_reqs": config.scheduler.max_num_reqs,
            "eos_token_ids": list(model.eos),
            "device": model.device,
            "dtype": model.dtype,
            "world_size": 1,
            "extension_version": __version__,
            "python_version": platform.python_version(),
            "load_time_s": max(0.0, self._load_time_s - self.engine.warm_up_s),
            "warmup_time_s": self.engine.warm_up_s,
            "has_chat_template": self.tokenizer.has_chat_template,
            "model_dir": str(Path(model.model_dir)),
            "decoding": {
                "accept_threshold": decoding.accept_threshold,
                "edit_threshold": decoding.edit_threshold,
                "remask_threshold": decoding.remask_threshold,
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
            },
        )


def _limits_of(engine: Diffulex) -> AdmissionLimits:
    config = engine.config
    is_canvas = config.decoding.decoding_strategy == "diffusion_gemma"
    return AdmissionLimits(
        max_model_len=config.scheduler.max_model_len,
        vocab_size=config.model.spec.vocab_size,
        block_size=config.decoding.block_size,
        buffer_size=config.decoding.buffer_size,
        page_size=config.cache.page_size,
        num_pages=config.cache.num_pages,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        mask_token_id=None if is_canvas else config.model.mask_token_id,
        is_prefill_chunked=config.scheduler.enable_chunked_prefill,
        longest_whole_prompt=config.longest_whole_prompt,
    )
