# SPDX-License-Identifier: Apache-2.0
"""Signs of life of the backend, sent by a thread that never touches the engine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from diffulex.log import get_logger
from diffulex.serving.zmq_queue import ZmqPushQueue
from diffulex.wire.messages import ServingHeartbeat
from diffulex.wire.protocol import serving_event_to_dict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["HeartbeatThread", "StepStatus"]

logger = get_logger(__name__)

INTERVAL_S = 1.0
# An orphan whose engine thread does not come back must not keep the device.
_ORPHAN_GRACE_S = 10.0


class StepStatus:
    """What the engine thread leaves for the heartbeat: plain attributes, each set at once."""

    def __init__(self) -> None:
        self.step_seq = 0
        self.step_started: float | None = None
        self.stats: dict[str, Any] = {}

    def begin_step(self) -> None:
        """A step starts."""
        self.step_seq += 1
        self.step_started = time.monotonic()

    def end_step(self) -> None:
        """No step runs."""
        self.step_started = None

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """A block inside a step that may take any time."""
        self.end_step()
        try:
            yield
        finally:
            self.begin_step()

    def running_s(self) -> float:
        """How long the running step has taken so far."""
        started = self.step_started
        return 0.0 if started is None else time.monotonic() - started

    def heartbeat(self) -> ServingHeartbeat:
        """What a heartbeat says now; from any thread."""
        return ServingHeartbeat(
            ts=time.time(),
            step_seq=self.step_seq,
            step_running_s=self.running_s(),
            stats=self.stats,
        )


class HeartbeatThread:
    """Sends a heartbeat every second and notices when the parent process is gone.

    Args:
        event_addr: where the frontend pulls events; the thread has a separate socket.
        status: of the engine thread.
        parent_pid: who must stay the parent.
        on_orphaned: called once from the thread.
    """

    def __init__(
        self,
        event_addr: str,
        status: StepStatus,
        parent_pid: int,
        on_orphaned: Callable[[], None],
    ) -> None:
        self._event_addr = event_addr
        self._status = status
        self._parent_pid = parent_pid
        self._on_orphaned = on_orphaned
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diffulex-heartbeat", daemon=True)

    def start(self) -> None:
        """Starts sending."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        queue: ZmqPushQueue[ServingHeartbeat] = ZmqPushQueue(
            self._event_addr, create=False, encoder=serving_event_to_dict
        )
        try:
            while True:
                queue.put(self._status.heartbeat())
                if self._stop.wait(INTERVAL_S):
                    return
                if os.getppid() != self._parent_pid:
                    self._leave()
                    return
        finally:
            queue.stop()

    def _leave(self) -> None:
        logger.warning("the parent process is gone: shutting down")
        self._on_orphaned()
        if not self._stop.wait(_ORPHAN_GRACE_S):
            os._exit(1)
