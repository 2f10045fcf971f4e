# SPDX-License-Identifier: Apache-2.0
"""Requests of the soak: ordinary ones, ones that leave early, and ones that are wrong.

A kind is a coroutine that sends one request and raises `UnexpectedAnswerError` unless the server
answered as it must.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diffulex.bench.serve.errors import RequestError
from diffulex.bench.serve.frames import EventParser, parse_frame
from diffulex.bench.serve.http_stream import Endpoint, HttpClient, HttpResponse

__all__ = ["KINDS", "MALFORMED", "Soaker", "UnexpectedAnswerError"]

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_LONG_TOKENS = 96
#: Tokens of a request that is to be aborted: it must not be done before.
_ABORTED_TOKENS = 384
#: What the server puts before a `request_id`.
_ID_PREFIX = "diffulex-"


class UnexpectedAnswerError(Exception):
    """The server answered otherwise than it must."""


@dataclass(slots=True)
class Soaker:
    """What the kinds share: a client, the questions and their known answers.

    Attributes:
        answers: greedy answer of each question, as the idle server gave it.
        mask_token_id: id that no prompt may contain.
        num_requests: requests with an id of their own so far.
        num_aborted: those of them that `/abort` ended.
    """

    client: HttpClient
    answers: Mapping[str, str]
    vocab_size: int
    mask_token_id: int | None
    num_requests: int = 0
    num_aborted: int = 0

    def question(self, rng: random.Random) -> str:
        """One of the questions."""
        return rng.choice(list(self.answers))

    def chat_body(self, question: str, **fields: Any) -> dict[str, Any]:
        """A greedy chat request."""
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": _LONG_TOKENS, "temperature": 0}
        return {**body, **fields}

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        return await self.post_bytes(path, json.dumps(body).encode())

    async def post_bytes(self, path: str, body: bytes) -> tuple[int, Any]:
        """The same for a body that need not be JSON."""
        async with self.client.request("POST", path, body) as response:
            content = await response.read()
        return response.status, json.loads(content)


def _expect(is_right: bool, expected: str, got: object) -> None:
    if not is_right:
        raise UnexpectedAnswerError(f"expected {expected}, got {str(got)[:300]}")


async def _stream_text(response: HttpResponse) -> str:
    _expect(response.status == 200, "status 200", response.status)
    parser = EventParser()
    text, is_done = "", False
    async for part in response.parts():
        for data in parser.feed(part):
            frame = parse_frame("chat", data)
            text += "" if frame.is_whole and text else frame.text
            is_done = is_done or frame.is_done
    _expect(is_done, "a terminator", "none")
    return text


async def _plain(soaker: Soaker, rng: random.Random) -> None:
    question = soaker.question(rng)
    status, body = await soaker.post(_CHAT, soaker.chat_body(question))
    _expect(status == 200, "status 200", (status, body))
    text = body["choices"][0]["message"]["content"]
    _expect(text == soaker.answers[question], repr(soaker.answers[question]), repr(text))


async def _streamed(soaker: Soaker, rng: random.Random) -> None:
    question = soaker.question(rng)
    mode = rng.choice(["block_append", "both", "denoise"])
    body = soaker.chat_body(question, stream=True, stream_mode=mode, denoise_detail=True)
    async with soaker.client.request("POST", _CHAT, json.dumps(body).encode()) as response:
        text = await _stream_text(response)
    _expect(text == soaker.answers[question], repr(soaker.answers[question]), repr(text))


async def _stopped(soaker: Soaker, rng: random.Random) -> None:
    """A stop string taken from the answer cuts it there."""
    question = soaker.question(rng)
    answer = soaker.answers[question]
    start = rng.randrange(max(1, len(answer) - 2))
    stop = answer[start : start + rng.randint(1, 3)]
    body = soaker.chat_body(question, stop=[stop, "never to be written"])
    status, content = await soaker.post(_CHAT, body)
    _expect(status == 200, "status 200", (status, content))
    text = content["choices"][0]["message"]["content"]
    _expect(text == answer[: answer.index(stop)], f"the text before {stop!r}", repr(text))


async def _sampled(soaker: Soaker, rng: random.Random) -> None:
    """Drawn answers, several per prompt, with log-probabilities and a limit of forwards."""
    question = soaker.question(rng)
    fields = {"temperature": 1.0, "seed": rng.randrange(1 << 30), "n": rng.randint(1, 3)}
    fields["max_nfe"] = rng.choice([None, 3, 20])
    fields["logprobs"] = rng.choice([False, True])
    status, body = await soaker.post(_CHAT, soaker.chat_body(question, **fields))
    _expect(status == 200, "status 200", (status, body))
    _expect(len(body["choices"]) == fields["n"], f"{fields['n']} choices", body)


async def _batch(soaker: Soaker, rng: random.Random) -> None:
    """Several prompts of token ids in one request."""
    ids = [i for i in range(min(soaker.vocab_size, 200)) if i != soaker.mask_token_id]
    prompts = [rng.choices(ids, k=rng.randint(1, 40)) for _ in range(rng.randint(1, 4))]
    body = {"prompt": prompts, "max_tokens": rng.randint(1, 24), "temperature": 0}
    status, content = await soaker.post(_COMPLETIONS, body)
    _expect(status == 200, "status 200", (status, content))
    indices = [choice["index"] for choice in content["choices"]]
    _expect(indices == list(range(len(prompts))), "choices in order", indices)


async def _leave_waiting(soaker: Soaker, rng: random.Random) -> None:
    """Closes the connection while waiting for an answer."""
    body = soaker.chat_body(soaker.question(rng), ignore_eos=True)
    reader, writer = await _open(soaker, _CHAT, json.dumps(body).encode())
    await asyncio.sleep(rng.random() * 0.3)
    writer.close()
    del reader


async def _leave_streaming(soaker: Soaker, rng: random.Random) -> None:
    """Closes the connection in the middle of a stream."""
    mode = rng.choice(["block_append", "both", "denoise"])
    fields = {"stream": True, "stream_mode": mode, "ignore_eos": True, "n": rng.randint(1, 2)}
    body = soaker.chat_body(soaker.question(rng), temperature=0.7, **fields)
    num_parts = rng.randint(0, 3)
    async with soaker.client.request("POST", _CHAT, json.dumps(body).encode()) as response:
        _expect(response.status == 200, "status 200", response.status)
        async for _ in response.parts():
            num_parts -= 1
            if num_parts < 0:
                return


async def _abort(soaker: Soaker, rng: random.Random) -> None:
    """Ends a request by its id from another connection; its end and the answer must agree."""
    soaker.num_requests += 1
    request_id = f"soak-{soaker.num_requests}-{rng.randrange(1 << 30)}"
    fields = {"ignore_eos": True, "max_tokens": _ABORTED_TOKENS, "stream": rng.random() < 0.5}
    body = soaker.chat_body(soaker.question(rng), request_id=request_id, **fields)
    task = asyncio.create_task(_is_aborted(soaker, body))
    await asyncio.sleep(rng.random() * 0.2)
    status, content = await soaker.post("/abort", {"rid": _ID_PREFIX + request_id})
    is_aborted = await task
    _expect((status, content) == (200, {"aborted": is_aborted}), str(is_aborted), content)
    soaker.num_aborted += is_aborted


async def _is_aborted(soaker: Soaker, body: dict[str, Any]) -> bool:
    """Sends a request; whether it ended as an aborted one, not as a whole one."""
    async with soaker.client.request("POST", _CHAT, json.dumps(body).encode()) as response:
        if response.status == 499:
            error = json.loads(await response.read())["error"]
            _expect(error["code"] == "aborted", "code aborted", error)
            return True
        _expect(response.status == 200, "status 200 or 499", response.status)
        if not body["stream"]:
            await response.read()
            return False
        try:
            await _stream_text(response)
        except RequestError as error:
            _expect(str(error).endswith(": aborted"), "the error frame of an abort", error)
            return True
    return False


async def _malformed(soaker: Soaker, rng: random.Random) -> None:
    """A request that must be refused, and say why."""
    path, content, statuses = rng.choice(MALFORMED)(soaker, rng)
    status, body = await soaker.post_bytes(path, content)
    _expect(status in statuses, f"one of {statuses} for {content[:80]!r}", (status, body))
    message = body["error"]["message"]
    _expect(isinstance(message, str) and bool(message), "a message", body)


async def _broken_transfer(soaker: Soaker, rng: random.Random) -> None:
    """Bytes that are no request, or stop before their end."""
    body = json.dumps(soaker.chat_body(soaker.question(rng))).encode()
    head = soaker.client.endpoint.head("POST", _CHAT, body)
    message = rng.choice(
        [
            head + body[: len(body) // 2],
            head[: len(head) // 2],
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(40),
            b"POST / HTTP/9.9\r\n\r\n",
            head.replace(b"Content-Length: ", b"Content-Length: -"),
        ]
    )
    reader, writer = await _open_raw(soaker)
    writer.write(message)
    await writer.drain()
    await asyncio.sleep(rng.random() * 0.1)
    writer.close()
    del reader


async def _open_raw(soaker: Soaker) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    endpoint: Endpoint = soaker.client.endpoint
    return await asyncio.open_connection(endpoint.host, endpoint.port)


async def _open(
    soaker: Soaker, path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await _open_raw(soaker)
    writer.write(soaker.client.endpoint.head("POST", path, body) + body)
    await writer.drain()
    return reader, writer


Malformed = Callable[[Soaker, random.Random], tuple[str, bytes, tuple[int, ...]]]


def _wrong(path: str, body: object, *statuses: int) -> Malformed:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda _soaker, _rng: (path, content, statuses or (400,))


def _user(text: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


#: Makers of path, body and the statuses that are right for it.
MALFORMED: tuple[Malformed, ...] = (
    _wrong(_CHAT, b""),
    _wrong(_CHAT, b"{"),
    _wrong(_CHAT, b"[1, 2]"),
    _wrong(_CHAT, b'"text"'),
    _wrong(_CHAT, b"\xff\xfe{}"),
    _wrong(_CHAT, b'{"messages": [' + b"[" * 5000),
    _wrong(_CHAT, {"messages": []}),
    _wrong(_CHAT, {"messages": _user({"a": 1})}),
    _wrong(_CHAT, {"messages": _user([{"type": "image_url"}])}),
    _wrong(_CHAT, {"messages": _user("a"), "max_tokens": 0}),
    _wrong(_CHAT, {"messages": _user("a"), "max_tokens": "many"}),
    _wrong(_CHAT, {"messages": _user("a"), "max_tokens": 1 << 30}),
    _wrong(_CHAT, {"messages": _user("a"), "temperature": -1}),
    _wrong(_CHAT, {"messages": _user("a"), "n": 10_000}),
    _wrong(_CHAT, {"messages": _user("a"), "stop": [1]}),
    _wrong(_CHAT, {"messages": _user("a"), "stream": "yes"}),
    _wrong(_CHAT, {"messages": _user("a"), "stream_mode": "all"}),
    _wrong(_CHAT, {"messages": _user("a"), "frequency_penalty": 1}),
    _wrong(_CHAT, {"messages": _user("a"), "response_format": {"type": "json_object"}}),
    _wrong(_CHAT, {"messages": _user("a"), "tools": [{"type": "function"}]}),
    _wrong(_CHAT, {"messages": _user("a"), "decoding": {"accept_threshold": 7}}),
    _wrong(_CHAT, {"messages": _user("word " * 20_000)}),
    _wrong(_CHAT, {"messages": _user("a"), "model": "no such model"}, 404),
    _wrong(_COMPLETIONS, {"prompt": []}),
    _wrong(_COMPLETIONS, {"prompt": [[], [1]]}),
    _wrong(_COMPLETIONS, {"prompt": [-1]}),
    _wrong(_COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 1}),
    _wrong(_COMPLETIONS, {"prompt": "a", "suffix": "b"}),
    _wrong("/generate", {}),
    _wrong("/generate", {"prompt": {"text": "a"}}),
    _wrong("/no/such/route", {}, 404),
    _wrong("/v1/models", {}, 405),
    _wrong("/abort", {"rid": 5}),
    lambda soaker, _: (
        _COMPLETIONS, json.dumps({"prompt": [soaker.vocab_size]}).encode(), (400,)
    ),
    lambda soaker, _: (
        _COMPLETIONS, json.dumps({"prompt": [soaker.mask_token_id]}).encode(), (400,)
    ),
    lambda _, rng: (_CHAT, rng.randbytes(rng.randint(1, 200)), (400,)),
)  # fmt: skip

#: Coroutines by name, with their weights.
KINDS: Mapping[str, tuple[int, Callable[[Soaker, random.Random], Awaitable[None]]]] = {
    "plain": (4, _plain),
    "streamed": (4, _streamed),
    "stop string": (3, _stopped),
    "sampled": (2, _sampled),
    "batch of prompts": (2, _batch),
    "left while waiting": (3, _leave_waiting),
    "left while streaming": (3, _leave_streaming),
    "abort by id": (3, _abort),
    "malformed": (4, _malformed),
    "broken transfer": (1, _broken_transfer),
}
