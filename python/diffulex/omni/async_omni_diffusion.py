# SPDX-License-Identifier: Apache-2.0
"""The image engine behind an event loop: one thread draws, requests wait in line."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import os
import queue
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.arrivals import Arrivals
from diffulex.log import get_logger
from diffulex.omni.errors import QueueFull, RequestAborted, RequestError, RequestTimeout
from diffulex.omni.omni_diffusion import OmniDiffusion
from diffulex.omni.request import make_request

if TYPE_CHECKING:
    from diffulex.omni.config import OmniDiffusionConfig
    from diffulex.omni.outputs import OmniRequestOutput
    from diffulex.omni.request import OmniDiffusionRequest
    from diffulex.omni.worker import StepEvent

__all__ = ["AsyncOmniDiffusion", "Progress"]

logger = get_logger(__name__)

#: Between two looks at idle workers.
_WATCH_S = 1.0
#: After the first start that fails, and after many.
_RETRY_S, _MOST_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A denoising step that is done.

    Attributes:
        step, num_steps: over all images of the request.
        previews: pictures of the images that are being drawn, where they were asked for.
    """

    request_id: str
    step: int
    num_steps: int
    previews: tuple[Any, ...] = ()


@dataclass(eq=False)
class _Job:
    """A request on its way; results go to the loop that waits for them."""

    request: OmniDiffusionRequest
    preview_every: int | None
    loop: asyncio.AbstractEventLoop
    #: Progress, and at the end an output or an error.
    events: Arrivals[Any] = field(default_factory=Arrivals)
    arrived: float = field(default_factory=time.perf_counter)
    is_aborted: bool = False

    def tell(self, event: Any) -> None:
        """From the drawing thread; nobody listens any more once the loop is closed."""
        with suppress(RuntimeError):  # what a closed loop raises
            self.loop.call_soon_threadsafe(self.events.put, event)


class AsyncOmniDiffusion:
    """Draws for an event loop, one request after the other. Takes what `OmniDiffusion` takes.

    One that is left open is closed at the end of the interpreter.

    Args:
        restarts: whether workers that have died are replaced, also while none is asked for anything;
            `is_restarting` while that is done.

    Raises: as `OmniDiffusion`; loading the model blocks.
    """

    def __init__(
        self,
        od_config: OmniDiffusionConfig | Mapping[str, Any] | None = None,
        *,
        restarts: bool = False,
        **kwargs: Any,
    ) -> None:
        self._restarts = restarts
        #: Earliest time of the next try, and what is added to it when that fails.
        self._retry_at, self._retry_s = 0.0, _RETRY_S
        self._omni = OmniDiffusion(od_config, **kwargs)
        self.config = self._omni.config
        self.engine = self._omni.engine
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._live: dict[str, _Job] = {}
        self._current: _Job | None = None
        self._num_reserved = 0
        self._is_closed = self.is_restarting = False
        self._thread = threading.Thread(target=self._draw, name="diffulex-omni", daemon=True)
        self._pid = os.getpid()
        # A thread inside compiled modules must not outlive the interpreter.
        atexit.register(self._end)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        is_up = not (self._is_closed or self.is_restarting)
        return is_up and self.engine.health()["state"] == "ready"

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        jobs = tuple(self._live.values())
        return sum(job is not self._current and not job.is_aborted for job in jobs)

    async def generate(self, prompt: str | None, **kwargs: Any) -> OmniRequestOutput:
        """The images of a prompt. Cancelling the task aborts the request.

        Args:
            prompt: a text; None with `prompt_embeds`.
            kwargs: fields of `OmniDiffusionRequest`.

        Raises:
            RequestError: the prompt or a field is not legal for this model.
            QueueFull: `max_queue_size` requests wait already.
            RequestAborted: `abort` or `close` was called.
            RequestTimeout: its `timeout_s` has passed since it was accepted.
            OmniError: as `OmniDiffusion.generate`.
        """
        async for event in self.generate_stream(prompt, **kwargs):
            if not isinstance(event, Progress):
                return event
        raise AssertionError

    async def generate_stream(
        self, prompt: str | None, *, preview_every: int | None = None, **kwargs: Any
    ) -> AsyncGenerator[Progress | OmniRequestOutput, None]:
        """`Progress` after every step, and at the end the result. Raises: as `generate`.

        Args:
            prompt: as for `generate`.
            preview_every: steps between previews; the last step has none, as the result follows;
                None: no previews.
            kwargs: as for `generate`.
        """
        async with aclosing(self.start(prompt, preview_every=preview_every, **kwargs)) as events:
            async for event in events:
                yield event

    def start(
        self, prompt: str | None, *, preview_every: int | None = None, **kwargs: Any
    ) -> AsyncGenerator[Progress | OmniRequestOutput, None]:
        """As `generate_stream`, but the request is in line, or refused, when this returns.

        Every request comes this way. It is compared with the model here, as far as it takes no
        tokenizer: one that does not fit waits for nothing. What this returns has to be iterated, or the
        request stopped by `abort`.
        """
        request = make_request(prompt, kwargs)
        self.engine.check(request)
        return self._events(self._accept(request, preview_every))

    def check_room(self, num_more: int = 0) -> None:
        """Raises QueueFull where `max_queue_size` requests wait, or would with `num_more`."""
        most = self.config.engine.max_queue_size
        if self.num_waiting + num_more >= most:
            expected = f"expected at most {most} waiting requests (max_queue_size)"
            raise QueueFull(f"queue: {expected}, got one more")

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Counts as a waiting request for others that reserve, while its pictures are decoded.

        Raises:
            QueueFull: `max_queue_size` requests wait already, or are prepared.
        """
        self.check_room(self._num_reserved)
        self._num_reserved += 1
        try:
            yield
        finally:
            self._num_reserved -= 1

    async def _events(self, job: _Job) -> AsyncGenerator[Progress | OmniRequestOutput, None]:
        try:
            while True:
                limit = job.request.timeout_s
                # Waiting in line counts.
                left = None if limit is None else limit - (time.perf_counter() - job.arrived)
                try:
                    event = await asyncio.wait_for(job.events.get(), left)
                except asyncio.TimeoutError:
                    assert limit is not None
                    raise RequestTimeout.after(limit, "timeout_s") from None
                if isinstance(event, BaseException):
                    raise event
                yield event
                if not isinstance(event, Progress):
                    return
        finally:
            # Without effect when it is done.
            self._stop(job)

    async def abort(self, request_id: str) -> bool:
        """Ends a request with RequestAborted, at its next step if it runs; whether there is one."""
        job = self._live.get(request_id)
        if job is not None:
            self._stop(job)
        return job is not None

    async def close(self) -> None:
        """Aborts all requests and gives the model's memory back. May be called again."""
        self._stop_all()
        await asyncio.to_thread(self._thread.join)

    def _stop_all(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for job in tuple(self._live.values()):
                self._stop(job)
            self._jobs.put(None)

    def _end(self) -> None:
        """At the end of the interpreter; not at that of a fork, which has no such thread."""
        if os.getpid() == self._pid:
            self._stop_all()
            parallel, most_s = self.config.parallel, self.config.engine.shutdown_timeout_s
            # Workers that do not stop by then are killed after this.
            self._thread.join(None if parallel.is_inproc else most_s)

    def _accept(self, request: OmniDiffusionRequest, preview_every: int | None) -> _Job:
        if self._is_closed:
            raise RuntimeError("image engine: expected an open engine, got a closed one")
        if request.request_id in self._live:
            raise RequestError(
                f"request_id: expected a new one, got {request.request_id!r}, which is being drawn"
            )
        self.check_room()
        job = _Job(request, preview_every, asyncio.get_running_loop())
        self._live[request.request_id] = job
        self._jobs.put(job)
        return job

    def _stop(self, job: _Job) -> None:
        job.is_aborted = True
        if self._live.get(job.request.request_id) is job:
            # Before the next step of worker processes; in this one the callback sees the mark.
            self.engine.abort([job.request.request_id])

    def _draw(self) -> None:
        """The thread that owns the engine."""
        while True:
            self._replace_dead()
            try:
                job = self._jobs.get(timeout=_WATCH_S if self._restarts else None)
            except queue.Empty:
                continue
            if job is None:
                break
            self._replace_dead()
            self._current = job
            try:
                result: Any = self._run(job)
            except BaseException as error:
                result = error
            del self._live[job.request.request_id]
            self._current = None
            job.tell(result)
        self._omni.close()
        atexit.unregister(self._end)

    def _replace_dead(self) -> None:
        if not self._restarts or self._is_closed or time.monotonic() < self._retry_at:
            return
        health = self.engine.health()
        if health["state"] != "dead":
            return
        logger.error("image workers: %s; others are started", health["reason"])
        self.is_restarting = True
        try:
            self.engine.restart()
            self._retry_s = _RETRY_S
        except Exception as error:  # whatever it is, requests get the error of dead workers
            logger.error("image workers: expected a start, got: %s", error)
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _MOST_RETRY_S)
        finally:
            self.is_restarting = False

    def _run(self, job: _Job) -> OmniRequestOutput:
        if job.is_aborted:
            raise RequestAborted(f"request {job.request.request_id}: aborted before it started")
        start = time.perf_counter()
        steps: dict[int, int] = {}

        def report(event: StepEvent) -> bool:
            if job.is_aborted:
                return False
            steps[event.call] = event.step
            every = job.preview_every
            is_last = event.step == event.num_steps
            is_due = every is not None and event.step % every == 0 and not is_last
            job.tell(
                Progress(
                    job.request.request_id,
                    sum(steps.values()),
                    event.num_calls * event.num_steps,
                    tuple(event.preview()) if is_due else (),
                )
            )
            return True

        (output,) = self._omni.generate_requests([job.request], on_step=report)
        metrics = {**output.metrics, "queue_s": start - job.arrived}
        return dataclasses.replace(output, metrics=metrics)
