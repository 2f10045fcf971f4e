# SPDX-License-Identifier: Apache-2.0
"""An engine for benchmarks: whole batches, one failed request at a time, numbers of every batch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from diffulex.bench.hub import local_folder
from diffulex.bench.manifest import engine_facts
from diffulex.bench.requests import encode_prompt
from diffulex.engine.metrics import RunStats
from diffulex.engine.output import GenerationOutputs, RequestOutput, decode_token_ids_robust
from diffulex.errors import OutOfPagesError, PromptError
from diffulex.interruption import import_at_once

if TYPE_CHECKING:
    from diffulex import SamplingParams
    from diffulex.bench.task import Task

__all__ = ["BatchResult", "BenchmarkRunner"]

_LEVELS = ("peak_pages", "num_pages", "max_concurrency")
_TIMING = (
    "ttft_s", "tpot_s", "e2e_total_time_s", "e2e_throughput_tok_s", "prefill_throughput_tok_s",
    "decode_throughput_tok_s", "tpf", "avg_e2e_tps", "avg_decode_tps",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of a batch; the place in a list is that of the prompt.

    Attributes:
        outputs: None for a request that failed or was not finished.
        errors: message of each failed request, by place.
        stats: totals over the steps of the batch.
        is_interrupted: Ctrl-C ended it early.
    """

    outputs: tuple[RequestOutput | None, ...]
    errors: Mapping[int, str]
    stats: RunStats
    is_interrupted: bool = False

    @property
    def generation(self) -> GenerationOutputs:
        """The finished requests with their metrics."""
        return GenerationOutputs((o for o in self.outputs if o is not None), self.stats)


def _since(before: RunStats, now: RunStats, wall_s: float) -> RunStats:
    """Totals of the steps between two readings."""
    result = RunStats()
    for item in dataclasses.fields(RunStats):
        value = getattr(now, item.name)
        is_level = item.name in _LEVELS
        setattr(result, item.name, value if is_level else value - getattr(before, item.name))
    result.wall_s = wall_s
    return result


class BenchmarkRunner:
    """A model that is loaded once and asked many times.

    Args:
        model_path: as `model` of `diffulex.Diffulex`.
        tokenizer_path: directory or hub id of another tokenizer for the prompts and answers.
        wait_ready: must be True: the constructor returns when the engine is ready.
        engine_kwargs: further settings of the engine.

    Raises:
        ConfigError: bad settings.
        CheckpointError: the model or tokenizer cannot be found or read.
    """

    def __init__(
        self,
        model_path: str,
        tokenizer_path: str | None = None,
        wait_ready: bool = True,
        **engine_kwargs: Any,
    ) -> None:
        import diffulex  # noqa: PLC0415 (slow to import)

        if not wait_ready:
            raise ValueError("wait_ready: expected True (an engine is ready when it exists)")
        if engine_kwargs.get("use_lora"):
            adapter = local_folder("lora_path", engine_kwargs["lora_path"])
            engine_kwargs["lora_path"] = str(adapter)
        import_at_once("diffulex.engine.engine")
        self.engine = diffulex.Diffulex(model_path, **engine_kwargs)
        self.tokenizer: Any = self.engine.tokenizer
        self._has_other_tokenizer = tokenizer_path not in (None, model_path)
        if self._has_other_tokenizer:
            from diffulex.checkpoint.tokenizer import Tokenizer  # noqa: PLC0415

            self.tokenizer = Tokenizer.from_dir(local_folder("tokenizer_path", str(tokenizer_path)))
        #: Of prompts through the checkpoint's template, and of all prompts.
        self.system: str | None = None
        self.add_bos_token: bool | None = None
        #: The result of the last call.
        self.last_outputs: GenerationOutputs | None = None
        if self.engine.config.kernel.profiler_config is not None:
            self.engine.start_profile("bench")

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        on_finish: Callable[[int, RequestOutput], None] | None = None,
    ) -> BatchResult:
        """Decodes token ids; a request that cannot be served does not end the others.

        Args:
            prompts: token ids.
            params: one each.
            on_finish: receives the place and output of every request as it ends.
        """
        start, before = time.perf_counter(), dataclasses.replace(self.engine.run_stats)
        order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        errors: dict[int, str] = {}
        places: dict[int, int] = {}
        is_interrupted = False
        try:
            for place in order:  # the longest first, so that the last ones end soon
                req_id = self._added(prompts[place], params[place])
                if isinstance(req_id, str):
                    errors[place] = req_id
                else:
                    places[req_id] = place
            while places:
                for step in self.engine.step():
                    if step.output is None or step.req_id not in places:
                        continue
                    place = places.pop(step.req_id)
                    if step.output.error is not None:
                        errors[place] = step.output.error
                        continue
                    outputs[place] = shown = self._shown(step.output)
                    if on_finish is not None:
                        on_finish(place, shown)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            for req_id in places:
                self.engine.abort(req_id)
        stats = _since(before, self.engine.run_stats, time.perf_counter() - start)
        result = BatchResult(tuple(outputs), errors, stats, is_interrupted)
        self.last_outputs = result.generation
        return result

    def _added(self, prompt: Sequence[int], params: SamplingParams) -> int | str:
        """The id of a request, or why it cannot be served."""
        try:
            return self.engine.add_request(list(prompt), params)
        except (PromptError, OutOfPagesError) as error:
            return str(error)

    def _shown(self, output: RequestOutput) -> RequestOutput:
        if not self._has_other_tokenizer:
            return output
        text = decode_token_ids_robust(self.tokenizer, output.token_ids)
        return dataclasses.replace(output, text=text)

    def facts(self) -> dict[str, Any]:
        """What the loaded engine adds to a manifest."""
        return engine_facts(self.engine)

    def prompt(self, task: Task, text: str) -> str:
        """The text that is asked for an item: through the checkpoint's template if the task says so."""
        if not task.is_chat or not self.tokenizer.has_chat_template:
            return text
        head = [{"role": "system", "content": self.system}] if self.system else []
        return str(self.tokenizer.render_chat([*head, {"role": "user", "content": text}]))

    def encoded(self, prompt: str) -> list[int]:
        """Token ids of a prompt."""
        return encode_prompt(self.tokenizer, prompt, self.add_bos_token)

    def further_facts(self, place: int) -> dict[str, Any]:
        """Nothing that the metrics of a request do not say."""
        del place
        return {}

    def forget_prompts(self) -> None:
        """Empties the prefix cache."""
        self.engine.flush_prefix_cache()

    def full_text(self, output: RequestOutput) -> str:
        """What was generated, with what stands after the end of the answer."""
        generated = [token for token in output.generated_ids if token >= 0]
        return decode_token_ids_robust(self.tokenizer, generated)

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: bool = False,
    ) -> list[dict[str, Any]]:
        """Decodes every prompt; one row each, which also holds the numbers of the batch.

        Raises:
            PromptError: a prompt cannot be served.
        """
        encoded = [self._token_ids(prompt) for prompt in prompts]
        result = self.engine.generate(
            encoded, sampling_params, use_tqdm=use_tqdm, progress_log_interval=0, summary=False
        )
        self.last_outputs = result
        numbers = result.as_dict()
        batch = {key: numbers[key] for key in _TIMING}
        batch["batch_total_time_s"] = numbers["total_time"]
        return [
            {
                "text": output.text,
                "full_text": self.full_text(output),
                "token_ids": list(output.token_ids),
                "nfe": output.metrics.nfe,
                "generation_time": numbers["total_time"] / len(encoded),
                "completion_reason": output.completion_reason,
                "request_metrics": request_numbers(output),
                **batch,
            }
            for output in map(self._shown, result)
        ]

    def evaluate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: bool = False,
    ) -> dict[str, Any]:
        """`generate`, with the totals of the batch beside its ``outputs``."""
        rows = self.generate(prompts, sampling_params, use_tqdm)
        assert self.last_outputs is not None
        numbers = self.last_outputs.as_dict()
        count = len(rows)
        return {
            "outputs": rows,
            "num_samples": count,
            "total_tokens": numbers["total_tokens"],
            "total_nfe": numbers["request_nfe"],
            "total_time": numbers["total_time"],
            "avg_tokens_per_sample": numbers["total_tokens"] / count,
            "avg_nfe": numbers["request_nfe"] / count,
            "aggregate_tpf": numbers["aggregate_tpf"],
            **{key: numbers[key] for key in _TIMING},
        }

    def close(self) -> None:
        """Ends a recording of the profiler and releases the engine."""
        if self.engine.is_profiling:
            self.engine.stop_profile()
        self.engine.close()

    def __enter__(self) -> BenchmarkRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def request_numbers(output: RequestOutput) -> dict[str, Any]:
    """The metrics of one request, for JSON."""
    metrics = output.metrics
    return {
        "tokens": metrics.completion_tokens,
        "decode_tokens": metrics.decode_tokens,
        "decode_steps": metrics.decode_steps,
        "tpf": metrics.tpf,
        "e2e_tps": metrics.e2e_tps,
        "decode_tps": metrics.decode_tps,
    }
