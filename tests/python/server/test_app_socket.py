# SPDX-License-Identifier: Apache-2.0
"""Clients on a real socket: those that leave, those that read slowly, those that send too much."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from app_server import AppServer
from diffulex.server.http.api_server import create_app
from diffulex.serving.frontend import FrontendManager
from diffulex.wire.protocol import (
    ServingAbort,
    ServingBufferSnapshot,
    ServingDelta,
    ServingGenerate,
    ServingReply,
)
from fake_frontend import FakeFrontend

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


class ScriptedBackend:
    """Both queues of a frontend: answers every command with an endless or a short stream."""

    def __init__(self, *, is_endless: bool) -> None:
        self.is_endless = is_endless
        self.commands: list[ServingGenerate] = []
        self.aborts: list[str] = []
        self._events: asyncio.Queue = asyncio.Queue()
        self._tasks: set[asyncio.Task] = set()

    async def put(self, command) -> None:
        if isinstance(command, ServingAbort):
            self.aborts.append(command.rid)
        elif isinstance(command, ServingGenerate):
            self.commands.append(command)
            task = asyncio.ensure_future(self._answer(command))
            self._tasks.add(task)

    async def _answer(self, command) -> None:
        num = 10**6 if self.is_endless else 20
        for index in range(num):
            if command.rid in self.aborts:
                return
            if command.stream and command.stream_mode == "block_append":
                self._events.put_nowait(ServingDelta(command.rid, index, "a", [1], index + 1))
            elif command.stream:
                ids = [1] * (index % 7 + 1)
                snapshot = ServingBufferSnapshot(command.rid, 0, 1, 1 + len(ids), "a", ids, index)
                self._events.put_nowait(snapshot)
            await asyncio.sleep(0.002)
        self._events.put_nowait(ServingReply(command.rid, "a" * num, [1] * num, num, "stop"))

    async def get(self):
        return await self._events.get()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


@contextlib.contextmanager
def serving(*, is_endless: bool) -> Iterator[tuple[str, ScriptedBackend, FrontendManager]]:
    backend = ScriptedBackend(is_endless=is_endless)
    frontend = FrontendManager(model_id="fake", send_backend=backend, recv_backend=backend)
    with AppServer(create_app(frontend)) as server:
        yield server.url, backend, frontend


#: Generous: the host may be busy. Nothing is measured.
PATIENCE_S = 120.0


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "expected it in time"
        time.sleep(0.005)


@pytest.mark.parametrize("mode", ["block_append", "denoise"])
@pytest.mark.parametrize("path", [CHAT, "/generate"])
def test_leaving_a_stream_is_one_abort(path, mode):
    body = {"messages": USER} if path == CHAT else {"prompt": "x"}
    with serving(is_endless=True) as (url, backend, frontend):
        request = {**body, "stream": True, "stream_mode": mode}
        with httpx.stream("POST", url + path, json=request, timeout=PATIENCE_S) as response:
            next(response.iter_raw())
        until(lambda: not frontend.rid_to_state)
        until(lambda: backend.aborts)
        time.sleep(0.05)
        assert backend.aborts == [backend.commands[0].rid]
        ended = f'requests_total{{model_name="fake",route="{path}",status="499"}} 1.0'
        until(lambda: ended in httpx.get(url + "/metrics", timeout=PATIENCE_S).text)
        text = httpx.get(url + "/metrics", timeout=PATIENCE_S).text
        assert 'request_aborted_total{model_name="fake",reason="disconnect"} 1.0' in text
        assert 'diffulex_requests_live{model_name="fake"} 0.0' in text
        assert 'diffulex_requests_inflight_http{model_name="fake"} 0.0' in text


def test_leaving_before_the_answer_is_one_abort():
    with serving(is_endless=True) as (url, backend, frontend):
        host, _, port = url.removeprefix("http://").partition(":")
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), PATIENCE_S) as client:
            client.sendall(f'{head}Content-Length: 15\r\n\r\n{{"prompt": "x"}}'.encode())
            until(lambda: backend.commands)
        until(lambda: not frontend.rid_to_state)
        until(lambda: backend.aborts)
        assert backend.aborts == [backend.commands[0].rid]


def test_leaving_several_choices_aborts_each():
    with serving(is_endless=True) as (url, backend, frontend):
        body = {"messages": USER, "n": 3, "stream": True}
        with httpx.stream("POST", url + CHAT, json=body, timeout=PATIENCE_S) as response:
            next(response.iter_raw())
        until(lambda: len(backend.aborts) == 3)
        assert sorted(backend.aborts) == sorted(command.rid for command in backend.commands)
        until(lambda: not frontend.rid_to_state)


def test_a_finished_stream_is_not_aborted():
    import openai

    with serving(is_endless=False) as (url, backend, frontend):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model="fake", messages=USER, stream=True)
        texts = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(texts) == "a" * 20
        answer = client.chat.completions.create(model="fake", messages=USER)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.total_tokens == answer.usage.completion_tokens == 20
        until(lambda: not frontend.rid_to_state)
        assert not backend.aborts


def test_abort_by_id_ends_the_stream_with_an_error():
    with serving(is_endless=True) as (url, backend, _):
        body = {"messages": USER, "stream": True, "request_id": "me"}
        with httpx.stream("POST", url + CHAT, json=body, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            # An id is the server's; the bare one that was chosen is none.
            assert httpx.post(url + "/abort", json={"rid": "me"}).json() == {"aborted": False}
            answer = httpx.post(url + "/abort", json={"rid": first["id"]}).json()
            assert answer == {"aborted": True}
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["error"]["code"] == "aborted"
        assert backend.aborts == ["diffulex-me"]
        assert httpx.post(url + "/abort", json={"rid": first["id"]}).json() == {"aborted": False}


@pytest.mark.parametrize("num_choices", [1, 2])
def test_abort_by_id_ends_a_waiting_request_with_499(num_choices):
    with serving(is_endless=True) as (url, backend, _), ThreadPoolExecutor(1) as pool:
        body = {"messages": USER, "n": num_choices, "temperature": 1}
        headers = {"X-Request-Id": "me"}
        waiting = pool.submit(
            httpx.post, url + CHAT, json=body, headers=headers, timeout=PATIENCE_S
        )
        until(lambda: len(backend.commands) == num_choices)
        assert httpx.post(url + "/abort", json={"rid": "diffulex-me"}).json() == {"aborted": True}
        response = waiting.result()
        assert response.status_code == 499
        assert response.json()["error"]["code"] == "aborted"
        text = httpx.get(url + "/metrics").text
        assert f'request_aborted_total{{model_name="fake",reason="api"}} {num_choices}.0' in text
        assert f'requests_total{{model_name="fake",route="{CHAT}",status="499"}} 1.0' in text


def test_time_that_runs_out():
    with serving(is_endless=True) as (url, backend, _):
        headers = {"X-Request-Timeout": "0.2"}
        response = httpx.post(url + "/generate", json={"prompt": "x"}, headers=headers)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "request_timeout"
        body = {"messages": USER, "stream": True}
        text = httpx.post(url + CHAT, json=body, headers=headers).text
        *_, error, done, _ = text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert done == "data: [DONE]"
        assert len(backend.aborts) == 2


def test_a_slow_reader_gets_the_whole_stream():
    frontend = FakeFrontend()
    with AppServer(create_app(frontend)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 10) as client:
            body = json.dumps({"prompt": "x", "stream": True}).encode()
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            time.sleep(0.2)
            received = b""
            while b"[DONE]" not in received:
                received += client.recv(64)
        assert b'"event":"final"' in received


def test_bodies_over_the_limit_are_refused_while_they_are_sent():
    with AppServer(create_app(FakeFrontend(), max_body_bytes=1000)) as server:
        headers = {"Content-Type": "application/json"}
        big = b'{"prompt": "' + b"a" * 4_000_000 + b'"}'
        response = httpx.post(server.url + "/generate", content=big, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"

        def chunks():
            for start in range(0, len(big), 65536):
                yield big[start : start + 65536]

        response = httpx.post(server.url + "/generate", content=chunks(), headers=headers)
        assert response.status_code == 413
        assert httpx.get(server.url + "/health").status_code == 200
