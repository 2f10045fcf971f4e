# SPDX-License-Identifier: Apache-2.0
"""The process of one rank other than the first.

    load, connect, measure, start, steps, evict, exit
        ──>  follower  ──>  versions, loaded, pages, ready, decisions; or failed

Imports nothing heavy before the pipe is read: a parent that dies while the model loads takes the worker
with it.
"""

from __future__ import annotations

import queue
import sys
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

from diffulex.distributed.child_process import error_parts, read_forever
from diffulex.distributed.layout import Sizes
from diffulex.log import configure, name_process

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["run_worker", "versions"]


def versions() -> str:
    """What has to be the same on all ranks."""
    import torch  # noqa: PLC0415 (slow to import)

    import diffulex_ext  # noqa: PLC0415

    return f"diffulex_ext {diffulex_ext.__version__} and torch {torch.__version__}"


def run_worker(connection: Connection[Any, Any], parent_pid: int) -> None:
    """Target of the process.

    Args:
        connection: to the first rank.
        parent_pid: that of the first rank, who must stay the parent.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def take(message: Any) -> None:
        if message[0] == "start":  # the file of the arenas follows
            message = (*message, recv_handle(connection))
        inbox.put(message)

    read_forever(connection, parent_pid, take)
    rank, logs = inbox.get()
    name_process(f"rank {rank}" if logs is not None and logs.json else "", rank)
    if logs is not None:
        configure(logs.level, file="", json=logs.json)
    try:
        _Worker(connection, inbox).run()
    except Exception as error:
        from diffulex.distributed.gloo_comm import PeerError  # noqa: PLC0415 (imported by now)

        connection.send(("failed", isinstance(error, PeerError), error_parts(error)))
        sys.exit(1)


class _Worker:
    def __init__(self, connection: Connection[Any, Any], inbox: queue.SimpleQueue[Any]) -> None:
        self._connection = connection
        self._inbox = inbox

    def _reply(self, value: Any) -> None:
        self._connection.send(("reply", value))

    def _next(self, kind: str) -> Any:
        got, *content = self._inbox.get()
        if got != kind:
            raise ValueError(f"worker: expected the message {kind}, got {got!r}")
        return content

    def run(self) -> None:
        """From the first message to the last."""
        self._reply(versions())
        from diffulex.distributed.gloo_comm import GlooComm  # noqa: PLC0415 (slow to import)
        from diffulex.engine.ranks.follower import Follower  # noqa: PLC0415
        from diffulex.engine.startup import import_workers, load_weights  # noqa: PLC0415
        from diffulex.quantization.stored import read_stored  # noqa: PLC0415

        config, model_name, rank = self._next("load")
        import_workers(config.parallel.worker_imports)
        # `quantization` none has values of a checkpoint in low precision like any others.
        stored = read_stored(config.model.model_dir)
        model = load_weights(config, model_name, show_progress=False, rank=rank, stored=stored)
        self._reply("loaded")
        parallel = config.parallel
        (port,) = self._next("connect")
        limits = parallel.distributed_timeout_seconds, parallel.collective_timeout_seconds
        comm = GlooComm(rank, Sizes.of_engine(parallel).world, port, *limits)
        follower = Follower(config, model, comm)
        del model  # the follower has it
        self._serve(follower)
        del follower
        comm.close()

    def _serve(self, follower: Any) -> None:
        from diffulex.distributed.arenas import SharedArenas  # noqa: PLC0415 (slow to import)
        from diffulex.engine.ranks.step_header import StepHeader  # noqa: PLC0415

        while True:
            message = self._inbox.get()
            if isinstance(message, bytes):
                decided = follower.execute(StepHeader.unpack(message))
                if decided is not None:
                    self._reply(decided)
                continue
            kind, *content = message
            if kind == "measure":
                self._reply(follower.num_pages())
            elif kind == "start":
                num_pages, num_bytes, count, handle = content
                follower.start(num_pages, SharedArenas(num_bytes, count, handle).tensors)
                self._reply("ready")
            elif kind == "evict":
                follower.evict(*content)
            elif kind == "exit":
                return
            else:
                raise ValueError(f"worker: expected a known message, got {kind!r}")
