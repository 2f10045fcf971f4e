# SPDX-License-Identifier: Apache-2.0
"""Replicas of Ray Serve that are chosen by what their prefix caches hold (`request_router: prefix`).

Serve's proxies choose before the body of a request is read. Here they pass it to a door, which reads it;
the handle that the door sends it on with chooses by the policy of `diffulex.distributed.router`.

    proxy  ──>  Door  ──>  PrefixRouter  ──>  a replica: the application, over an engine
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from ray.exceptions import RayActorError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffulex.distributed.router import ReplicaState, Router, Ticket, text_chunks, token_chunks
from diffulex.server.http.api_errors import ApiError, error_response

__all__ = ["CACHE_TOKENS", "Door", "HttpRequest", "PrefixRouter", "answer_of", "read_request"]

#: Which Serve writes from all of its processes.
_serve_log = logging.getLogger("ray.serve")

#: Of the numbers that a replica tells the router: tokens that its prefix cache holds.
CACHE_TOKENS = "cache_tokens"
#: Replicas that may be lost below one request.
_NUM_TRIES = 3
#: What a replica needs of the scope of a request; the rest belongs to the process that it came to.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
#: Where a body has its prompt.
_PROMPTS = ("prompt", "messages", "input")
_CHARS_PER_TOKEN = 4
#: Bytes of a body. To parse more, some 10 ms, would hold up the other requests of a door.
_LARGEST_PARSED = 1 << 20
#: Tokens at the beginning of a prompt that it is known by.
_MAX_KNOWN = 1 << 16
#: For an application whose client has gone.
_LEAVE_S = 5.0


class HttpRequest(NamedTuple):
    """A request that was read.

    Attributes:
        scope: of ASGI, as far as it travels.
        body: whole, unless it is larger than a replica takes.
        chunks: of the prompt, for `diffulex.distributed.router`.
        num_tokens: about that many are in the prompt.
    """

    scope: Mapping[str, Any]
    body: bytes
    chunks: Sequence[int]
    num_tokens: int


def read_request(scope: Mapping[str, Any], body: bytes) -> HttpRequest:
    """The request with what a router wants to know; a body that is not understood has no prompt."""
    own = {name: scope[name] for name in _SCOPE if name in scope}
    if len(body) > _LARGEST_PARSED:
        return HttpRequest(own, body, (), len(body) // _CHARS_PER_TOKEN)
    try:
        return HttpRequest(own, body, *_read_prompt(body))
    except (ValueError, RecursionError, MemoryError):  # a replica says what is wrong with it
        return HttpRequest(own, body, (), 0)


def _read_prompt(body: bytes) -> tuple[Sequence[int], int]:
    document = json.loads(body)
    if not isinstance(document, dict):
        return (), 0
    prompt = next((document[name] for name in _PROMPTS if document.get(name)), "")
    name = str(document.get("model") or "")
    if isinstance(prompt, list) and all(type(item) is int and item >= 0 for item in prompt):
        known = [min(item, 2**32) for item in prompt[:_MAX_KNOWN]]
        return token_chunks(known, name), len(prompt)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    known_text = text[: _MAX_KNOWN * _CHARS_PER_TOKEN]
    return text_chunks(known_text, name), len(text) // _CHARS_PER_TOKEN


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Has the replicas tried in the order of what a request costs them. Serve makes it, in each door."""

    def initialize_state(self) -> None:
        """As Serve calls it."""
        self._router = Router(1, 0)
        self._places: dict[ReplicaID, int] = {}
        self._free = [0]
        #: Of what was sent to a replica. Its requests count alike, so any of them stands for any.
        self._tickets: dict[ReplicaID, list[Ticket]] = {}
        #: Of requests that are not sent yet, where they are likely to go.
        self._expected: dict[asyncio.Future[Any], Ticket] = {}

    def _place(self, known: set[ReplicaID]) -> None:
        """Keeps account of these replicas and no others."""
        for replica in self._places.keys() - known:
            self._free.append(self._places.pop(replica))
            self._router.set_state(self._free[-1], ReplicaState.LOST)
        for replica in known - self._places.keys():
            self._places[replica] = index = self._free.pop() if self._free else self._router.add()
            self._router.set_state(index, ReplicaState.READY)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """As Serve calls it, also with what replicas have told of themselves."""
        self._place({replica.replica_id for replica in replicas})
        told = [replica.routing_stats.get(CACHE_TOKENS, 0) for replica in replicas]
        self._router.resize(min(filter(None, told), default=0))
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """As Serve calls it."""
        super().on_replica_actor_died(replica_id)
        self._place(self._places.keys() - {replica_id})

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas, each a rank of its own."""
        chunks, num_tokens = _prompt_of(pending_request)
        is_new = pending_request is not None and not self._unexpect(pending_request.future)
        left = {
            self._places[replica.replica_id]: replica
            for replica in candidate_replicas
            if replica.replica_id in self._places
        }
        ranks = []
        while left:
            best = self._router.choose(chunks, num_tokens, left)
            ranks.append([left.pop(best)])
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # when all of them are full
            if ranks:
                # Or all that are chosen for before it is sent would go there too.
                first = self._places[ranks[0][0].replica_id]
                self._expected[pending_request.future] = self._router.sent(first, (), 0)
            if is_new:
                pending_request.future.add_done_callback(self._unexpect)
        return ranks

    def _unexpect(self, future: asyncio.Future[Any]) -> bool:
        """Counts a request nowhere that is not sent yet; whether it was counted."""
        ticket = self._expected.pop(future, None)
        if ticket is not None:
            self._router.finished(ticket)
        return ticket is not None

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """As Serve calls it, before it may call anything else of this request."""
        super().on_send_request(replica_id)
        index = self._places.get(replica_id)
        if index is not None:
            self._tickets.setdefault(replica_id, []).append(self._router.sent(index, (), 0))

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """As Serve calls it when the replica takes the request, at times after its completion."""
        index = self._places.get(replica_id)
        if index is not None:
            # Only remembers the prompt. When its prefill is over is not told; the number of
            # requests stands for their prompts.
            ticket = self._router.sent(index, *_prompt_of(pending_request))
            self._router.finished(self._router.started(ticket))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """As Serve calls it, once for each that was sent, also if the replica refused it."""
        tickets = self._tickets.get(replica_id)
        if tickets:
            self._router.finished(tickets.pop())
            if not tickets:
                del self._tickets[replica_id]


def _prompt_of(pending: PendingRequest | None) -> tuple[Sequence[int], int]:
    if pending is None or not pending.args:
        return (), 0
    # Serve copies the router and its module, whose `HttpRequest` is another.
    request = pending.args[0]
    return request.chunks, request.num_tokens


class Door:
    """What Serve's proxies see. A request whose replica is lost before its answer begins is sent again.

    Args:
        replicas: handle of their deployment, whose `relay` takes an `HttpRequest`.
        max_body_bytes: replicas refuse larger bodies; the rest of them is not read.
    """

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._relay = replicas.options(stream=True).relay
        self._max_body_bytes = max_body_bytes

    def __serve_build_asgi_app__(self) -> Any:
        """The application, which Serve starts and stops."""
        app = Starlette()
        app.router.default = self._answer
        return app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, is_whole = bytearray(), False
        while not is_whole and len(body) <= self._max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
        request = read_request(scope, bytes(body))
        for number in range(1, _NUM_TRIES + 1):
            is_begun = False
            answer = self._relay.remote(request)
            try:
                async for message in answer:
                    is_begun = True
                    await send(message)
                return
            except RayActorError as error:
                if is_begun:
                    raise
                reason = " ".join(str(error).split())
                _serve_log.warning("replica lost, try %d of %d: %s", number, _NUM_TRIES, reason)
            finally:
                answer.cancel()  # the client may be gone
        lost = ApiError(503, "the replicas of this request were lost", code="replica_lost")
        await error_response(lost)(scope, receive, send)


async def answer_of(app: ASGIApp, request: HttpRequest) -> AsyncIterator[Message]:
    """What an application sends for a request. When it is not wanted any more, the client has gone."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    unread, has_left = [request.body], asyncio.Event()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    task = asyncio.ensure_future(app(dict(request.scope), receive, messages.put))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        has_left.set()
        if not task.done():
            try:
                await asyncio.wait([task], timeout=_LEAVE_S)
            finally:
                task.cancel()
