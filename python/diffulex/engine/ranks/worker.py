# SPDX-License-Identifier: Apache-2.0
"""The process of one rank other than the first.

    load, connect, measure, start or start_apart, steps of the host and of the loop, evict,
    start_recording, stop_recording, exit; expect and take_part where replicas share the experts
        ──>  follower  ──>  versions, loaded, pages, ready, decisions, recordings; or failed

Imports nothing heavy before the pipe is read: a parent that dies while the model loads takes the worker
with it.
"""

from __future__ import annotations

import hashlib
import queue
import socket
import sys
import time
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

from diffulex.distributed.child_process import error_parts, read_forever
from diffulex.distributed.layout import LOOPBACK, Sizes
from diffulex.log import configure, name_process

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from diffulex.config.table import ParallelConfig
    from diffulex.distributed.cuda_comm import CudaComm
    from diffulex.distributed.gloo_comm import GlooComm

__all__ = ["checkpoint_digest", "make_comm", "run_worker", "versions"]

#: Files of a checkpoint that tell it from others without reading its weights.
_DIGESTED = ("config.json", "model.safetensors.index.json")


def versions() -> str:
    """What has to be the same on all ranks."""
    import torch  # noqa: PLC0415 (slow to import)

    import diffulex_ext  # noqa: PLC0415

    return f"diffulex_ext {diffulex_ext.__version__} and torch {torch.__version__}"


def checkpoint_digest(model_dir: Path) -> str:
    """A few digits that are those of the same checkpoint on another host."""
    digest = hashlib.sha256()
    for name in _DIGESTED:
        path = model_dir / name
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _own_host(connection: Connection[Any, Any]) -> str:
    """The address of this host for the one at the other end."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as end:
        if end.family in (socket.AF_INET, socket.AF_INET6):
            return str(end.getsockname()[0])
    return LOOPBACK


def make_comm(
    parallel: ParallelConfig, device: str, rank: int, store: Any, host: str
) -> GlooComm | CudaComm:
    """The exchange of a rank with the others, which make theirs at the same time.

    Args:
        parallel: of the engine.
        device: of the rank.
        rank: of this process.
        store: of the first rank, or its place, as for `diffulex.distributed.store.join_store`.
        host: the address of this process for the other ranks.

    Raises:
        ConfigError: the ranks cannot exchange as the configuration says.
    """
    import torch  # noqa: PLC0415 (slow to import)

    from diffulex.distributed.cuda_comm import CudaComm  # noqa: PLC0415
    from diffulex.distributed.gloo_comm import GlooComm  # noqa: PLC0415

    where = rank, Sizes.of_engine(parallel).world, store
    limits = float(parallel.distributed_timeout_seconds), float(parallel.collective_timeout_seconds)
    if device == "cpu":
        return GlooComm(*where, *limits, host)
    return CudaComm(
        *where,
        torch.device(device),
        *limits,
        backend=parallel.distributed_backend,
        custom_all_reduce=parallel.custom_all_reduce,
    )


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
        from diffulex.distributed.store import PeerError  # noqa: PLC0415 (imported by now)

        connection.send(("failed", isinstance(error, PeerError), error_parts(error)))
        sys.exit(1)


class _Worker:
    def __init__(self, connection: Connection[Any, Any], inbox: queue.SimpleQueue[Any]) -> None:
        self._connection = connection
        self._inbox = inbox
        self._num_told = 0

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
        from diffulex.engine.ranks.follower import Follower  # noqa: PLC0415 (slow to import)
        from diffulex.engine.replicas.coupled import (  # noqa: PLC0415 (slow to import)
            connect_rows,
            couple_experts,
        )
        from diffulex.engine.startup import import_workers, load_weights  # noqa: PLC0415
        from diffulex.quantization.stored import read_stored  # noqa: PLC0415

        config, model_name, rank, coupling = self._next("load")
        if config.model.device != "cpu":
            import torch  # noqa: PLC0415 (slow to import)

            torch.cuda.set_device(config.model.device)  # for whatever names no device
        import_workers(config.parallel.worker_imports)
        # `quantization` none has values of a checkpoint in low precision like any others.
        stored = read_stored(config.model.model_dir)
        place = rank if coupling is None else coupling.rank(config, rank)
        links = None if coupling is None else connect_rows(coupling, config, rank)
        model = load_weights(config, model_name, show_progress=False, rank=place, stored=stored)
        self._reply(checkpoint_digest(config.model.model_dir))
        (store,) = self._next("connect")
        host = _own_host(self._connection)
        comm = make_comm(config.parallel, config.model.device, rank, store, host)
        follower = Follower(config, model, comm)
        if links is not None:
            follower.couple(couple_experts(config, model, place, links.rows))
        del model  # the follower has it
        self._serve(follower)
        follower.close()
        del follower
        comm.close()

    def _begin(self) -> None:
        """A step that the first rank has told of begins."""
        from diffulex.engine.ranks.step_header import is_looked_at  # noqa: PLC0415 (imported by now)

        if is_looked_at(self._num_told):
            self._connection.send(("began", time.monotonic()))
        self._num_told += 1

    def _decided(self, follower: Any, decided: bytes | None) -> None:
        follower.check()  # before anything is made of it
        if decided is not None:
            self._reply(decided)

    def _serve(self, follower: Any) -> None:
        from diffulex.distributed.arenas import SharedArenas  # noqa: PLC0415 (slow to import)
        from diffulex.engine.ranks.step_header import HEADER_BYTES, StepHeader  # noqa: PLC0415

        arenas: SharedArenas | None = None
        while True:
            message = self._inbox.get()
            if isinstance(message, bytes):
                self._begin()
                header = StepHeader.unpack(message)
                if arenas is not None:
                    arenas.fill(header.arena, memoryview(message)[HEADER_BYTES:])
                self._decided(follower, follower.execute(header))
                continue
            kind, *content = message
            if kind == "measure":
                self._reply(follower.num_pages())
            elif kind == "start":
                num_pages, num_bytes, count, handle = content
                follower.start(num_pages, SharedArenas(num_bytes, count, handle).tensors)
                self._reply("ready")
            elif kind == "start_apart":
                num_pages, num_bytes, count = content
                handle = SharedArenas.create(num_bytes, count)
                arenas = SharedArenas(num_bytes, count, handle)
                follower.start(num_pages, arenas.tensors)
                self._reply("ready")
            elif kind == "follow":
                self._begin()
                told, arrays = content
                if arenas is not None and arrays:
                    arenas.fill(told.arena, memoryview(arrays))
                self._decided(follower, follower.follow(told))
            elif kind == "stop_recording":
                self._reply(follower.stop_recording())
            elif kind in ("evict", "expect", "take_part", "start_recording"):
                getattr(follower, kind)(*content)
            elif kind == "exit":
                return
            else:
                raise ValueError(f"worker: expected a known message, got {kind!r}")
