# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a running server in place of an engine: any that speaks the OpenAI API.

Times are the client's: a step of the server cannot be seen. What the server says about forwards in its
`usage` is taken as it is; `metric_semantics` names where the figures come from.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.bench.hub import local_folder
from diffulex.bench.requests import encode_prompt
from diffulex.bench.results import run_stats
from diffulex.bench.runner import BatchResult
from diffulex.bench.serve.command import served_model
from diffulex.bench.serve.dataset import MAX_STOPS, BenchRequest
from diffulex.bench.serve.errors import EndpointError
from diffulex.bench.serve.http_stream import Endpoint, HttpClient
from diffulex.bench.serve.load import LoadPlan, LoadRun, RequestSettings, Sender, run_load
from diffulex.bench.serve.record import RequestRecord
from diffulex.bench.task import template_marker
from diffulex.engine.metrics import RequestMetrics, RunStats
from diffulex.engine.output import RequestOutput
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from diffulex.bench.config import BenchmarkConfig, EvalConfig
    from diffulex.bench.task import Task
    from diffulex.config.sampling_params import SamplingParams

__all__ = ["EndpointRunner", "client_facts", "endpoint_stats"]

_MAX_RETRIES = 5
#: Keys of `usage` that count all forwards of a request, and those that count its decode steps.
_FORWARDS = ("nfe", "num_forward_steps", "dllm_steps")
_DECODE_STEPS = ("dllm_decode_steps", "decode_steps")


@dataclass(frozen=True, slots=True)
class _Question(BenchRequest):
    """A request with parameters of its own."""

    parameters: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        return {**BenchRequest.fields(self), **self.parameters}


class _ReportingSender(Sender):
    """Says when a request has ended."""

    on_end: Callable[[RequestRecord], None] | None = None

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        await super().send(request, record)
        if self.on_end is not None:
            self.on_end(record)


def _whole(usage: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        if type(usage.get(name)) is int:
            return int(usage[name])
    return None


def _seconds(usage: Mapping[str, Any], name: str) -> float:
    value = usage.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def request_metrics(record: RequestRecord) -> RequestMetrics:
    """What the server says about forwards, and the client about time."""
    usage = record.usage or {}
    tokens = record.completion_tokens or 0
    decode_steps = _whole(usage, *_DECODE_STEPS) or 0
    prefill_steps = _whole(usage, "dllm_prefill_steps")
    if prefill_steps is None:
        prefill_steps = max(0, (_whole(usage, *_FORWARDS) or decode_steps) - decode_steps)
    return RequestMetrics(
        prompt_tokens=record.prompt_tokens or 0,
        completion_tokens=tokens,
        decided_tokens=tokens,
        decode_tokens=_whole(usage, "dllm_decode_output_tokens") or 0,
        visible_decode_tokens=0,
        prefill_steps=prefill_steps,
        decode_steps=decode_steps,
        total_s=record.e2e_s,
        decode_s=_seconds(usage, "decode_time_s"),
        ttft_s=record.ttft_s,
        first_commit_s=record.ttft_s,
    )


def client_facts(record: RequestRecord) -> dict[str, Any]:
    """What the client saw of one answer; None where it cannot be said."""
    times, tokens = record.chunk_times_s, record.completion_tokens
    first = record.first_chunk_tokens
    span = times[-1] - times[0] if len(times) > 1 else None
    can_rate = span and tokens is not None and first is not None
    return {
        "first_chunk_s": times[0] if times else None,
        "last_chunk_s": times[-1] if times else None,
        "tail_s": record.e2e_s - times[-1] if times else None,
        "num_chunks": len(times),
        "chunk_tokens": record.chunk_tokens,
        "chunk_intervals_s": record.gaps_s,
        "tpot_s": record.tpot_s,
        "first_chunk_visible_tps": first / times[0] if times and first and times[0] else None,
        "visible_decode_tps": (tokens - first) / span if can_rate else None,  # type: ignore[operator]
        "chunk_tpf": tokens / len(times) if times and tokens else None,
        "num_rejected": record.num_rejected,
        "num_retries": record.num_retries,
        "token_semantics": _token_semantics(record),
        "usage": None if record.usage is None else dict(record.usage),
    }


def _token_semantics(record: RequestRecord) -> str | None:
    if _whole(record.usage or {}, "completion_tokens") is not None:
        return "server_usage"
    return None if record.completion_tokens is None else "retokenized"


class EndpointRunner:
    """A server that is asked like `BenchmarkRunner`.

    Args:
        config: the settings; its `eval.endpoint` is the address.
        api_key: of the server, kept out of every file.

    Raises:
        ConfigError: the address or the tokenizer cannot be used.
    """

    def __init__(self, config: BenchmarkConfig, api_key: str | None) -> None:
        chosen = config.eval
        assert chosen.endpoint is not None
        self._endpoint = Endpoint.parse(chosen.endpoint, api_key)
        self._chosen: EvalConfig = chosen
        self._is_chat = chosen.endpoint_api == "chat"
        self._model = chosen.endpoint_model
        name = config.engine.tokenizer_path or config.engine.model_path
        self._tokenizer: Any = None
        if name:
            from diffulex.checkpoint.resolve import DEMO, resolve_model  # noqa: PLC0415
            from diffulex.checkpoint.tokenizer import Tokenizer  # noqa: PLC0415

            folder = resolve_model(name) if name == DEMO else local_folder("tokenizer_path", name)
            self._tokenizer = Tokenizer.from_dir(folder)
        self._client: list[dict[str, Any]] = []

    def __enter__(self) -> EndpointRunner:
        if self._model is None:
            self._model = asyncio.run(self._ask_model())
        return self

    def __exit__(self, *_: object) -> None:
        """Connections end with each call."""

    async def _ask_model(self) -> str:
        client = HttpClient(self._endpoint, verify_tls=self._chosen.verify_tls)
        try:
            return await served_model(client)
        except EndpointError as error:
            raise ConfigError(f"endpoint: {error}") from error
        finally:
            await client.close()

    def facts(self) -> dict[str, Any]:
        """What is known about the server."""
        return {
            "endpoint": self._endpoint.url,
            "endpoint_api": self._chosen.endpoint_api,
            "model_id": self._model,
            "model_files": {},
            "tokenizer_files": {},
        }

    def prompt(self, task: Task, text: str) -> str:
        """The text that is sent for an item.

        Raises:
            ConfigError: it would get two templates, or none although it needs one.
        """
        if self._is_chat:
            marker = template_marker(text)
            if marker is not None:
                raise ConfigError(
                    f"endpoint_api: expected completions for the task {task.name}, whose prompt is"
                    f" written with a template ({marker}), got chat"
                )
            return text
        if not task.is_chat:
            return text
        if self._tokenizer is None:
            raise ConfigError(
                f"endpoint_api: expected chat, or --tokenizer-path, for the task {task.name}, whose"
                " prompt needs the model's template, got completions"
            )
        return str(self._tokenizer.render_chat(self._messages(text)))

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = self._chosen.system_instruction
        head = [{"role": "system", "content": system}] if system else []
        return [*head, {"role": "user", "content": text}]

    def encoded(self, prompt: str) -> BenchRequest:
        """The part of a request that says what is asked."""
        if self._is_chat:
            return BenchRequest(None, list(self._messages(prompt)), 0)
        bos = self._chosen.add_bos_token
        if bos is None or self._tokenizer is None:
            return BenchRequest(prompt, None, 0)
        return BenchRequest(encode_prompt(self._tokenizer, prompt, bos), None, 0)

    def run(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        on_finish: Callable[[int, RequestOutput], None] | None = None,
    ) -> BatchResult:
        """As `BenchmarkRunner.run`: `concurrency` requests at a time, or as `request_rate` sends them."""
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        errors: dict[int, str] = {}
        self._client = [{} for _ in prompts]

        def ended(record: RequestRecord) -> None:
            place = record.request_id
            self._client[place] = client_facts(record)
            if not record.is_ok:
                errors[place] = str(record.error)
                return
            outputs[place] = output = _output(record)
            if on_finish is not None:
                on_finish(place, output)

        asked = [_question(*pair) for pair in zip(prompts, params, strict=True)]
        try:
            run = asyncio.run(self._load(asked, ended))
        except KeyboardInterrupt:
            return BatchResult(tuple(outputs), errors, RunStats(), is_interrupted=True)
        stats = RunStats(
            total_s=run.duration_s, wall_s=run.duration_s, max_concurrency=run.peak_concurrency
        )
        return BatchResult(tuple(outputs), errors, stats)

    async def _load(
        self, asked: Sequence[_Question], ended: Callable[[RequestRecord], None]
    ) -> LoadRun:
        chosen = self._chosen
        client = HttpClient(self._endpoint, verify_tls=chosen.verify_tls)
        settings = RequestSettings(
            api="chat" if self._is_chat else "completions",
            model=self._model,
            temperature=None,  # each request has its own
            timeout_s=chosen.timeout,
            max_retries=_MAX_RETRIES,
        )
        sender = _ReportingSender(
            client, settings, None if self._tokenizer is None else self._count_tokens
        )
        sender.on_end = ended
        rate = math.inf if chosen.request_rate is None else chosen.request_rate
        is_open = chosen.request_rate is not None
        limit = None if is_open and chosen.concurrency == 1 else chosen.concurrency
        try:
            return await run_load(sender, asked, LoadPlan(rate, max_concurrency=limit))
        finally:
            await client.close()

    def _count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def full_text(self, output: RequestOutput) -> str:
        """A server sends no more than the answer."""
        return output.text

    def further_facts(self, place: int) -> dict[str, Any]:
        """What the client saw of a request of the last call."""
        return {"client": self._client[place]}

    def forget_prompts(self) -> None:
        """What a server remembers of prompts is its own affair."""


def _question(prompt: BenchRequest, params: SamplingParams) -> _Question:
    values = {
        "temperature": params.temperature,
        "top_p": params.top_p if params.top_p != 1.0 else None,
        "top_k": params.top_k or None,
        "seed": params.seed,
        "ignore_eos": True if params.ignore_eos else None,
        "max_nfe": params.max_nfe,
        "max_repetition_run": params.max_repetition_run,
    }
    given = {name: value for name, value in values.items() if value is not None}
    stop = params.stop[:MAX_STOPS]  # the harness cuts answers at further ones
    return _Question(prompt.prompt, prompt.messages, params.max_tokens, stop, given)


def _output(record: RequestRecord) -> RequestOutput:
    return RequestOutput(
        req_id=record.request_id,
        prompt_token_ids=(),
        token_ids=(),
        text=record.text,
        full_text=record.text,
        completion_reason=record.finish_reason or "unknown",
        metrics=request_metrics(record),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _ratio(value: float, by: float) -> float | None:
    return value / by if by > 0 else None


def endpoint_stats(
    records: Sequence[Mapping[str, Any]],
    segments: Sequence[Mapping[str, Any]],
    last: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """`run_stats` of answers over HTTP, with what a client can say of them.

    The end-to-end throughput divides by the time on the clock, not by the sum of latencies.
    """
    stats = run_stats(records, segments, last)
    good = [record for record in records if not record["error"] and record.get("client")]
    metrics = [record["metrics"] for record in good]
    client = [record["client"] for record in good]
    usages = [item["usage"] or {} for item in client]
    tokens = sum(m["completion_tokens"] for m in metrics)
    chunks = sum(item["num_chunks"] for item in client)
    has_server = any(m["nfe"] for m in metrics)
    kinds = {item["token_semantics"] for item in client} - {None}
    decode_tokens = sum(m["decode_tokens"] for m in metrics)
    decode_steps = sum(m["decode_steps"] for m in metrics)
    wall_tps = _ratio(tokens, stats["wall_time_s"])
    spans = [(i["last_chunk_s"] or 0) - (i["first_chunk_s"] or 0) for i in client]
    visible = [(i["visible_decode_tps"] or 0) * span for i, span in zip(client, spans, strict=True)]
    return {
        **stats,
        "time_semantics": "client_wall",
        "token_semantics": "+".join(sorted(kinds)) or None,
        "metric_semantics": "server_dllm_usage" if has_server else "openai_stream_visible_chunks",
        "client_wall_e2e_tps_tok_s": wall_tps,
        "e2e_throughput_tok_s": wall_tps,
        "aggregate_e2e_tps_tok_s": _ratio(tokens, sum(m["total_s"] for m in metrics)),
        "avg_e2e_tps_tok_s": _mean(
            [u.get("e2e_tps", m["e2e_tps"]) for u, m in zip(usages, metrics, strict=True)]
        ),
        "aggregate_decode_tps_tok_s": _ratio(decode_tokens, sum(m["decode_s"] for m in metrics)),
        "avg_decode_tps_tok_s": _mean(
            [u.get("decode_tps", m["decode_tps"]) for u, m in zip(usages, metrics, strict=True)]
        ),
        "aggregate_visible_decode_tps_tok_s": _ratio(sum(visible), sum(spans)),
        "avg_visible_decode_tps_tok_s": _mean([item["visible_decode_tps"] for item in client]),
        "decode_throughput_tok_s": _ratio(decode_tokens, sum(m["decode_s"] for m in metrics)),
        "ptps_tok_s": _ratio(
            sum(m["prompt_tokens"] for m in metrics),
            sum(_seconds(usage, "prefill_time_s") for usage in usages),
        ),
        "dtps_tok_s": _ratio(decode_tokens, sum(m["decode_s"] for m in metrics)),
        "ttft_s": _mean([item["first_chunk_s"] for item in client]),
        "tpot_s": _mean([item["tpot_s"] for item in client]),
        "tpot_undefined": sum(item["tpot_s"] is None for item in client),
        "tpf_aggregate": stats["tpf_aggregate"] if has_server else None,
        "decode_tpf": _ratio(decode_tokens, decode_steps),
        "chunk_tpf": _ratio(tokens, chunks),
        "num_rejected": sum(item["num_rejected"] for item in client),
        "num_retries": sum(item["num_retries"] for item in client),
    }
