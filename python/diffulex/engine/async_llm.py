# SPDX-License-Identifier: Apache-2.0
"""An engine for asyncio: requests of many tasks, decoded together in a separate thread."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from diffulex.arrivals import Arrivals
from diffulex.config.sampling_params import SamplingParams, merged_params
from diffulex.engine.engine import Diffulex, StreamMode, check_mode
from diffulex.engine.prompt import encode_prompt
from diffulex.engine.text_stream import TextStream
from diffulex.errors import EngineDeadError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.config import Config
    from diffulex.config.keywords import EngineKeywords, SamplingKeywords
    from diffulex.engine.output import RequestOutput, StepOutput, StreamEvent
    from diffulex.engine.prompt import Prompt

__all__ = ["AsyncLLM"]

#: Outputs of a request, or the error that ends it.
_Arrivals: TypeAlias = "Arrivals[StepOutput | BaseException]"


class AsyncLLM:
    """An engine over one model whose answers are awaited. Belongs to one event loop.

    Requests that are open together are decoded together. A task that is cancelled, and a stream that
    is closed, aborts its request.

    Args:
        model: `demo` (bundled), a checkpoint directory or a hub id.
        settings: keys of docs/configuration.md.

    Use it as an asynchronous context manager, or `start` and `close` it. One that is left open ends
    when it is no longer used, at the latest with the interpreter.
    """

    def __init__(self, model: str = "demo", **settings: Unpack[EngineKeywords]) -> None:
        self._worker = _EngineThread(partial(Diffulex, model, **settings))
        weakref.finalize(self, self._worker.stop).atexit = False

    async def start(self) -> None:
        """Loads the model, in the engine's thread. Once.

        Raises:
            ConfigError: bad settings.
            CheckpointError: the model cannot be found or read.
            RuntimeError: it was started before.
        """
        await self._worker.start(asyncio.get_running_loop())

    async def close(self) -> None:
        """Ends every request with a RuntimeError and releases the engine; its thread is gone
        afterwards. Idempotent."""
        self._worker.stop()
        await self._worker.wait()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._worker.engine.tokenizer

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self._worker.engine.config

    @property
    def num_requests(self) -> int:
        """Requests that are waited for."""
        return len(self._worker.arrivals)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        use_chat_template: bool = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestOutput:
        """The whole answer to one prompt: a text, token ids or chat messages.

        Args:
            prompt: text, token ids or chat messages.
            sampling_params: None: the defaults.
            use_chat_template: treat a text as a user message.
            sampling: fields of SamplingParams, in place of `sampling_params`.

        Raises:
            PromptError: the prompt cannot be served.
            EngineDeadError: the last replica is gone.
            RuntimeError: the engine is not open, or was closed before the answer.
        """
        params = merged_params(sampling_params, sampling) or SamplingParams()
        async with aclosing(self._steps(prompt, params, use_chat_template, False)) as steps:
            async for step in steps:
                if step.output is not None:
                    return step.output
        raise RuntimeError("AsyncLLM.generate: expected an answer, got the end of its steps")

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestOutput:
        """The assistant's answer to a conversation; otherwise as `generate`."""
        return await self.generate(messages, sampling_params, use_chat_template=True, **sampling)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        mode: StreamMode = "block_append",
        *,
        use_chat_template: bool = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncGenerator[StreamEvent, None]:
        """The events of one prompt, those of `Diffulex.stream`.

        Raises:
            PromptError: the prompt cannot be served.
            EngineDeadError: the last replica is gone.
            RuntimeError: the engine is not open, or was closed before the end.
        """
        check_mode(mode)
        params = merged_params(sampling_params, sampling) or SamplingParams()
        text = TextStream(self.tokenizer, params)
        is_denoise = mode == "denoise"
        async with aclosing(self._steps(prompt, params, use_chat_template, is_denoise)) as steps:
            async for step in steps:
                event = text.event(step)
                if event.token_ids or event.snapshot is not None or step.is_finished:
                    yield event

    def abort(self, req_id: int) -> bool:
        """Ends a request, the `req_id` of its events, at the next step; its owner gets what there
        is. False for unknown or finished ids."""
        return req_id in self._worker.arrivals and self._worker.engine.abort(req_id)

    async def _steps(
        self, prompt: Prompt, params: SamplingParams, use_chat_template: bool, has_snapshots: bool
    ) -> AsyncGenerator[StepOutput, None]:
        worker, engine = self._worker, self._worker.engine
        # A long text takes its time, which the event loop has not got.
        token_ids = await asyncio.to_thread(
            encode_prompt, prompt, engine.config, engine.tokenizer, use_chat_template
        )
        req_id, arrivals = worker.add(token_ids, params, has_snapshots)
        try:
            while True:
                item = await arrivals.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.is_finished:
                    return
        finally:
            worker.leave(req_id)


class _EngineThread:
    """The thread that makes an engine, runs its steps and closes it.

    It does not hold its AsyncLLM, so that an AsyncLLM without users ends it.
    """

    def __init__(self, make: Callable[[], Diffulex]) -> None:
        self._make = make
        self._engine: Diffulex | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Guards what follows, and that a request is known before its first output.
        self._changed = threading.Condition()
        self.arrivals: dict[int, _Arrivals] = {}
        self._is_closing = False
        self._death: EngineDeadError | None = None
        self._made: Future[Diffulex] = Future()
        self._ended: Future[None] = Future()
        self._pid = os.getpid()
        # The interpreter waits for every other thread before it runs what is to be done at its end.
        self._thread = threading.Thread(target=self._run, name="diffulex_engine", daemon=True)

    @property
    def engine(self) -> Diffulex:
        """The engine; RuntimeError unless it is open, EngineDeadError after its death."""
        if self._death is not None:
            raise self._death
        if self._engine is None or self._is_closing:
            state = "a closed one" if self._is_closing else "one that was not started"
            raise RuntimeError(f"AsyncLLM: expected an open engine, got {state}")
        return self._engine

    async def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes the engine, whose outputs go to `loop`; raises as `AsyncLLM.start` does."""
        if self._loop is not None or self._is_closing:
            state = "closed" if self._is_closing else "started"
            raise RuntimeError(f"AsyncLLM.start: expected a new engine, got one that was {state}")
        self._loop = loop
        # Neither is cancelled together with who waits for it.
        self._made.set_running_or_notify_cancel()
        self._ended.set_running_or_notify_cancel()
        # A thread inside the compiled module must not outlive the interpreter.
        atexit.register(self._end)
        self._thread.start()
        try:
            self._engine = await asyncio.wrap_future(self._made)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Lets the thread end after the step that it runs."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    async def wait(self) -> None:
        """Waits for the end of the thread; raises what its engine's `close` raised."""
        if self._loop is not None:
            try:
                await asyncio.shield(asyncio.wrap_future(self._ended))
            finally:
                if self._ended.done():
                    self._thread.join()

    def _end(self) -> None:
        """At the end of the interpreter; not at that of a fork, which has no such thread."""
        if os.getpid() == self._pid:
            self.stop()
            self._thread.join()

    def add(
        self, token_ids: Sequence[int], params: SamplingParams, has_snapshots: bool
    ) -> tuple[int, _Arrivals]:
        """Enqueues a request; its id, and where its outputs, or the error that ends it, will be."""
        arrivals: _Arrivals = Arrivals()
        with self._changed:
            req_id = self.engine.add_request(token_ids, params, has_snapshots=has_snapshots)
            self.arrivals[req_id] = arrivals
            self._changed.notify_all()
        return req_id, arrivals

    def leave(self, req_id: int) -> None:
        """Aborts a request whose caller no longer waits, if it is open."""
        with self._changed:
            is_open = self.arrivals.pop(req_id, None) is not None
            if is_open and not self._is_ending:
                with suppress(EngineDeadError):
                    self.engine.abort(req_id)

    # On the engine's thread.

    def _run(self) -> None:
        try:
            engine = self._make()
        except BaseException as error:
            self._made.set_exception(error)
        else:
            self._made.set_result(engine)
            try:
                self._serve(engine)
            except BaseException as error:
                self._ended.set_exception(error)
        finally:
            atexit.unregister(self._end)
            if not self._ended.done():
                self._ended.set_result(None)

    def _serve(self, engine: Diffulex) -> None:
        try:
            while self._has_work(engine):
                self._step(engine)
        finally:
            self._fail(engine, RuntimeError("AsyncLLM: expected an open engine, got a closed one"))
            engine.close()

    def _step(self, engine: Diffulex) -> None:
        try:
            self._deliver(engine.step())
        except EngineDeadError as death:
            self._death = death
            self._fail(engine, death)
        except Exception as error:
            self._fail(engine, error)

    def _has_work(self, engine: Diffulex) -> bool:
        """Waits for requests; False once the engine is to be closed or dead."""
        with self._changed:
            while not self._is_ending and not engine.has_unfinished():
                self._changed.wait()
            return not self._is_ending

    @property
    def _is_ending(self) -> bool:
        return self._is_closing or self._death is not None

    def _deliver(self, steps: Sequence[StepOutput]) -> None:
        items = []
        with self._changed:
            for step in steps:
                arrivals = self.arrivals.get(step.req_id)
                if arrivals is not None:
                    items.append((arrivals, step))
                if step.is_finished:
                    self.arrivals.pop(step.req_id, None)
        self._hand_over(items)

    def _fail(self, engine: Diffulex, error: Exception) -> None:
        """Ends all requests with an error; those of a failed step would be tried for ever."""
        with self._changed:
            failed, self.arrivals = self.arrivals, {}
        for req_id in failed:
            with suppress(Exception):
                engine.abort(req_id)
        self._hand_over([(arrivals, error) for arrivals in failed.values()])

    def _hand_over(self, items: Sequence[tuple[_Arrivals, StepOutput | BaseException]]) -> None:
        def put() -> None:
            for arrivals, item in items:
                arrivals.put(item)

        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop is gone, and its tasks with it
            self._loop.call_soon_threadsafe(put)
