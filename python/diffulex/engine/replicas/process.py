# SPDX-License-Identifier: Apache-2.0
"""One replica: an ordinary engine that is told over a pipe what to decode, and tells what it did.

    add, abort, call, watch, observe, ask, go_on, exit
        ──>  engine  ──>  hello, ready or failed, step, step_failed, refused, answer, died

Imports nothing heavy before the pipe is read: a parent that dies while the model loads takes the
replica with it.
"""

from __future__ import annotations

import dataclasses
import queue
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diffulex.distributed.child_process import error_parts, read_forever
from diffulex.errors import DiffulexError, EngineDeadError
from diffulex.log import configure, name_process

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from diffulex.engine.engine import Diffulex
    from diffulex.engine.output import StepOutput

__all__ = ["run_replica"]


def run_replica(connection: Connection[Any, Any], parent_pid: int) -> None:
    """Target of the process: builds the engine of the options it is sent, then serves.

    Args:
        connection: to the parent.
        parent_pid: who must stay the parent.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    read_forever(connection, parent_pid, inbox.put)
    options, logs, name, coupling = inbox.get()
    if logs is not None:
        # In JSON the parent cannot put the name before a line.
        name_process(name if logs.json else "")
        configure(logs.level, file="", json=logs.json)
    connection.send(("hello",))
    try:
        from diffulex.engine.engine import Diffulex  # noqa: PLC0415 (slow to import)

        engine = Diffulex.from_options(options, coupling)
    except Exception as error:
        connection.send(("failed", error_parts(error)))
        sys.exit(1)
    connection.send(("ready", engine.config.cache.num_pages, engine.warm_up_s))
    replica = _Replica(engine, connection, is_coupled=coupling is not None)
    try:
        while replica.serve(inbox):
            pass
    except Exception as error:
        from diffulex.distributed.store import PeerError  # noqa: PLC0415 (imported by now)

        is_hearsay = isinstance(error, PeerError)
        connection.send(("died", error_parts(error), is_hearsay))
        if is_hearsay:
            sys.exit(1)  # whoever has ended tells why
        raise
    finally:
        engine.close()


def _check_device(engine: Diffulex) -> None:
    """Raises what a CUDA device says that has failed for good: no step of this process will work."""
    device = engine.config.model.device
    if device.startswith("cuda"):
        import torch  # noqa: PLC0415 (slow to import)

        torch.cuda.synchronize(device)


class _Replica:
    """The engine with the parent's ids of its requests."""

    def __init__(
        self, engine: Diffulex, connection: Connection[Any, Any], *, is_coupled: bool = False
    ) -> None:
        self._engine = engine
        self._is_coupled = is_coupled
        self._connection = connection
        #: The parent's id of each request that is open, and the other way round.
        self._outer: dict[int, int] = {}
        self._inner: dict[int, int] = {}
        self._blocks: list[int] = []
        #: A step has failed; the parent is to raise that before the next one.
        self._is_halted = False
        self._actions: dict[str, Callable[..., None]] = {
            "add": self._add,
            "abort": self._abort,
            "call": self._call,
            "watch": self._watch,
            "observe": self._observe,
            "ask": self._ask,
            "go_on": self._go_on,
        }

    def serve(self, inbox: queue.SimpleQueue[Any]) -> bool:
        """Takes what was sent, waits for it if there is nothing to do, and makes a step.

        Returns:
            Whether to go on.
        """
        while not self._is_busy() or not inbox.empty():
            action, *arguments = inbox.get()
            if action == "exit":
                return False
            self._actions[action](*arguments)
        self._step()
        return True

    def _is_busy(self) -> bool:
        return not self._is_halted and self._engine.has_unfinished()

    def _add(self, outer: int, token_ids: Any, params: Any, options: dict[str, bool]) -> None:
        try:
            inner = self._engine.add_request(token_ids, params, **options)
        except (DiffulexError, ValueError) as error:
            self._connection.send(("refused", outer, error_parts(error)[1]))
            return
        self._inner[outer], self._outer[inner] = inner, outer

    def _abort(self, outer: int) -> None:
        if outer in self._inner:
            self._engine.abort(self._inner[outer])

    def _call(self, number: int) -> None:
        self._engine._executor.call(number)

    def _watch(self, outer: int) -> None:
        if outer in self._inner:
            self._engine.watch_buffer(self._inner[outer])

    def _observe(self) -> None:
        self._engine.observe_blocks(self._blocks.append)

    def _go_on(self) -> None:
        self._is_halted = False

    def _ask(self, number: int, what: str) -> None:
        answers: dict[str, Callable[[], Any]] = {
            "flush_prefix_cache": self._engine.flush_prefix_cache,
            "stats": self._stats,
        }
        self._connection.send(("answer", number, answers[what]()))

    def _stats(self) -> dict[str, int]:
        stats = self._engine.stats()
        return {name: getattr(stats, name) for name in dir(stats) if name.startswith("num_")}

    def _step(self) -> None:
        from diffulex.engine.metrics import RunStats  # noqa: PLC0415 (imported by the engine)

        loop = self._engine._loop
        loop.ledger.run_stats = stats = RunStats()
        try:
            steps = self._engine.step()
        except EngineDeadError:
            raise  # no step will ever run again: the parent has other replicas, or none
        except Exception as error:
            if self._is_coupled:
                raise  # others wait for the rest of this step
            _check_device(self._engine)
            self._is_halted = True
            self._connection.send(("step_failed", error_parts(error)))
            return
        if not steps and stats.num_steps == 0 and self._is_coupled:
            return  # it was a step of others
        outputs = [self._named(output) for output in steps]
        # The parent counts them itself.
        stats.num_graph_steps = stats.num_graph_fallbacks = 0
        blocks, self._blocks[:] = tuple(self._blocks), ()
        gauges = (loop.counts, loop.num_watched, loop.ledger.num_active_blocks)
        self._connection.send(("step", outputs, stats, gauges, blocks))

    def _named(self, output: StepOutput) -> StepOutput:
        """The output under the parent's id of its request."""
        outer = self._outer[output.req_id]
        if output.is_finished:
            del self._inner[outer], self._outer[output.req_id]
        result, snapshot = output.output, output.snapshot
        return dataclasses.replace(
            output,
            req_id=outer,
            output=None if result is None else dataclasses.replace(result, req_id=outer),
            snapshot=None if snapshot is None else dataclasses.replace(snapshot, req_id=outer),
        )
