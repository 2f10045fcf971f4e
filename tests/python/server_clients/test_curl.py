# SPDX-License-Identifier: Apache-2.0
"""`curl -N`: the bytes of a stream and when they come."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from typing import Any

import pytest

from fixtures.expected_answers import MAX_TOKENS, Expected
from fixtures.live_server import LiveServer
from fixtures.processes import until

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def _command(server: LiveServer, path: str, body: dict[str, Any], *flags: str) -> list[str]:
    header = "Content-Type: application/json"
    url = f"{server.url}{path}"
    return ["curl", "-sS", "-N", *flags, url, "-H", header, "-d", json.dumps(body)]


def _chat(item: Expected, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": item.question}]
    return {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, **fields}


def _metric(server: LiveServer, name: str) -> float:
    """Sum over the labels; 0 before the first sample."""
    command = ["curl", "-sS", f"{server.url}/metrics"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"# TYPE diffulex_{name.removesuffix('_total')}" in text
    pattern = rf"^diffulex_{name}(?:\{{[^}}]*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))


def test_frames_have_the_exact_form(server: LiveServer, expected: list[Expected]) -> None:
    command = _command(server, "/v1/chat/completions", _chat(expected[0], stream=True), "-i")
    result = subprocess.run(command, capture_output=True, timeout=60, check=True)
    head, _, body = result.stdout.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert head.startswith(b"HTTP/1.1 200")
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"x-request-id"]
    assert b"content-encoding" not in headers
    assert b"\r" not in body
    *frames, end = body.split(b"\n\n")
    assert end == b""
    assert frames[-1] == b"data: [DONE]"
    texts = []
    for frame in frames[:-1]:
        if frame.startswith(b":"):
            continue
        assert frame.startswith(b"data: {"), frame
        choices = json.loads(frame[6:])["choices"]
        texts += [choice["delta"].get("content", "") for choice in choices]
    assert "".join(texts) == expected[0].text


def test_the_first_block_arrives_while_the_rest_is_decoded(
    server: LiveServer, expected: list[Expected]
) -> None:
    """Not all at the end: the first text is there before the last block is, by far."""
    longest = max(expected, key=lambda item: item.num_tokens)
    command = _command(server, "/v1/chat/completions", _chat(longest, stream=True))

    def arrivals() -> list[float]:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            return [time.perf_counter() - start for line in process.stdout if '"content"' in line]

    # The answer takes a quarter of a second: on a busy host curl or this process may begin as late.
    for _ in range(20):
        times = arrivals()
        assert len(times) > 4
        if times[0] < times[-1] / 2:
            return
    pytest.fail(f"expected the first text long before the last, got {times}")


@pytest.mark.parametrize("is_stream", [True, False])
def test_leaving_ends_the_request(
    server: LiveServer, expected: list[Expected], is_stream: bool
) -> None:
    """A reader that goes away in the middle of a stream, and one that goes away while waiting."""
    aborted = _metric(server, "request_aborted_total")
    # Eight answers that are drawn, not copied: seconds of work, were it not ended.
    fields = {"n": 8, "temperature": 1, "ignore_eos": True, "max_tokens": 400}
    body = _chat(expected[0], stream=is_stream, **fields)
    with subprocess.Popen(
        _command(server, "/v1/chat/completions", body), stdout=subprocess.PIPE
    ) as process:
        if is_stream:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"data: ")
        else:
            until(lambda: _metric(server, "requests_tracked"))
        process.kill()
    until(lambda: not _metric(server, "requests_inflight_http"))
    assert aborted < _metric(server, "request_aborted_total") <= aborted + 8


@pytest.mark.parametrize(
    ("data", "flags", "status"),
    [
        ("{", (), 400),
        ("[]", (), 400),
        ("{}", (), 400),
        ('{"messages": [], "stream": true}', (), 400),
        ("a=b", ("-H", "Content-Type: text/plain"), 415),
        ("x" * 40_000_000, (), 413),
    ],
)
def test_bad_bodies_get_an_error_object(
    server: LiveServer, data: str, flags: tuple[str, ...], status: int
) -> None:
    header = () if flags else ("-H", "Content-Type: application/json")
    command = ["curl", "-sS", f"{server.url}/v1/chat/completions", "--data-binary", "@-"]
    result = subprocess.run(
        [*command, *header, *flags, "-w", "\n%{http_code}"],
        input=data,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    body, _, code = result.stdout.rpartition("\n")
    assert int(code) == status
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
