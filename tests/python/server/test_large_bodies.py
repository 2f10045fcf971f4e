# SPDX-License-Identifier: Apache-2.0
"""Bodies that are large: measured before they are converted, and away from the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from app_server import AppServer
from byte_tokenizer import VOCAB_SIZE, ByteTokenizer
from diffulex.server.http import large_bodies
from diffulex.server.http.api_server import create_app
from diffulex.server.http.body_parser import find_excess, parse_body
from diffulex.server.http.large_bodies import SMALL_BYTES
from diffulex.serving.frontend_state import FrontendLimits
from fake_frontend import FakeFrontend
from fixtures.processes import until
from http_client import AppClient, check_error

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
INVALID = (400, "invalid_request_error", "invalid_request")
TOO_LONG = (400, "invalid_request_error", "context_length_exceeded")
INFO = {
    "max_model_len": 1000, "vocab_size": VOCAB_SIZE, "block_size": 8, "buffer_size": 4,
    "page_size": 8, "num_pages": 1000, "max_num_batched_tokens": 4096, "max_num_reqs": 2,
}  # fmt: skip


class CountingTokenizer(ByteTokenizer):
    """Remembers what it encoded; waits in a text that says so until it is told to go on."""

    max_token_chars = 40

    def __init__(self):
        self.sizes = []
        self.started, self.may_go_on = threading.Event(), threading.Event()

    def encode(self, text, add_special_tokens=True):
        self.sizes.append(len(text))
        if text.startswith("wait"):
            self.started.set()
            assert self.may_go_on.wait(30)
        return super().encode(text, add_special_tokens)


@pytest.fixture
def frontend():
    frontend = FakeFrontend()
    frontend.info, frontend.tokenizer = INFO, CountingTokenizer()
    return frontend


@pytest.fixture
def client(frontend):
    return AppClient(create_app(frontend))


def post_bytes(client, path, body):
    headers = {"Content-Type": "application/json"}
    return client.request("POST", path, content=body, headers=headers)


LIMITS = {
    "prompt": {"chars": 10, "items": 3, "ids": 5, "total": 8},
    "stop": {"items": 2},
}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "x" * 10, "other": "x" * 1000}, None),
        ({"prompt": "x" * 11}, ("prompt", "chars", 10, 11)),
        ({"prompt": [1] * 5}, None),
        ({"prompt": [1] * 6}, ("prompt", "ids", 5, 6)),
        ({"prompt": [[1]] * 4}, ("prompt", "items", 3, 4)),
        ({"prompt": [[1] * 6]}, ("prompt", "ids", 5, 6)),
        ({"prompt": ["x", "x" * 11]}, ("prompt", "chars", 10, 11)),
        ({"stop": ["a"] * 3}, ("stop", "items", 2, 3)),
        ({"messages": [{"content": [{}] * 70000}]}, ("messages", "values", 65536, 70003)),
        ({"extra": {"a": {"b": [0] * 70000}}}, ("extra", "values", 65536, 70003)),
        # All fields together, and all ids together, have one limit each.
        ({"a": [[]] * 40000, "b": [0] * 30000}, ("b", "values", 65536, 70002)),
        ({str(index): 0 for index in range(70000)}, ("65536", "values", 65536, 65537)),
        ({"prompt": [[1] * 5, [1] * 3]}, None),
        ({"prompt": [[1] * 5, [1] * 4]}, ("prompt", "total", 8, 9)),
        ({"prompt": [[1] * 5], "stop": [[1] * 70000]}, ("stop", "values", 65536, 70004)),
        ({"prompt": [1, *[[]] * 4]}, None),
    ],
)
def test_the_first_field_that_is_too_long_is_named(body, expected):
    assert find_excess(body, LIMITS) == expected
    kind = "document" if expected is None else "size"
    assert parse_body(json.dumps(body).encode(), LIMITS)[0] == kind


@pytest.mark.parametrize("body", [b"[1, 2]", b"[" + b"[]," * 100_000 + b"1]", b'"x"', b"null"])
def test_a_large_body_that_is_no_object_is_not_taken_over(client, body):
    assert parse_body(body, LIMITS)[0] == "other"
    response = post_bytes(client, NATIVE, body + b" " * SMALL_BYTES)
    assert check_error(response, *INVALID).startswith("body: expected a JSON object, got ")


def test_what_is_no_json_is_told_as_for_small_bodies(client):
    blank = b" " * SMALL_BYTES
    for body in (b'{"prompt": ', b'{"prompt": "x",}', b"[" * 100_000, b"\xff\xfe\x00\x01"):
        small = post_bytes(client, NATIVE, body if len(body) < SMALL_BYTES else body[:9])
        large = post_bytes(client, NATIVE, blank + body)
        assert small.status_code == large.status_code == 400
        assert large.json()["detail"].startswith("body: expected JSON, got ")


@pytest.mark.parametrize(
    ("path", "body", "kind", "message"),
    [
        (TEXT, {"prompt": [[5]] * 300_000}, INVALID, "prompt: expected at most 256 prompts, got 300000"),
        (TEXT, {"prompt": [5] * 300_000}, TOO_LONG, "prompt: expected at most 1000 token ids, got 300000"),
        (NATIVE, {"prompt": "x" * 300_000}, TOO_LONG, "prompt: expected at most 40000 characters, got 300000"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 30_000}, INVALID,
         "messages: expected at most 4096 entries, got 30000"),
        (TEXT, {"prompt": "x", "stop": ["a"] * 300_000}, INVALID, "stop: expected at most 16 entries, got 300000"),
        ("/tokenize", {"prompt": "x" * 300_000}, TOO_LONG, "prompt: expected at most 40000 characters, got 300000"),
        ("/detokenize", {"tokens": [5] * 300_000}, TOO_LONG, "tokens: expected at most 65536 token ids, got 300000"),
    ],
)  # fmt: skip
def test_fields_are_measured_before_they_are_converted(client, frontend, path, body, kind, message):
    response = client.post(path, body)
    text = check_error(response, *kind, param=message.split(":")[0])
    assert text.startswith(message)
    assert not frontend.commands
    assert not frontend.tokenizer.sizes


def test_large_bodies_are_answered_as_small_ones(client, frontend):
    """Blank space makes a body large, and does not change what it says."""
    body = {"prompt": ["Hello", [72, 105]], "max_tokens": 3, "seed": 1, "user": "é\ud800"}
    small = json.dumps(body).encode()
    answers = [post_bytes(client, TEXT, text) for text in (small, small + b" " * SMALL_BYTES)]
    for answer in answers:
        assert answer.status_code == 200, answer.text
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    one, other = frontend.commands[:2], frontend.commands[2:]
    for name in ("input", "sampling_params", "user"):
        assert [getattr(item, name) for item in one] == [getattr(item, name) for item in other]
    wrong = json.dumps({**body, "temperature": "hot"}).encode()
    errors = [post_bytes(client, TEXT, text).json() for text in (wrong, wrong + b" " * SMALL_BYTES)]
    assert errors[0] == errors[1]


def test_a_body_without_a_length_is_read_once(client):
    async def pieces():
        yield b'{"prompt": '
        yield b'"x"}'

    headers = {"Content-Type": "application/json"}
    assert client.request("POST", NATIVE, content=pieces(), headers=headers).status_code == 200


def test_what_takes_too_much_memory_is_refused(client, monkeypatch):
    monkeypatch.setattr(large_bodies, "_MAX_HELD", 0)
    response = client.post(NATIVE, {"prompt": "x" * SMALL_BYTES})
    check_error(response, 429, "rate_limit_error", "queue_full")
    assert response.headers["retry-after"]


def test_every_route_with_a_body_measures_it(client):
    """Whatever the route: a body with too many values is refused for that."""
    body = {"unknown": [0] * 70_000}
    document = client.get("/openapi.json").json()
    paths = [
        path for path, item in document["paths"].items() if "requestBody" in item.get("post", {})
    ]
    assert {"/abort", "/start_profile", "/tokenize", NATIVE, TEXT, CHAT} <= set(paths)
    for path in paths:
        message = check_error(client.post(path, body), *INVALID, param="unknown")
        assert message.startswith("unknown: expected at most 65536 ")


def test_the_largest_body_depends_on_the_model():
    for length, expected in ((512, 4 << 20), (32768, 8 << 20), (1 << 20, 32 << 20)):
        frontend = FakeFrontend()
        frontend.info = {"max_model_len": length}
        app = create_app(frontend)
        assert app.state.context.max_body_bytes == expected
        # A batch of prompts, or a single one whatever its length.
        total = app.state.context.body_limits["prompt"]["total"]
        assert length <= total <= 1 << 20
    assert create_app(frontend, max_body_bytes=7).state.context.max_body_bytes == 7


# Encoding.


def test_text_whose_length_cannot_fit_is_not_encoded(client, frontend):
    for path, body in ((TEXT, {"prompt": "x" * 40_001}), ("/tokenize", {"prompt": "x" * 40_001})):
        message = check_error(client.post(path, body), *TOO_LONG, param="prompt")
        # By these words frameworks recognise the error.
        assert "This model's maximum context length is 1000 tokens" in message
        assert "context_length_exceeded" in message
        assert "got at least 1001" in message
    assert not frontend.tokenizer.sizes
    assert client.post(TEXT, {"prompt": "x" * 999}).status_code == 200


def test_a_long_text_is_counted_until_it_is_too_long(client, frontend):
    text = "x" * 39_000
    message = check_error(client.post(TEXT, {"prompt": text}), *TOO_LONG, param="prompt")
    assert "got at least 16368" in message
    # One piece was enough.
    assert frontend.tokenizer.sizes == [16384]
    # Whoever only wants the tokens gets them.
    assert client.post("/tokenize", {"prompt": text}).json()["count"] == 39_000


def test_a_text_of_many_tokens_is_not_listed(client, frontend):
    """In pieces if it is long, so that it ends with its request, and before all is encoded."""
    frontend.info = {**INFO, "max_model_len": 20_000}
    text = "x" * 600_000
    message = check_error(client.post("/tokenize", {"prompt": text}), *TOO_LONG, param="prompt")
    assert message.startswith("prompt: expected at most 65536 tokens, got at least ")
    assert set(frontend.tokenizer.sizes) == {16384}
    assert len(frontend.tokenizer.sizes) == 5
    message = check_error(
        client.post("/tokenize", {"prompt": text[:65_537]}), *TOO_LONG, param="prompt"
    )
    assert message == "prompt: expected at most 65536 tokens, got at least 65537"
    assert client.post("/tokenize", {"prompt": text[:65_536]}).json()["count"] == 65_536


def test_conversations_are_measured_as_they_are_rendered(client, frontend):
    frontend.tokenizer.has_chat_template = True
    frontend.tokenizer.render_chat = lambda messages, **_: messages[-1]["content"]
    messages = [{"role": "user", "content": text} for text in ("x" * 50_000, "hi")]
    assert client.post(CHAT, {"messages": messages, "max_tokens": 4}).status_code == 200
    assert frontend.tokenizer.sizes == [2]
    error = client.post(CHAT, {"messages": messages[::-1], "max_tokens": 4})
    check_error(error, *TOO_LONG, param="prompt")
    assert frontend.tokenizer.sizes == [2]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_large_variables_of_a_template_are_rendered_beside_short_texts(client, frontend, path):
    threads = []

    def render(messages, **_):
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return "x"

    frontend.tokenizer.has_chat_template, frontend.tokenizer.render_chat = True, render
    body = {"messages": [{"role": "user", "content": "x"}]}
    for texts in (["x"], ["x" * 5000], [{"y" * 5000: 1}]):
        variables = {"documents": texts}
        response = client.post(path, {**body, "chat_template_kwargs": variables})
        assert response.status_code == 200, response.text
    assert threads == ["diffulex-tokenizer", "diffulex-long-texts", "diffulex-long-texts"]


def run(scenario, app):
    async def main():
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            await asyncio.wait_for(scenario(client), 60)

    asyncio.run(main())


LONG = "wait" + "x" * 17_000


async def begun(tokenizer):
    await asyncio.to_thread(tokenizer.started.wait, 30)


def encoding(text):
    (line,) = [line for line in text.splitlines() if line.startswith("diffulex_requests_encoding{")]
    return float(line.split()[-1])


def test_a_long_text_does_not_hold_up_a_short_one(frontend):
    frontend.info = {**INFO, "max_model_len": 20_000}
    tokenizer = frontend.tokenizer

    async def scenario(client):
        long = asyncio.ensure_future(client.post("/tokenize", json={"prompt": LONG}))
        await begun(tokenizer)
        assert (await client.post(NATIVE, json={"prompt": "x"})).status_code == 200
        assert encoding((await client.get("/metrics")).text) == 1
        tokenizer.may_go_on.set()
        assert (await long).json()["count"] == len(LONG)
        assert encoding((await client.get("/metrics")).text) == 0

    run(scenario, create_app(frontend))


def test_encoding_ends_with_the_time_of_the_request(frontend):
    frontend.info = {**INFO, "max_model_len": 20_000}
    tokenizer = frontend.tokenizer

    async def scenario(client):
        first = asyncio.ensure_future(client.post("/tokenize", json={"prompt": LONG}))
        await begun(tokenizer)
        # Behind the first one; it would wait as long.
        for path in ("/tokenize", TEXT):
            headers = {"X-Request-Timeout": "0.2"}
            start = time.monotonic()
            response = await client.post(path, json={"prompt": LONG}, headers=headers)
            check_error(response, 504, "timeout", "request_timeout")
            assert time.monotonic() - start < 20
        assert encoding((await client.get("/metrics")).text) == 1
        tokenizer.may_go_on.set()
        assert (await first).status_code == 200

    run(scenario, create_app(frontend))
    assert len([size for size in tokenizer.sizes if size > 10]) == 1


def test_encoding_counts_against_the_queue(frontend):
    frontend.info = {**INFO, "max_model_len": 20_000, "max_num_reqs": 1}
    frontend.limits, frontend.num_inflight = FrontendLimits(max_queue_size=1), 0
    tokenizer = frontend.tokenizer

    async def scenario(client):
        waiting = [
            asyncio.ensure_future(client.post("/tokenize", json={"prompt": LONG})) for _ in range(2)
        ]
        await begun(tokenizer)
        for path in (NATIVE, TEXT, "/tokenize"):
            response = await client.post(path, json={"prompt": "x"})
            check_error(response, 429, "rate_limit_error", "queue_full")
        tokenizer.may_go_on.set()
        assert [(await answer).status_code for answer in waiting] == [200, 200]

    run(scenario, create_app(frontend))


def test_a_client_that_leaves_is_not_encoded():
    frontend = FakeFrontend()
    frontend.info = {"max_model_len": 20_000, "vocab_size": VOCAB_SIZE}
    tokenizer = frontend.tokenizer = CountingTokenizer()
    body = {"prompt": "wait" + "x" * 17_000}
    with AppServer(create_app(frontend)) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, server.url + "/tokenize", json=body, timeout=30)
        assert tokenizer.started.wait(30)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 30) as client:
            content = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
            until(lambda: encoding(httpx.get(server.url + "/metrics").text) == 2)
        until(lambda: encoding(httpx.get(server.url + "/metrics").text) == 1)
        tokenizer.may_go_on.set()
        assert first.result().status_code == 200
        text = httpx.get(server.url + "/metrics").text
    assert 'requests_total{model_name="fake",route="/v1/completions",status="499"} 1.0' in text
    assert len(tokenizer.sizes) == 1
    assert not frontend.commands


# Reading.


async def stalled(size, sent):
    """A body that begins and does not go on."""
    yield b'{"prompt": "' + b"x" * size
    sent.set()
    await asyncio.Event().wait()


def test_bodies_that_do_not_go_on_keep_nobody_out(frontend):
    frontend.info = {**INFO, "max_num_reqs": 1}
    frontend.limits, frontend.num_inflight = FrontendLimits(max_queue_size=1), 0

    async def scenario(client):
        waiting = []
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(8):
            sent = asyncio.Event()
            content = stalled(SMALL_BYTES, sent)
            headers = {"Content-Type": "application/json"}
            post = client.post(NATIVE, content=content, headers=headers)
            waiting.append(asyncio.ensure_future(post))
            await sent.wait()
        assert len(os.listdir("/proc/self/fd")) == before
        for size in (1, SMALL_BYTES):
            body = {"prompt": "x", "user": "x", "extra": "x" * size}
            assert (await client.post(NATIVE, json=body)).status_code == 200
        assert encoding((await client.get("/metrics")).text) == 0
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)

    run(scenario, create_app(frontend))


@pytest.mark.parametrize("size", [1, 2 * SMALL_BYTES])
def test_a_body_has_a_time_to_be_complete(frontend, monkeypatch, size):
    monkeypatch.setattr(large_bodies, "_READ_RATE", 1 << 40)
    headers = {"Content-Type": "application/json"}

    async def scenario(client):
        limited = {**headers, "X-Request-Timeout": "0.2"}
        content = stalled(size, asyncio.Event())
        response = await client.post(NATIVE, content=content, headers=limited)
        check_error(response, 504, "timeout", "request_timeout")
        monkeypatch.setattr(large_bodies, "_READ_START_S", 0.2)
        content = stalled(size, asyncio.Event())
        response = await client.post(NATIVE, content=content, headers=headers)
        message = check_error(response, 408, "timeout", "request_timeout")
        assert message == "body: expected it within 0.2 s, got a part of it"

    run(scenario, create_app(frontend))


def test_parsing_ends_with_the_time_of_the_request(client, monkeypatch):
    async def parse(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(large_bodies, "_run_parser", parse)
    headers = {"X-Request-Timeout": "0.2"}
    response = client.post(NATIVE, {"prompt": "x" * SMALL_BYTES}, headers=headers)
    check_error(response, 504, "timeout", "request_timeout")


def test_a_full_queue_parses_nothing(frontend, monkeypatch):
    frontend.limits, frontend.num_inflight = FrontendLimits(max_queue_size=1), 3
    # A call of it would fail.
    monkeypatch.setattr(large_bodies, "_run_parser", None)
    client = AppClient(create_app(frontend))
    body = json.dumps({"prompt": "x" * SMALL_BYTES}).encode()

    async def pieces():
        yield body

    for content in (body, pieces()):
        response = post_bytes(client, NATIVE, content)
        check_error(response, 429, "rate_limit_error", "queue_full")
