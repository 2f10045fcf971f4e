# SPDX-License-Identifier: Apache-2.0
"""The supervisors of replicas over fake processes: what a restart does at every moment of a backend."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from diffulex.config.sampling_params import SamplingParams
from diffulex.log import configure
from diffulex.serving.frontend import FrontendManager
from diffulex.serving.replicas import group as group_module
from diffulex.serving.replicas.frontend import ReplicaFrontend
from diffulex.serving.replicas.group import GroupBusyError, ReplicaGroup
from diffulex.wire.protocol import PromptInput, ServingGenerate
from scripted_backend import FakeBackend, until

#: Generous: the host may be busy. Nothing is measured.
TIMEOUT_S = 60.0
LONG_S = 1000.0  # longer than any test


class FakeProcess:
    """A process that ends when it is told to; one that is stuck only when it is killed."""

    pid = 1
    exitcode = -9

    def __init__(self) -> None:
        self.sentinel, self._end = os.pipe()
        self.is_stuck = self.is_gone = self.is_killed = False

    def terminate(self) -> None:
        if not self.is_stuck:
            self.leave()

    def kill(self) -> None:
        self.is_killed = True
        self.leave()

    def leave(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            os.close(self._end)

    def is_alive(self) -> bool:
        return not self.is_gone

    def join(self) -> None:
        assert self.is_gone


class FakeProcessOwner:
    """As `BackendProcess`. `loads` and `may_stop` hold up the start and the end."""

    def __init__(self) -> None:
        self.process = FakeProcess()
        self.loads, self.may_stop, self.stops = (threading.Event() for _ in range(3))
        self.loads.set()
        self.may_stop.set()

    def start(self) -> None:
        pass

    def wait_ready(self, timeout_s, is_cancelled):
        while not self.loads.wait(0.005):
            if self.process.is_gone or is_cancelled():
                raise RuntimeError("backend failed to start")
        return {"max_num_reqs": 2}

    def stop(self) -> None:
        self.stops.set()
        assert self.may_stop.wait(TIMEOUT_S)
        self.process.leave()


class Fleet:
    """Replicas of one test; `backends[i]` are those of replica `i`, in the order they began."""

    def __init__(self, count: int) -> None:
        queues = [FakeBackend() for _ in range(count)]
        managers = [
            FrontendManager(model_id="m", send_backend=queue, recv_backend=queue)
            for queue in queues
        ]
        self.frontend = ReplicaFrontend(managers, num_retries=0)
        self.backends: list[list[FakeProcessOwner]] = [[] for _ in range(count)]
        self.upcoming: list[FakeProcessOwner] = []
        self.group = ReplicaGroup(self.frontend, self._make, startup_timeout_s=TIMEOUT_S)
        self.supervisor = self.group.supervisors[0]

    def _make(self, index: int) -> FakeProcessOwner:
        owner = self.upcoming.pop() if self.upcoming else FakeProcessOwner()
        self.backends[index].append(owner)
        return self.backends[index][-1]

    @property
    def last(self) -> FakeProcessOwner:
        """The newest backend of the first replica."""
        return self.backends[0][-1]

    async def ready(self, count: int) -> None:
        """Until backend number `count` of the first replica serves."""
        await until(lambda: len(self.backends[0]) == count and self.frontend.is_serving(0))

    async def dies_with_a_request(self) -> None:
        """The backend is killed; the stream of its request must end."""
        manager = self.frontend.managers[0]
        command = ServingGenerate("r", PromptInput([1]), SamplingParams(max_tokens=2), stream=True)
        stream = manager.generate_stream(command)
        waiting = asyncio.ensure_future(anext(stream))
        await until(lambda: manager.num_inflight)
        self.last.process.kill()
        assert (await waiting).code == "engine_dead"
        await stream.aclose()


@pytest.fixture
def run(monkeypatch):
    """Runs `scenario(fleet)`, whose replicas serve."""

    def start(scenario, count=1):
        async def main():
            fleet = Fleet(count)
            fleet.group.start_backends()
            fleet.group.watch()
            try:
                await until(lambda: not fleet.frontend.degraded)
                await asyncio.wait_for(scenario(fleet), TIMEOUT_S)
            finally:
                await fleet.group.stop()
                await fleet.frontend.stop()

        asyncio.run(asyncio.wait_for(main(), 3 * TIMEOUT_S))

    monkeypatch.setattr(group_module, "_FIRST_PAUSE_S", LONG_S)
    monkeypatch.setattr(group_module, "_LONGEST_PAUSE_S", LONG_S)
    return start


def test_lines_about_a_replica_name_it(run, capsys):
    configure("warning", file="", json=False)

    async def scenario(fleet):
        await fleet.dies_with_a_request()
        await fleet.ready(2)

    run(scenario, 2)
    lines = [
        line.split(maxsplit=3)[3]
        for line in capsys.readouterr().err.splitlines()
        if "replica 0" in line
    ]
    assert len(lines) == 2
    assert lines[0].startswith("serving.frontend[replica 0] backend: the process was killed")
    assert lines[1] == "serving.replicas.group[replica 0] starting a new backend"


def test_a_restart_cuts_a_pause_short(run):
    """Later deaths are noticed as ever."""

    async def scenario(fleet):
        fleet.last.process.kill()
        await fleet.ready(2)  # there is no first pause
        fleet.last.process.kill()
        await until(lambda: fleet.supervisor._num_deaths == 2)  # it pauses
        fleet.supervisor.restart()
        await fleet.ready(3)
        assert fleet.supervisor.num_restarts == 2
        await fleet.dies_with_a_request()

    run(scenario)


def test_a_restart_while_a_dead_backend_is_put_away(run):
    async def scenario(fleet):
        first = fleet.last
        first.may_stop.clear()
        first.process.kill()
        await until(first.stops.is_set)
        fleet.supervisor.restart()
        fleet.supervisor.restart()
        first.may_stop.set()
        await fleet.ready(2)
        assert fleet.supervisor.num_restarts == 1
        await fleet.dies_with_a_request()

    run(scenario)


def test_a_backend_that_is_told_to_leave_does_not_become_ready(run, monkeypatch):
    async def scenario(fleet):
        loading = FakeProcessOwner()
        loading.loads.clear()
        loading.process.is_stuck = True
        fleet.upcoming.append(loading)
        fleet.supervisor.restart()
        await until(lambda: fleet.last is loading)
        ready = []
        monkeypatch.setattr(fleet.frontend, "replica_ready", lambda *report: ready.append(report))
        fleet.supervisor.restart()
        loading.loads.set()
        loading.process.leave()
        await fleet.ready(3)
        assert len(ready) == 1

    run(scenario)


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_backend_that_does_not_leave_is_killed(run, monkeypatch, is_loading):
    monkeypatch.setattr(group_module, "_LEAVE_S", 0.01)

    async def scenario(fleet):
        stuck = FakeProcessOwner()
        if is_loading:
            stuck.loads.clear()
        stuck.process.is_stuck = True
        fleet.upcoming.append(stuck)
        fleet.supervisor.restart()
        await until(lambda: fleet.last is stuck and (is_loading or fleet.frontend.is_serving(0)))
        fleet.supervisor.restart()
        await fleet.ready(3)
        assert stuck.process.is_killed
        assert not fleet.backends[0][0].process.is_killed

    run(scenario)


def test_a_backend_that_leaves_is_not_killed(run, monkeypatch):
    monkeypatch.setattr(group_module, "_LEAVE_S", 0.01)

    async def scenario(fleet):
        first = fleet.last
        fleet.supervisor.restart()
        await fleet.ready(2)
        await asyncio.sleep(0.05)  # the time it had is over
        assert not first.process.is_killed
        assert not fleet.last.process.is_killed

    run(scenario)


def test_a_replica_that_is_taken_out_stays_out_after_a_restart(run):
    async def scenario(fleet):
        held = fleet.frontend.held
        fleet.group.hold(0)
        await fleet.group.roll([0])
        assert held == {0}
        fleet.group.release(0)
        rolling = fleet.group.roll([0, 1])
        await until(lambda: held == {0})
        fleet.group.hold(0)
        fleet.group.hold(1)
        await rolling
        assert held == {0, 1}
        fleet.group.release(0)
        assert held == {1}
        await fleet.group.roll([1])
        assert held == {1}
        assert [len(owners) for owners in fleet.backends] == [3, 3]

    run(scenario, count=2)


def test_the_last_one_in_service_is_not_restarted(run):
    """The other one has been taken out. Where there is no other one, nothing else can be done."""

    async def scenario(fleet):
        fleet.group.hold(0)
        with pytest.raises(GroupBusyError, match="expected another one in service, got none"):
            fleet.group.roll([1])
        await fleet.group.roll([0, 1])
        assert [len(owners) for owners in fleet.backends] == [2, 1]
        assert fleet.frontend.is_serving(1)
        fleet.group.release(0)
        fleet.group.hold(1)
        await fleet.group.roll([0, 1])
        assert [len(owners) for owners in fleet.backends] == [2, 2]

    run(scenario, count=2)

    async def alone(fleet):
        await fleet.group.roll([0])
        assert [len(owners) for owners in fleet.backends] == [2]

    run(alone)
