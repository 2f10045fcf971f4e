# SPDX-License-Identifier: Apache-2.0
"""Sends requests at their times, at most so many at once, and records what comes back."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffulex.bench.serve.dataset import BenchRequest
from diffulex.bench.serve.errors import EndpointError, RequestError
from diffulex.bench.serve.frames import Api, EventParser, Frame, parse_frame, path_of
from diffulex.bench.serve.http_stream import HttpClient, HttpResponse
from diffulex.bench.serve.record import RequestRecord

__all__ = [
    "LoadPlan",
    "LoadRun",
    "RequestSettings",
    "Sender",
    "arrival_offsets",
    "run_load",
    "warm_up",
]

_REJECTIONS = (429, 503)
_MAX_RETRY_PAUSE_S = 60.0
_DEFAULT_RETRY_PAUSE_S = 1.0
_SHOWN_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What all requests have in common.

    Attributes:
        extra_body: fields of every body; they replace others, and null removes one.
        timeout_s: of one request, retries included.
        max_retries: how often a 429 or 503 is tried again, after its `Retry-After`.
        counts_chunks: ask for usage in every chunk, for exact tokens per chunk.
    """

    api: Api = "chat"
    model: str | None = None
    temperature: float | None = 0.0
    ignore_eos: bool = False
    stream_mode: str | None = None
    counts_chunks: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    max_retries: int = 0

    def body(self, request: BenchRequest) -> bytes:
        """JSON of one request."""
        fields: dict[str, Any] = {**request.fields(), "max_tokens": request.output_len}
        fields["stream"] = True
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.api == "generate":
            fields["stream_mode"] = self.stream_mode or "block_append"
        else:
            fields["model"] = self.model
            fields["stream_options"] = {"include_usage": True}
            if self.counts_chunks:
                fields["stream_options"]["continuous_usage_stats"] = True
            if self.stream_mode is not None:
                fields["stream_mode"] = self.stream_mode
        fields.update(self.extra_body)
        kept = {name: value for name, value in fields.items() if value is not None}
        return json.dumps(kept, ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """When requests are sent.

    Attributes:
        request_rate: arrivals per second; infinite sends as soon as there is room.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less is
            burstier, infinite makes all gaps equal.
        max_concurrency: most requests in flight; None does not limit them.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All records of one run, by request, and how long it took."""

    records: Sequence[RequestRecord]
    duration_s: float
    peak_concurrency: int


def arrival_offsets(count: int, plan: LoadPlan) -> list[float]:
    """Seconds from the start of the run at which requests arrive; the first arrives at 0."""
    if math.isinf(plan.request_rate):
        return [0.0] * count
    if math.isinf(plan.burstiness):
        return [index / plan.request_rate for index in range(count)]
    rng = random.Random(f"bench serve arrivals/{plan.seed}")
    scale = 1.0 / (plan.request_rate * plan.burstiness)
    offsets = [0.0]
    while len(offsets) < count:
        offsets.append(offsets[-1] + rng.gammavariate(plan.burstiness, scale))
    return offsets[:count]


class Sender:
    """Sends single requests and records their answers."""

    def __init__(
        self,
        client: HttpClient,
        settings: RequestSettings,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        """`count_tokens` counts the tokens of a text where the server does not."""
        self._client = client
        self._settings = settings
        self._count_tokens = count_tokens

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Fills `record`; failures are recorded, not raised."""
        body = self._settings.body(request)
        start = time.perf_counter()
        try:
            # wait_for: Python 3.10 has no asyncio.timeout.
            await asyncio.wait_for(self._attempts(body, record, start), self._settings.timeout_s)
        except asyncio.TimeoutError:
            record.error_kind = "timeout"
            record.error = f"expected an answer within {self._settings.timeout_s:g} s, got none"
        except RequestError as failure:
            record.error_kind = failure.kind
            record.error = str(failure)
        record.e2e_s = time.perf_counter() - start
        self._count(record)

    async def _attempts(self, body: bytes, record: RequestRecord, start: float) -> None:
        while True:
            try:
                await self._attempt(body, record, start)
            except RequestError as failure:
                if failure.status not in _REJECTIONS:
                    raise
                record.num_rejected += 1
                if record.num_retries >= self._settings.max_retries:
                    raise
                pause = failure.retry_after_s
            else:
                return
            record.num_retries += 1
            await asyncio.sleep(_DEFAULT_RETRY_PAUSE_S if pause is None else pause)

    async def _attempt(self, body: bytes, record: RequestRecord, start: float) -> None:
        path = path_of(self._settings.api)
        async with self._client.request("POST", path, body) as response:
            record.status = response.status
            if response.status != 200:
                raise await _http_failure(response)
            await self._read(response, record, start)

    async def _read(self, response: HttpResponse, record: RequestRecord, start: float) -> None:
        parser = EventParser()
        texts: list[str] = []
        is_done = False
        # Read to the end of the body, so that the connection can be used again.
        async for part in response.parts():
            now = time.perf_counter() - start
            for data in parser.feed(part):
                frame = parse_frame(self._settings.api, data)
                is_done = is_done or frame.is_done
                _take_frame(frame, record, texts, now)
        record.text = "".join(texts)
        if not is_done and record.finish_reason is None:
            raise RequestError("truncated", "stream: expected [DONE] at its end, got none")

    def _count(self, record: RequestRecord) -> None:
        usage = record.usage or {}
        record.prompt_tokens = _whole(usage.get("prompt_tokens"))
        record.completion_tokens = _whole(usage.get("completion_tokens"))
        if record.completion_tokens is None and record.is_ok and self._count_tokens is not None:
            record.completion_tokens = self._count_tokens(record.text)


def _take_frame(frame: Frame, record: RequestRecord, texts: list[str], now: float) -> None:
    record.finish_reason = frame.finish_reason or record.finish_reason
    counted = None
    if frame.usage is not None:
        before = _whole((record.usage or {}).get("completion_tokens")) or 0
        after = _whole(frame.usage.get("completion_tokens"))
        counted = None if after is None else after - before
        record.usage = frame.usage
    if frame.is_snapshot and record.first_snapshot_s is None:
        record.first_snapshot_s = now
    if not frame.text or (frame.is_whole and record.chunk_times_s):
        return
    texts.append(frame.text)
    record.chunk_times_s.append(now)
    record.chunk_chars.append(len(frame.text))
    # Usage in every chunk says how many tokens it has; one chunk without it and none are known.
    if counted is not None and (record.chunk_tokens is not None or len(texts) == 1):
        record.chunk_tokens = [*(record.chunk_tokens or ()), counted]
    elif counted is None:
        record.chunk_tokens = None


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


async def _http_failure(response: HttpResponse) -> RequestError:
    content = (await response.read()).decode("utf-8", "replace")
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = content[:_SHOWN_ERROR_CHARS].strip() or "no body"
    pause = response.headers.get("retry-after", "")
    return RequestError(
        f"http_{response.status}",
        f"HTTP {response.status}: {message}",
        status=response.status,
        # A date instead of seconds is legal; then the default pause holds.
        retry_after_s=min(float(pause), _MAX_RETRY_PAUSE_S) if pause.isdigit() else None,
    )


async def run_load(sender: Sender, requests: Sequence[BenchRequest], plan: LoadPlan) -> LoadRun:
    """Sends every request at its time and waits for all answers."""
    offsets = arrival_offsets(len(requests), plan)
    records = [RequestRecord(index) for index in range(len(requests))]
    room = asyncio.Semaphore(plan.max_concurrency or len(requests))
    in_flight = 0
    peak = 0
    start = time.perf_counter()

    async def one(record: RequestRecord, request: BenchRequest, offset: float) -> None:
        nonlocal in_flight, peak
        record.scheduled_s = offset
        pause = start + offset - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        if offset > 0:
            record.lag_s = time.perf_counter() - start - offset
        async with room:
            in_flight += 1
            peak = max(peak, in_flight)
            record.sent_s = time.perf_counter() - start
            await sender.send(request, record)
            in_flight -= 1

    triples = zip(records, requests, offsets, strict=True)
    await asyncio.gather(*(one(record, request, offset) for record, request, offset in triples))
    return LoadRun(records, time.perf_counter() - start, peak)


async def warm_up(sender: Sender, requests: Sequence[BenchRequest], max_concurrency: int) -> None:
    """Sends requests whose answers do not count.

    Raises:
        EndpointError: one of them failed; so would the run.
    """
    run = await run_load(sender, requests, LoadPlan(max_concurrency=max_concurrency))
    for record in run.records:
        if not record.is_ok:
            raise EndpointError(f"warm-up: {record.error}")
