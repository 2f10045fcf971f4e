# SPDX-License-Identifier: Apache-2.0
"""Connections that are not as they should be: too much, too slow, half closed, of another age."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
import struct
import time

import httpx
import pytest

from app_server import AppServer
from diffulex.server.http.api_server import create_app
from diffulex.server.http.http_protocol import ConnectionLimits
from fake_frontend import FakeFrontend
from test_app_socket import serving, until

CHAT = "/v1/chat/completions"


def head(path="/health", *headers, method="GET", version="1.1"):
    lines = [f"{method} {path} HTTP/{version}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chat(*headers, version="1.1", **fields):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    lines = ["Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return head(CHAT, *lines, method="POST", version=version) + body


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 20)


def read_all(client):
    """Everything until the server closes."""
    received = b""
    while data := client.recv(65536):
        received += data
    return received


def read_response(client):
    """The status and the body of a response with a length; what comes behind it stays to be read."""
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        data = client.recv(1)
        if not data:
            raise EOFError(f"expected a response, got {received!r}")
        received += data
    start = received.removesuffix(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in start.split(b"\r\n")[1:])
    body, length = b"", int(fields[b"content-length"])
    while len(body) < length:
        data = client.recv(length - len(body))
        assert data, f"expected {length} bytes, got {body!r}"
        body += data
    return int(start.split()[1]), body


@pytest.fixture
def frontend():
    return FakeFrontend()


@pytest.fixture
def url(frontend):
    limits = ConnectionLimits(max_head_bytes=2000, read_timeout_s=60, max_connections=0)
    with AppServer(create_app(frontend), limits) as server:
        yield server.url


HOST = "Host: x"


@pytest.mark.parametrize(
    "request_head",
    [
        head("/health", HOST, "A: " + "x" * 3000),
        head("/health", HOST, *[f"A{i}: x" for i in range(400)]),
        head("/health?" + "x" * 3000, HOST),
        # Never complete: a value, a name, a request line.
        b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"a" * 100_000,
        b"GET /" + b"x" * 100_000,
    ],
)
def test_a_large_head_is_refused(url, request_head):
    with connect(url) as client:
        with contextlib.suppress(OSError):  # refused already
            for start in range(0, len(request_head), 1000):
                client.sendall(request_head[start : start + 1000])
                time.sleep(0.0005)
        try:
            status, body = read_response(client)
        except (ConnectionResetError, EOFError):
            # More was sent than the server read: the kernel may drop its answer. It says so once, to
            # whatever is sent or else to the reader.
            assert len(request_head) > 50_000
        else:
            assert status == 431
            assert json.loads(body)["error"]["code"] == "request_head_too_large"
    assert httpx.get(url + "/health").status_code == 200


def test_a_head_below_the_limit_is_accepted(url):
    with connect(url) as client:
        for _ in range(3):  # counted anew for each request
            client.sendall(head("/health", HOST, "A: " + "x" * 1800))
            assert read_response(client)[0] == 200


def test_a_head_behind_a_large_body_is_counted_alone(url, frontend):
    with connect(url) as client:
        client.sendall(chat(unknown="x" * 5000) + head("/health", HOST, "A: " + "x" * 1800))
        status, _ = read_response(client)
        assert status == 200
        status, body = read_response(client)
        assert (status, json.loads(body)) == (200, {"status": "ready"})


@pytest.mark.parametrize("hosts", [[], ["Host: x", "Host: y"]])
def test_http_1_1_names_its_host(url, hosts):
    with connect(url) as client:
        client.sendall(head("/health", *hosts) + head("/health", HOST))
        status, body = read_response(client)
        assert status == 400
        assert json.loads(body)["detail"] == f"Host: expected it once, got it {len(hosts)} times"
        assert client.recv(1) == b""


def test_http_1_0_needs_no_host(url):
    with connect(url) as client:
        client.sendall(head("/health", version="1.0"))
        assert b'{"status":"ready"}' in read_all(client)


def test_http_1_0_streams_have_no_chunks(url):
    with connect(url) as client:
        client.sendall(chat(version="1.0", stream=True))
        start, _, body = read_all(client).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in start.lower()
    frames = body.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: ") for frame in frames[:-1])


@pytest.mark.parametrize("sent", [b"", b"GET /hea", head("/health", HOST)[:-2]])
def test_a_head_must_come_in_time(frontend, sent):
    with AppServer(create_app(frontend), ConnectionLimits(read_timeout_s=0.4)) as server:
        with connect(server.url) as client:
            client.sendall(sent)
            received = read_all(client)
        assert received.startswith(b"HTTP/1.1 408 " if sent else b"")
        assert (b"408" in received) == bool(sent)
        # Drop by drop is no way out.
        with connect(server.url) as client, contextlib.suppress(OSError):
            for byte in head("/health", HOST, "A: " + "x" * 3000):
                client.sendall(bytes([byte]))
                time.sleep(0.01)
            pytest.fail("expected the connection to be closed")


def test_a_body_must_go_on(frontend):
    limits = ConnectionLimits(read_timeout_s=0.4)
    with AppServer(create_app(frontend), limits) as server:
        with connect(server.url) as client:
            client.sendall(chat()[:-5])
            assert read_all(client) == b""
        text = httpx.get(server.url + "/metrics").text
        assert 'diffulex_requests_inflight_http{model_name="fake"} 0.0' in text
    assert not frontend.commands


def test_an_answer_may_take_longer_than_a_request(frontend):
    frontend.delay_s = 0.5
    limits = ConnectionLimits(read_timeout_s=0.4)
    with AppServer(create_app(frontend), limits) as server, connect(server.url) as client:
        client.sendall(chat())
        assert read_response(client)[0] == 200


def test_those_who_send_nothing_lock_nobody_out(frontend):
    with AppServer(create_app(frontend), ConnectionLimits(max_connections=5)) as server:
        silent = [connect(server.url) for _ in range(30)]
        try:
            for _ in range(3):
                assert httpx.get(server.url + "/health").status_code == 200
            # The first ones are closed, the last ones are still there.
            assert silent[0].recv(1) == b""
            silent[-1].sendall(head("/health", HOST))
            assert read_response(silent[-1])[0] == 200
        finally:
            for client in silent:
                client.close()


def test_connections_are_limited_by_open_files():
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < ConnectionLimits.of(1, 1, 0).max_connections < most
    assert ConnectionLimits.of(1, 1, 7).max_connections == 7


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_leaving_with_requests_in_line_is_no_error(caplog, stream, is_reset):
    caplog.set_level(logging.INFO)
    with serving(is_endless=True) as (url, backend, frontend):
        with connect(url) as client:
            client.sendall(chat(stream=stream) * 4)
            until(lambda: backend.commands)
            if is_reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: backend.aborts)
        until(lambda: not frontend.rid_to_state)
        gauge = 'diffulex_requests_inflight_http{model_name="fake"} 0.0'
        until(lambda: gauge in httpx.get(url + "/metrics").text)
        text = httpx.get(url + "/metrics").text
    assert f'requests_total{{model_name="fake",route="{CHAT}",status="499"}} 1.0' in text
    assert 'status="500"' not in text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    lines = [
        record.getMessage() for record in caplog.records if "status=499" in record.getMessage()
    ]
    assert len(lines) == 1


def test_half_closing_is_not_leaving(frontend):
    frontend.delay_s = 0.2
    with AppServer(create_app(frontend)) as server, connect(server.url) as client:
        client.sendall(chat())
        client.shutdown(socket.SHUT_WR)
        received = read_all(client)
    interim, _, rest = received.rpartition(b"HTTP/1.1 200 OK")
    assert set(interim.split(b"\r\n\r\n")) <= {b"HTTP/1.1 100 Continue", b""}
    assert b'"finish_reason":"length"' in rest
    assert frontend.num_aborted == 0
