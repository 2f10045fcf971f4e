# SPDX-License-Identifier: Apache-2.0
"""One replica: an ordinary engine that is told over a pipe what to decode, and tells what it did.

    add, abort, call, watch, observe, ask, go_on, exit
        ──>  engine  ──>  hello, ready or failed, step, step_failed, refused, answer, died

A parent that reads too slowly stops the steps of this engine's requests, and nothing else: others that
share its experts have theirs.

Imports nothing heavy before the pipe is read: a parent that dies while the model loads takes the
replica with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from diffulex.distributed.child_process import error_parts, read_forever
from diffulex.distributed.outbox import Outbox
from diffulex.distributed.start import number_replica
from diffulex.errors import DiffulexError, EngineDeadError
from diffulex.log import configure, name_process

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from diffulex.engine.engine import Diffulex
    from diffulex.engine.metrics import RunStats
    from diffulex.engine.output import StepOutput
    from diffulex.engine.replicas.coupled import CoupledExecutor

__all__ = ["CoupledReplica", "ReplicaServer", "run_replica"]

#: How long others wait, when none has rows, for one that nobody reads: for them this is a pause.
_ASIDE_S = 0.05


def run_replica(connection: Connection[Any, Any], parent_pid: int) -> None:
    """Target of the process: builds the engine of the options it is sent, then serves.

    Args:
        connection: to the parent.
        parent_pid: who must stay the parent.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    read_forever(connection, parent_pid, inbox.put)
    options, logs, index, coupling = inbox.get()
    number_replica(index)
    if logs is not None:
        # In JSON the parent cannot put the name before a line.
        name_process(f"replica {index}" if logs.json else "")
        configure(logs.level, file="", json=logs.json)
    outbox = Outbox(connection, lambda: inbox.put(("room",)))
    outbox.put(("hello",))
    try:
        from diffulex.engine.engine import Diffulex  # noqa: PLC0415 (slow to import)

        engine = Diffulex.from_options(options, coupling)
    except Exception as error:
        outbox.put(("failed", error_parts(error)))
        outbox.close()
        sys.exit(1)
    outbox.put(("ready", engine.config.cache.num_pages, engine.warm_up_s))
    # Also while this thread waits: for a request, or for replicas that wait for the ranks of this one.
    engine._executor.on_death(functools.partial(_tell_death, outbox))
    server = ReplicaServer if coupling is None else CoupledReplica
    replica = server(engine, outbox)
    try:
        while replica.serve(inbox):
            pass
    except Exception as error:
        from diffulex.distributed.store import PeerError  # noqa: PLC0415 (imported by now)

        if isinstance(error, PeerError) or (
            isinstance(error, EngineDeadError) and error.is_hearsay
        ):
            outbox.put(("died", error_parts(error), True))
            sys.exit(1)  # whoever has ended tells why
        outbox.put(("died", error_parts(error), False))
        raise
    finally:
        try:
            engine.close()  # at once, for those that wait for it; the parent may read late
        finally:
            outbox.close()


def _tell_death(outbox: Outbox, error: DiffulexError) -> None:
    """Has the parent know at once that the ranks of this replica are gone."""
    is_hearsay = isinstance(error, EngineDeadError) and error.is_hearsay
    outbox.put(("died", error_parts(error), is_hearsay))


def _check_device(engine: Diffulex) -> None:
    """Raises what a CUDA device says that has failed for good: no step of this process will work."""
    device = engine.config.model.device
    if device.startswith("cuda"):
        import torch  # noqa: PLC0415 (slow to import)

        torch.cuda.synchronize(device)


class ReplicaServer:
    """The engine with the parent's ids of its requests.

    Args:
        engine: closed by whoever made it.
        outbox: to the parent.
    """

    def __init__(self, engine: Diffulex, outbox: Outbox) -> None:
        self._engine = engine
        self._outbox = outbox
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
            "room": self._look_again,
        }

    def serve(self, inbox: queue.SimpleQueue[Any]) -> bool:
        """Takes what was sent, waits for it if there is nothing to do, and makes a step.

        Returns:
            Whether to go on.
        """
        while (message := self._next(inbox)) is not None:
            action, *arguments = message
            if action == "exit":
                return False
            self._actions[action](*arguments)
        self._step()
        return True

    def _next(self, inbox: queue.SimpleQueue[Any]) -> Any:
        """The next message; None: there is none, and a step to make."""
        seconds = self._patience()
        with contextlib.suppress(queue.Empty):
            return inbox.get(block=seconds != 0.0, timeout=seconds)
        return None

    def _patience(self) -> float | None:
        """Seconds to wait for a message before the next step; None: there is no step to make."""
        return 0.0 if self._can_step() and self._engine.has_unfinished() else None

    def _can_step(self) -> bool:
        return not self._is_halted and not self._outbox.is_full

    def _add(self, outer: int, token_ids: Any, params: Any, options: dict[str, bool]) -> None:
        try:
            inner = self._engine.add_request(token_ids, params, **options)
        except EngineDeadError:
            raise  # another replica can have it
        except (DiffulexError, ValueError) as error:
            self._outbox.put(("refused", outer, error_parts(error)[1]))
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

    def _look_again(self) -> None:
        """The parent has read: `_patience` is asked after every message."""

    def _ask(self, number: int, what: str) -> None:
        answers: dict[str, Callable[[], Any]] = {
            "flush_prefix_cache": self._engine.flush_prefix_cache,
            "stats": self._stats,
        }
        self._outbox.put(("answer", number, answers[what]()))

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
            self._step_failed(error)
            return
        if self._is_worth_telling(steps, stats):
            self._tell(steps, stats)

    def _step_failed(self, error: Exception) -> None:
        """Tells of a step after which there may be others."""
        _check_device(self._engine)
        self._is_halted = True
        self._outbox.put(("step_failed", error_parts(error)))

    def _is_worth_telling(self, steps: list[StepOutput], stats: RunStats) -> bool:
        del steps, stats
        return True

    def _tell(self, steps: list[StepOutput], stats: RunStats) -> None:
        loop = self._engine._loop
        outputs = [self._named(output) for output in steps]
        # The parent counts them itself.
        stats.num_graph_steps = stats.num_graph_fallbacks = 0
        blocks, self._blocks[:] = tuple(self._blocks), ()
        gauges = (loop.counts, loop.num_watched, loop.ledger.num_active_blocks)
        self._outbox.put(("step", outputs, stats, gauges, blocks))

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


class CoupledReplica(ReplicaServer):
    """One that others wait for in every step: it takes part in theirs also when nobody reads of its own."""

    #: No other one had rows when they last met.
    _is_quiet = False

    def _patience(self) -> float | None:
        if self._can_step() or not self._executor.is_called:
            return super()._patience()
        return _ASIDE_S if self._is_quiet else 0.0

    def _call(self, number: int) -> None:
        self._is_quiet = False
        super()._call(number)

    def _step(self) -> None:
        if self._can_step():
            super()._step()
        else:
            self._is_quiet = not self._executor.stand_aside(has_more=bool(self._inner))

    def _step_failed(self, error: Exception) -> None:
        raise error  # others wait for the rest of this step

    def _is_worth_telling(self, steps: list[StepOutput], stats: RunStats) -> bool:
        return bool(steps) or stats.num_steps > 0  # else it was a step of others

    @property
    def _executor(self) -> CoupledExecutor:
        return cast("CoupledExecutor", self._engine._executor)
