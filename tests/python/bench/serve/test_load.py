# SPDX-License-Identifier: Apache-2.0
"""Load against an endpoint whose times are known."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import pytest

from diffulex.bench.serve.dataset import BenchRequest
from diffulex.bench.serve.errors import EndpointError
from diffulex.bench.serve.http_stream import Endpoint, HttpClient
from diffulex.bench.serve.load import (
    LoadPlan,
    LoadRun,
    RequestSettings,
    Sender,
    arrival_offsets,
    run_load,
    warm_up,
)
from diffulex.bench.serve.record import RequestRecord
from fixtures.sse_endpoint import (
    Answer,
    FakeEndpoint,
    Seen,
    chat_frames,
    completion_frames,
    frame,
    sse_endpoint,
)

#: How late a busy host may be; times are only ever longer than asked for.
_SLACK_S = 0.15
_USAGE = {"prompt_tokens": 7, "completion_tokens": 9}


def in_time(test: Callable[[], None]) -> Callable[[], None]:
    """Runs a test of times until the host was calm enough for it, five times at most."""

    @functools.wraps(test)
    def run() -> None:
        for _ in range(4):
            with contextlib.suppress(AssertionError):
                return test()
        return test()

    return run


def _measure(
    endpoint: FakeEndpoint,
    *,
    count: int = 1,
    settings: RequestSettings | None = None,
    plan: LoadPlan | None = None,
) -> LoadRun:
    async def measure() -> LoadRun:
        client = HttpClient(Endpoint.parse(endpoint.url, "secret"))
        sender = Sender(client, settings or RequestSettings(model="m"))
        requests = [BenchRequest(f"question {index}", None, 16) for index in range(count)]
        try:
            return await run_load(sender, requests, plan or LoadPlan())
        finally:
            await client.close()

    return asyncio.run(measure())


def _paced(frames: Sequence[str], pauses: Sequence[float]) -> Answer:
    """The first frames after these pauses, the others at once."""
    waits = [*pauses, *[0.0] * (len(frames) - len(pauses))]
    return Answer(list(zip(waits, frames, strict=True)))


@pytest.mark.parametrize(("burstiness", "count"), [(0.5, 20000), (1.0, 2000), (4.0, 2000)])
def test_gaps_have_the_mean_and_spread_of_the_process(burstiness: float, count: int) -> None:
    """A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k)."""
    offsets = arrival_offsets(count + 1, LoadPlan(request_rate=8.0, burstiness=burstiness))
    gaps = [later - earlier for earlier, later in itertools.pairwise(offsets)]
    mean = statistics.fmean(gaps)
    assert offsets[0] == 0.0
    assert mean == pytest.approx(1 / 8.0, rel=0.05)
    assert statistics.pstdev(gaps) / mean == pytest.approx(burstiness**-0.5, rel=0.1)


def test_arrivals_repeat_with_their_seed_and_differ_without() -> None:
    plan = LoadPlan(request_rate=5.0, seed=3)
    assert arrival_offsets(50, plan) == arrival_offsets(50, plan)
    assert arrival_offsets(50, plan) != arrival_offsets(50, dataclasses.replace(plan, seed=4))


def test_infinite_burstiness_is_a_constant_rate_and_infinite_rate_is_at_once() -> None:
    plan = LoadPlan(request_rate=4.0, burstiness=math.inf)
    assert arrival_offsets(4, plan) == [0.0, 0.25, 0.5, 0.75]
    assert arrival_offsets(3, LoadPlan()) == [0.0, 0.0, 0.0]


@pytest.mark.alone
@in_time
def test_times_are_those_of_the_chunks() -> None:
    """Content after 0.1 s, 0.05 s and 0.2 s; the role frame before it and usage are no content."""
    role = frame({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    frames = [role, *chat_frames(["abc", "de", "fghi"], _USAGE)]
    answer = _paced(frames, [0.0, 0.1, 0.05, 0.2, 0.1])
    with sse_endpoint(lambda _: answer) as endpoint:
        (record,) = _measure(endpoint).records
    assert record.is_ok
    assert record.text == "abcdefghi"
    assert (record.prompt_tokens, record.completion_tokens) == (7, 9)
    assert record.finish_reason == "stop"
    assert record.ttft_s is not None
    assert 0.1 <= record.ttft_s < 0.1 + _SLACK_S
    first, second = record.gaps_s
    # A gap is short by what the chunk before it was late.
    assert 0.05 - _SLACK_S / 3 <= first < 0.05 + _SLACK_S
    assert 0.2 - _SLACK_S / 3 <= second < 0.2 + _SLACK_S
    assert 0.45 <= record.e2e_s < 0.45 + 2 * _SLACK_S
    # Nine tokens of nine letters, three of them in the first chunk.
    assert record.tpot_s == pytest.approx((record.e2e_s - record.ttft_s) / 6)


def test_frames_of_one_packet_are_one_arrival_each() -> None:
    """Chunks that come together have gaps of zero: they are counted, not merged."""
    text = "".join(chat_frames(["a", "b"], _USAGE))
    with sse_endpoint(lambda _: Answer([(0.0, text)])) as endpoint:
        (record,) = _measure(endpoint).records
    assert record.gaps_s == [0.0]


def test_usage_in_every_chunk_gives_tokens_per_chunk() -> None:
    frames = chat_frames(["abcd", "e", "fg"], is_counting=True)
    with sse_endpoint(lambda _: _paced(frames, [])) as endpoint:
        settings = RequestSettings(model="m", counts_chunks=True)
        (record,) = _measure(endpoint, settings=settings).records
    assert record.chunk_tokens == [4, 1, 2]
    assert record.first_chunk_tokens == 4
    assert endpoint.seen[0].body["stream_options"] == {
        "include_usage": True,
        "continuous_usage_stats": True,
    }


def test_snapshots_are_timed_apart_from_content() -> None:
    snapshot = frame({"event": "buffer_snapshot", "choices": [], "text": "draft"})
    frames = [snapshot, snapshot, *chat_frames(["abc"], _USAGE)]
    with sse_endpoint(lambda _: _paced(frames, [0.02, 0.05, 0.1])) as endpoint:
        (record,) = _measure(endpoint).records
    assert record.first_snapshot_s is not None
    assert record.ttft_s is not None
    assert 0.02 <= record.first_snapshot_s < record.ttft_s - 0.1
    assert len(record.chunk_times_s) == 1
    assert record.tpot_s is None


def test_the_native_route_counts_its_final_text_only_when_nothing_came_before() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    final = frame({"event": "final", "text": "ab", "finish_reason": "stop", "usage": usage})
    appends = [frame({"event": "append", "text": text}) for text in "ab"]
    answers = [[*appends, final], [final]]
    settings = RequestSettings(api="generate")
    with sse_endpoint(lambda _: _paced(answers.pop(0), [])) as endpoint:
        streamed, whole = _measure(
            endpoint, count=2, settings=settings, plan=LoadPlan(max_concurrency=1)
        ).records
    assert (streamed.text, len(streamed.chunk_times_s)) == ("ab", 2)
    assert (whole.text, len(whole.chunk_times_s)) == ("ab", 1)
    assert [seen.path for seen in endpoint.seen] == ["/generate"] * 2
    assert endpoint.seen[0].body == {
        "prompt": "question 0",
        "max_tokens": 16,
        "stream": True,
        "temperature": 0.0,
        "stream_mode": "block_append",
    }


def test_a_request_says_what_was_asked_for() -> None:
    settings = RequestSettings(
        api="completions",
        model="m",
        temperature=None,
        ignore_eos=True,
        extra_body={"seed": 5, "max_tokens": None, "max_completion_tokens": 16},
    )
    with sse_endpoint(lambda _: _paced(completion_frames(["a"], _USAGE), [])) as endpoint:
        assert _measure(endpoint, settings=settings).records[0].finish_reason == "length"
    (seen,) = endpoint.seen
    assert seen.path == "/v1/completions"
    assert seen.headers["authorization"] == "Bearer secret"
    assert seen.body == {
        "prompt": "question 0",
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "seed": 5,
        "max_completion_tokens": 16,
    }


@pytest.mark.alone
@in_time
def test_a_closed_loop_keeps_so_many_requests_in_flight() -> None:
    with sse_endpoint(lambda _: _paced(chat_frames(["a"], _USAGE), [0.05])) as endpoint:
        run = _measure(endpoint, count=12, plan=LoadPlan(max_concurrency=3))
    assert all(record.is_ok for record in run.records)
    assert run.peak_concurrency == endpoint.most_open == 3
    # Twelve answers of 0.05 s, three at a time.
    assert 0.2 <= run.duration_s < 0.2 + 3 * _SLACK_S


@pytest.mark.alone
@in_time
def test_an_open_loop_does_not_wait_for_answers() -> None:
    plan = LoadPlan(request_rate=20.0, burstiness=math.inf)
    with sse_endpoint(lambda _: _paced(chat_frames(["a"], _USAGE), [0.4])) as endpoint:
        run = _measure(endpoint, count=6, plan=plan)
    times = sorted(seen.time_s for seen in endpoint.seen)
    assert endpoint.most_open == 6
    assert times[-1] - times[0] == pytest.approx(0.25, abs=_SLACK_S)
    assert [record.scheduled_s for record in run.records] == pytest.approx(
        [0.0, 0.05, 0.1, 0.15, 0.2, 0.25]
    )
    assert all(record.sent_s >= record.scheduled_s for record in run.records)


def test_rejections_are_counted_and_retried_as_the_server_asks() -> None:
    full = Answer([(0, '{"error": {"message": "full"}}')], 429, {"Retry-After": "0"})
    answers = [full, full, _paced(chat_frames(["a"], _USAGE), [])]
    with sse_endpoint(lambda _: answers.pop(0)) as endpoint:
        (record,) = _measure(endpoint, settings=RequestSettings(model="m", max_retries=2)).records
    assert record.is_ok
    assert (record.num_rejected, record.num_retries) == (2, 2)
    assert record.status == 200


def test_without_retries_a_rejection_is_a_failure() -> None:
    full = Answer([(0, '{"error": {"message": "full"}}')], 429, {"Retry-After": "9"})
    with sse_endpoint(lambda _: full) as endpoint:
        (record,) = _measure(endpoint).records
    assert (record.error_kind, record.error) == ("http_429", "HTTP 429: full")
    assert (record.num_rejected, record.num_retries) == (1, 0)
    assert record.e2e_s < 1.0


@pytest.mark.alone
@in_time
def test_the_pause_before_a_retry_is_the_servers() -> None:
    full = Answer([(0, "{}")], 503, {"Retry-After": "1"})
    answers = [full, _paced(chat_frames(["a"], _USAGE), [])]
    with sse_endpoint(lambda _: answers.pop(0)) as endpoint:
        (record,) = _measure(endpoint, settings=RequestSettings(model="m", max_retries=1)).records
    assert record.is_ok
    assert 1.0 <= record.e2e_s < 1.0 + 2 * _SLACK_S


def _bad(name: str) -> Answer:
    frames = chat_frames(["a"], _USAGE)
    answers = {
        "http_400": Answer([(0, '{"error": {"message": "no such field"}}')], 400),
        "http_500": Answer([(0, "oops")], 500),
        "timeout": _paced(frames, [0.0, 2.0]),
        "truncated": Answer([(0, frames[0])], is_cut=True),
        "stream_error": Answer([(0, frames[0]), (0, frame({"error": {"message": "broken"}}))]),
        "protocol": Answer([(0, "data: {\n\n")]),
    }
    return answers[name]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("http_400", "HTTP 400: no such field"),
        ("http_500", "HTTP 500: oops"),
        ("timeout", "expected an answer within 0.3 s"),
        ("truncated", "expected the rest of it"),
        ("stream_error", "the server reports: broken"),
        ("protocol", "expected JSON"),
    ],
)
def test_failures_are_told_apart(kind: str, message: str) -> None:
    settings = RequestSettings(model="m", timeout_s=0.3)
    with sse_endpoint(lambda _: _bad(kind)) as endpoint:
        (record,) = _measure(endpoint, settings=settings).records
    assert record.error_kind == kind
    assert message in str(record.error)


def test_a_stream_without_its_terminator_is_truncated() -> None:
    frames = chat_frames(["a"], _USAGE)[:1]
    with sse_endpoint(lambda _: _paced(frames, [])) as endpoint:
        (record,) = _measure(endpoint).records
    assert record.error_kind == "truncated"
    assert "[DONE]" in str(record.error)


def test_a_failed_request_does_not_stop_the_others() -> None:
    def answer(seen: Seen) -> Answer:
        if seen.body["messages"][0]["content"] == "question 1":
            return _bad("truncated")
        return _paced(chat_frames(["a"], _USAGE), [])

    async def measure(endpoint: FakeEndpoint) -> LoadRun:
        client = HttpClient(Endpoint.parse(endpoint.url))
        messages = [[{"role": "user", "content": f"question {index}"}] for index in range(3)]
        requests = [BenchRequest(None, content, 16) for content in messages]
        return await run_load(Sender(client, RequestSettings(model="m")), requests, LoadPlan())

    with sse_endpoint(answer) as endpoint:
        run = asyncio.run(measure(endpoint))
    assert [record.is_ok for record in run.records] == [True, False, True]


def test_a_tokenizer_counts_where_the_server_does_not() -> None:
    async def measure(endpoint: FakeEndpoint) -> RequestRecord:
        client = HttpClient(Endpoint.parse(endpoint.url))
        sender = Sender(client, RequestSettings(model="m"), lambda text: len(text.split()))
        record = RequestRecord(0)
        await sender.send(BenchRequest("question", None, 16), record)
        return record

    with sse_endpoint(lambda _: _paced(chat_frames(["two ", "words"]), [])) as endpoint:
        record = asyncio.run(measure(endpoint))
    assert record.completion_tokens == 2
    assert record.prompt_tokens is None


def test_a_failing_warm_up_ends_the_run() -> None:
    async def start(endpoint: FakeEndpoint) -> None:
        client = HttpClient(Endpoint.parse(endpoint.url))
        sender = Sender(client, RequestSettings(model="m"))
        await warm_up(sender, [BenchRequest("question", None, 16)] * 2, 1)

    with (
        sse_endpoint(lambda _: _bad("http_400")) as endpoint,
        pytest.raises(EndpointError, match="warm-up: HTTP 400: no such field"),
    ):
        asyncio.run(start(endpoint))


def test_the_clock_is_monotonic() -> None:
    """Times of records never come from the wall clock, which may be set."""
    with sse_endpoint(lambda _: _paced(chat_frames(["a"], _USAGE), [])) as endpoint:
        before = time.perf_counter()
        run = _measure(endpoint)
        assert run.duration_s <= time.perf_counter() - before
