# SPDX-License-Identifier: Apache-2.0
"""The engine requests that one HTTP request stands for, and their merged events."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from diffulex.config.sampling_params import SamplingParams, choice_seed
from diffulex.log import get_logger
from diffulex.server.http.api_errors import ApiError, api_error_of
from diffulex.server.http.disconnect import ClientLeftError
from diffulex.server.openai.usage import num_prompt_tokens
from diffulex.serving.frontend import ClientDisconnected
from diffulex.wire.protocol import (
    RequestOptions,
    ServingError,
    ServingEvent,
    ServingGenerate,
    ServingInput,
    ServingReply,
    StreamMode,
)

if TYPE_CHECKING:
    from diffulex.server.http.app_frontend import AppFrontend

__all__ = ["EventMerger", "Generation", "IndexedEvent", "LiveRequests"]

logger = get_logger(__name__)

T = TypeVar("T")
IndexedEvent = tuple[int, ServingEvent]
IsDisconnected = Callable[[], Awaitable[bool]]

#: Of the seeds that are drawn here: small enough for clients whose numbers are doubles.
_DRAWN_SEED_BITS = 52


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request, expanded into commands.

    Attributes:
        rid: id of the HTTP request; that of the only command when there is one.
        inputs: the prompts.
        commands: prompt after prompt, the choices of a prompt beside each other.
        num_copies: how often each answer is delivered: greedy choices are computed once.
        timeout_s: what the client allows, if it said so.
        has_tokens: False: the answers are empty, and no engine is asked.
    """

    rid: str
    inputs: tuple[ServingInput, ...]
    commands: tuple[ServingGenerate, ...]
    num_copies: int = 1
    timeout_s: float | None = None
    has_tokens: bool = True

    @classmethod
    def expand(
        cls,
        *,
        rid: str,
        inputs: Sequence[ServingInput],
        params: SamplingParams,
        num_choices: int,
        stream_mode: StreamMode | None,
        user: str | None,
        created_time: float,
        strict_max_tokens: bool,
        options: RequestOptions,
        timeout_s: float | None,
        info: Mapping[str, Any],
        has_tokens: bool = True,
    ) -> Generation:
        """One command per prompt and choice; the choices of a prompt differ by their seed.

        Args:
            stream_mode: None for an answer in one piece.
            options: what the commands pass on as it is.
            info: what the backend said about itself.
        """
        is_fixed = params.temperature == 0
        seed = params.seed
        if seed is None:
            # The engine's own rule at temperature 0, so that its other users get the same answer.
            seed = info.get("seed", 0) if is_fixed else secrets.randbits(_DRAWN_SEED_BITS)
        num_copies = num_choices if is_fixed and not info.get("draws_at_zero") else 1
        per_prompt = num_choices // num_copies
        is_single = len(inputs) * per_prompt == 1
        commands = [
            ServingGenerate(
                rid=rid if is_single else f"{rid}-{index * per_prompt + choice}",
                input=prompt,
                sampling_params=dataclasses.replace(params, seed=choice_seed(seed, choice)),
                stream=stream_mode is not None,
                stream_mode=stream_mode or "block_append",
                user=user,
                created_time=created_time,
                strict_max_tokens=strict_max_tokens,
                **vars(options),
            )
            for index, prompt in enumerate(inputs)
            for choice in range(per_prompt)
        ]
        return cls(rid, tuple(inputs), tuple(commands), num_copies, timeout_s, has_tokens)

    @property
    def num_choices(self) -> int:
        """Choices of the response."""
        return len(self.commands) * self.num_copies

    def choice_indices(self, index: int) -> range:
        """The choices that the answer to a command is delivered as."""
        return range(index * self.num_copies, (index + 1) * self.num_copies)

    async def collect(
        self, frontend: AppFrontend, is_disconnected: IsDisconnected
    ) -> list[ServingReply]:
        """The answers to all commands; the first failure ends the others.

        Raises:
            ApiError: a command failed.
            ClientLeftError: the frontend noticed that the client left.
        """
        if not self.has_tokens:
            return [_empty_reply(command) for command in self.commands]
        keywords = self._keywords(is_disconnected)

        async def answer(command: ServingGenerate) -> ServingReply:
            try:
                reply: ServingReply = await frontend.generate(command, **keywords)
            except RuntimeError as error:
                raise _failure(error, frontend) from error
            except ValueError as error:
                raise ApiError(409, str(error)) from error
            return reply

        return await _all_or_none([answer(command) for command in self.commands])

    def open_streams(self, frontend: AppFrontend, is_disconnected: IsDisconnected) -> EventMerger:
        """The events of all commands."""
        keywords = self._keywords(is_disconnected)
        open_stream = frontend.generate_stream if self.has_tokens else _empty_stream
        streams = [open_stream(command, **keywords) for command in self.commands]
        return EventMerger(streams, [command.rid for command in self.commands], frontend)

    def _keywords(self, is_disconnected: IsDisconnected) -> dict[str, Any]:
        keywords: dict[str, Any] = {"is_disconnected": is_disconnected}
        if self.timeout_s is not None:
            keywords["timeout_s"] = self.timeout_s
        return keywords


def _empty_reply(command: ServingGenerate) -> ServingReply:
    return ServingReply(
        command.rid,
        text="",
        token_ids=[],
        nfe=0,
        finish_reason="max_new_tokens_reached",
        prompt_tokens=num_prompt_tokens(command.input),
    )


async def _empty_stream(command: ServingGenerate, **_: Any) -> AsyncIterator[ServingEvent]:
    yield _empty_reply(command)


def _failure(error: RuntimeError, frontend: AppFrontend) -> Exception:
    if isinstance(error, ClientDisconnected):
        return ClientLeftError(str(error))
    return api_error_of(error, retry_after_s=frontend.retry_after_s)


async def _all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


class EventMerger:
    """Events of several streams in the order they come, each with the index of its stream.

    Every stream is read by one task from start to end, one event ahead: a client that reads slowly
    holds the streams back, so that the frontend can merge snapshots.
    """

    def __init__(
        self,
        streams: Sequence[AsyncIterator[ServingEvent]],
        rids: Sequence[str],
        frontend: AppFrontend,
    ) -> None:
        self._queue: asyncio.Queue[IndexedEvent | None] = asyncio.Queue(maxsize=len(streams))
        self._num_open = len(streams)
        self._frontend = frontend
        self._peeked: IndexedEvent | None = None
        self._tasks = [
            asyncio.ensure_future(self._read(index, stream, rid))
            for index, (stream, rid) in enumerate(zip(streams, rids, strict=True))
        ]

    async def peek(self, timeout_s: float) -> IndexedEvent | None:
        """The first event, which stays in the stream; None when there is none in time."""
        self._peeked = await self._get(timeout_s)
        return self._peeked

    async def events(self, timeout_s: float) -> AsyncGenerator[IndexedEvent | None, None]:
        """All events until every stream has ended; None for each pause of `timeout_s`.

        After an error event no other follows.
        """
        while self._num_open:
            item, self._peeked = self._peeked, None
            if item is None:
                item = await self._get(timeout_s)
            if item is not None and isinstance(item[1], (ServingReply, ServingError)):
                self._num_open -= 1
            yield item
            if item is not None and isinstance(item[1], ServingError):
                return

    def cancel(self) -> None:
        """Ends the streams that have not ended, without waiting for it. Idempotent."""
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        """Ends the streams that have not ended. Idempotent."""
        self.cancel()
        await asyncio.wait(self._tasks)

    async def _get(self, timeout_s: float) -> IndexedEvent | None:
        if not self._queue.empty():
            return self._queue.get_nowait()
        # Not wait_for: a task per event is most of what an event costs.
        timer = asyncio.get_running_loop().call_later(timeout_s, self._wake)
        try:
            return await self._queue.get()
        finally:
            timer.cancel()

    def _wake(self) -> None:
        """Lets the reader say that nothing has come."""
        if self._queue.empty():
            self._queue.put_nowait(None)

    async def _read(self, index: int, stream: AsyncIterator[ServingEvent], rid: str) -> None:
        last: ServingEvent | None = None
        try:
            async with aclosing(stream) as events:  # type: ignore[type-var]
                async for event in events:
                    await self._queue.put((index, event))
                    last = event
        except RuntimeError as error:
            failure = _failure(error, self._frontend)
            if isinstance(failure, ApiError):
                last = _event_of(rid, failure)
                await self._queue.put((index, last))
        except ValueError as error:
            if last is None:
                last = ServingError(rid, str(error), "conflict", 409)
                await self._queue.put((index, last))
            else:
                logger.exception("request %s: its stream failed", rid)
        except Exception:
            logger.exception("request %s: its stream failed", rid)
        if not isinstance(last, (ServingReply, ServingError)):
            message = "the engine ended the request without a reply"
            await self._queue.put((index, ServingError(rid, message)))


def _event_of(rid: str, failure: ApiError) -> ServingError:
    code = failure.code or "service_unavailable"
    return ServingError(rid, failure.message, code, failure.status, param=failure.param)


class LiveRequests:
    """HTTP requests in progress, by their id."""

    def __init__(self, frontend: AppFrontend) -> None:
        self._frontend = frontend
        self._commands: dict[str, tuple[str, ...]] = {}
        #: Every id of theirs: that of the HTTP request and those of its commands.
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._commands)

    def claim(self, rid: str) -> None:
        """Takes an id; ApiError 409 when it is in use."""
        self._check_unused(rid)
        self._commands[rid] = (rid,)
        self._names.add(rid)

    def start(self, generation: Generation) -> None:
        """Records the commands of a claimed id; ApiError 409 when one of their ids is in use."""
        names = tuple(command.rid for command in generation.commands)
        for name in names:
            if name != generation.rid:
                self._check_unused(name)
        self._commands[generation.rid] = names
        self._names.update(names)

    def _check_unused(self, name: str) -> None:
        if name in self._names or self._frontend.has_request(name):
            raise ApiError(
                409,
                f"request_id: expected one that is not in use, got {name!r}",
                param="request_id",
            )

    def release(self, rid: str) -> None:
        """Gives an id back, with those of its commands. Unknown ids are ignored."""
        self._names.difference_update((rid, *self._commands.pop(rid, ())))

    async def abort(self, rid: str) -> bool:
        """Ends a request, or one choice of it; whether it was in progress."""
        is_known, abort = rid in self._commands, self._frontend.abort_request
        results = [await abort(name) for name in self._commands.get(rid, (rid,))]
        # A frontend that says nothing has aborted what this application knows to be in progress.
        return any(is_known if result is None else bool(result) for result in results)
