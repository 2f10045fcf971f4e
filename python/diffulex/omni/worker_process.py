# SPDX-License-Identifier: Apache-2.0
"""One rank of the image engine: a process that holds the pipeline and does what it is told.

Messages are handled strictly in the order of their arrival, which is the same on all ranks: this keeps
collectives aligned.
"""

from __future__ import annotations

import importlib
import os
import queue
import shutil
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.env import get_text
from diffulex.log import configure, get_logger, name_process
from diffulex.omni.message_queue import Kind, MessageQueue, QueueHandle
from diffulex.omni.worker import PipelineCall, StepEvent, Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.omni.groups import RankGroups

__all__ = ["WorkerProc", "import_modules", "main"]

logger = get_logger(__name__)

_HEARTBEAT_S = 1.0
#: Methods of the worker that a message may call.
_METHODS = ("cache_summary", "generate", "latents_shape", "memory_stats", "prompt_tokens")


def import_modules(names: str | None) -> None:
    """Imports the modules of `worker_imports`, which register pipelines.

    Raises:
        ImportError: one of them cannot be imported.
    """
    for name in (names or "").split(","):
        if name.strip():
            importlib.import_module(name.strip())


def main(settings: Mapping[str, Any]) -> None:
    """Runs a rank until it is told to leave, or the engine's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle = QueueHandle(*settings["handle"])
    _watch_parent(settings["parent"], handle.directory)
    if settings["world"] > 1:
        name_process(f"r{settings['rank']}", settings["rank"])
    configure(level=settings["log_level"])
    worker_queue = MessageQueue.create_from_handle(handle, settings["rank"])
    try:
        worker, groups = _make_worker(settings)
        worker_queue.enqueue(Kind.READY, {"facts": worker.facts._asdict()})
    except BaseException as error:
        worker_queue.enqueue(Kind.READY, {"error": _describe(error)})
        worker_queue.close()
        os._exit(1)
    WorkerProc(worker, worker_queue, groups).run()
    worker_queue.close()
    # The threads of collectives have nothing left to do, and some abort when they are joined.
    os._exit(0)


def _make_worker(settings: Mapping[str, Any]) -> tuple[Worker, RankGroups]:
    import torch  # noqa: PLC0415 (slow; the queue is connected first)

    from diffulex.omni.config import OmniDiffusionConfig  # noqa: PLC0415
    from diffulex.omni.groups import RankGroups  # noqa: PLC0415
    from diffulex.omni.loader import load_pipeline  # noqa: PLC0415
    from diffulex.omni.stage_loader import Stage  # noqa: PLC0415

    torch.set_num_threads(int(get_text("OMP_NUM_THREADS")))
    config = OmniDiffusionConfig.from_kwargs(**settings["config"])
    import_modules(config.engine.worker_imports)
    device = settings["device"]
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    store = Path(settings["handle"][0]) / "store"
    timeout_s = config.engine.dist_timeout_s
    groups = RankGroups(config.parallel.grid, settings["rank"], store, device, timeout_s)
    stage = None
    if groups.group("pp") is not None:
        stages = groups.ranks("pp")
        stage = Stage(stages.index(groups.rank), len(stages))
    return Worker(load_pipeline(config, stage, device), groups), groups


def _watch_parent(parent: int, directory: str) -> None:
    """Ends this process, and removes the sockets, as soon as the engine's process is gone."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def leave() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    def wait_for_end() -> None:
        os.read(pipe, 1)
        leave()

    def compare_parent() -> None:
        # A copy of the engine's process may hold its end of the pipe open.
        while os.getppid() == parent:
            time.sleep(_HEARTBEAT_S)
        leave()

    for target in (wait_for_end, compare_parent):
        threading.Thread(target=target, name="diffulex-parent", daemon=True).start()


def _describe(error: BaseException) -> dict[str, str]:
    described = {
        "kind": type(error).__name__,
        "message": str(error),
        "trace": "".join(traceback.format_exception(error)),
    }
    # Names of files may hold what is no text.
    return {name: text.encode(errors="replace").decode() for name, text in described.items()}


class _Leave(Exception):  # noqa: N818 (how a call ends when the engine closes)
    """The engine closes while a call runs."""


class WorkerProc:
    """Handles the messages of one rank.

    Args:
        worker: the loaded pipeline.
        worker_queue: connected to the engine.
        groups: of this rank.
    """

    def __init__(self, worker: Worker, worker_queue: MessageQueue, groups: RankGroups) -> None:
        self._worker = worker
        self._queue = worker_queue
        self._groups = groups
        self._rank = groups.rank
        self._seq = 0
        self._is_watched = False
        #: (sequence number, step of the running call, whether others follow, when it was done), for
        #: the heartbeat.
        self._status: tuple[int, int, bool, float] | None = None
        threading.Thread(target=self._beat, name="diffulex-heartbeat", daemon=True).start()

    def run(self) -> None:
        """Until the engine says that it is enough."""
        while True:
            message = self._queue.dequeue()
            if message.kind == Kind.SHUTDOWN:
                return
            # An ABORT that arrives here came after its request had ended.
            if message.kind != Kind.RPC:
                continue
            self._seq = message.seq
            self._status = (message.seq, 0, False, time.monotonic())
            try:
                result, has_reply = self.execute_rpc(message.value)
                reply = {"result": result if has_reply else None}
            except _Leave:
                return
            except Exception as error:
                logger.debug("request failed", exc_info=True)
                reply = {"error": _describe(error)}
            self._status = None
            self._reply(Kind.DONE, reply)

    def _reply(self, kind: Kind, reply: dict[str, Any]) -> None:
        try:
            self._queue.enqueue(kind, reply, seq=self._seq)
        except Exception as error:  # a pipeline that gives something else than pictures
            self._queue.enqueue(kind, {"error": _describe(error)}, seq=self._seq)

    def execute_rpc(self, body: Mapping[str, Any]) -> tuple[Any, bool]:
        """(result, whether this rank sends it).

        Raises:
            ValueError: workers have no such method.
        """
        method, output_rank = body["method"], body["output_rank"]
        if method not in _METHODS:
            known = ", ".join(_METHODS)
            raise ValueError(f"collective_rpc: expected one of {known}, got {method!r}")
        has_reply = output_rank is None or output_rank == self._rank
        if not has_reply and not body["exec_all_ranks"]:
            return None, False
        if method == "generate":
            return self._generate(**body["kwargs"]), has_reply
        return getattr(self._worker, method)(*body["args"], **body["kwargs"]), has_reply

    def _generate(self, calls: list[dict[str, Any]], is_watched: bool) -> list[tuple[Any, ...]]:
        self._is_watched = is_watched and self._groups.is_leader
        outputs, failure = None, None
        try:
            outputs = list(
                self._worker.run([PipelineCall(**call) for call in calls], self._on_step)
            )
        except _Leave:
            raise
        except Exception as error:
            failure = error
        # Replicas wait for each other, also for one that failed.
        gathered = self._groups.gather(outputs, "dp") if self._groups.is_leader else None
        if failure is not None:
            raise failure
        return [drawn for part in gathered or () for drawn in part or ()]

    def _on_step(self, event: StepEvent) -> bool:
        self._status = (self._seq, event.step, event.step < event.num_steps, time.monotonic())
        is_stopped = not self._ask(event) if self._is_watched else self._is_stopped()
        return not self._groups.agree(is_stopped)

    def _ask(self, event: StepEvent) -> bool:
        """Whether the callback of the engine lets the call go on."""
        names = ("request_ids", "step", "num_steps", "call", "num_calls")
        shown = {name: getattr(event, name) for name in names}
        self._queue.enqueue(Kind.PROGRESS, {"event": shown}, seq=self._seq)
        while True:
            message = self._queue.dequeue()
            if message.kind == Kind.SHUTDOWN:
                raise _Leave
            if message.seq != self._seq:
                continue
            if message.kind == Kind.ABORT:
                return False
            if message.value == "preview":
                self._reply(Kind.PROGRESS, self._preview(event))
            elif message.kind == Kind.ANSWER:
                return bool(message.value == "go")

    def _is_stopped(self) -> bool:
        """Whether an ABORT of this request has arrived; never waits."""
        try:
            while True:
                message = self._queue.dequeue(0)
                if message.kind == Kind.SHUTDOWN:
                    raise _Leave
                if message.kind == Kind.ABORT and message.seq == self._seq:
                    return True
        except queue.Empty:
            return False

    def _preview(self, event: StepEvent) -> dict[str, Any]:
        try:
            return {"preview": event.preview()}
        except Exception as error:
            return {"error": _describe(error)}

    def _beat(self) -> None:
        """Tells the engine, while a request runs, that this process lives and where it is."""
        second = MessageQueue.create_from_handle(self._queue.handle, self._rank, is_second=True)
        while True:
            status = self._status
            if status is not None:
                seq, step, is_stepping, since = status
                age_s = time.monotonic() - since
                value = {"step": step, "is_stepping": is_stepping, "step_age_s": age_s}
                second.enqueue(Kind.HEARTBEAT, value, seq=seq)
            time.sleep(_HEARTBEAT_S)
