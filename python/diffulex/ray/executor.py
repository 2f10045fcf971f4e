# SPDX-License-Identifier: Apache-2.0
"""Replicas and ranks as actors of a Ray cluster (`distributed_executor="ray"`).

Ray decides where a process is, starts it and tells when its node is gone. What an engine is told goes
over a connection that the process opens to whoever started it: a call of an actor takes ten times as
long. An actor runs what a process of this host would run, and so ends with that connection.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import socket
import struct
import subprocess
import time
from collections import deque
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from diffulex.distributed.child_process import ChildProcess, describe_exit
from diffulex.distributed.start import use_rank_starter
from diffulex.env import get_text
from diffulex.errors import EngineDeadError
from diffulex.ray.cluster import bundle_of, join_cluster, place_replicas, remove_place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex.distributed.layout import Sizes

__all__ = ["RankActor", "RayChild", "Replicas"]

#: A process that imports this package on a loaded host.
_CONNECT_S = 120.0
#: Longest wait for the key of whoever connects.
_CHALLENGE_S = 10
_ACCEPT_POLL_S = 0.2
#: For Ray to say how a process has ended whose connection has.
_CAUSE_S = 1.0
#: Seconds after which a silent host is asked whether it is there, between such questions, and how many
#: of them may go unanswered. Together less than the 3 s in which a lost node has to be known.
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2}
_UNACKNOWLEDGED_MS = 2500
#: Ray would show each process its own device alone, and ranks of one host could not open each other's
#: memory.
_ACTOR_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class _Place(NamedTuple):
    """Where an actor is.

    Attributes:
        host: address of its node.
        node: the node's id.
        pid: of its process.
        devices: CUDA devices that Ray gives it, as the node numbers them.
    """

    host: str
    node: str
    pid: int
    devices: tuple[int, ...]


class _Start(NamedTuple):
    """What a process is to run, and whom it belongs to.

    Attributes:
        address: where its owner waits for its connection.
        key: that both ends know.
        target: `module:function`, as for `ChildProcess`.
        ranks: actors, and their places, for the other ranks of an engine in it.
    """

    address: tuple[str, int]
    key: bytes
    target: str
    ranks: Sequence[tuple[Any, _Place]]


class RankActor:
    """The process of one rank, on whatever node Ray has put it. For `ray.remote`."""

    def place(self) -> _Place:
        """Where it is."""
        context = ray.get_runtime_context()
        devices = tuple(int(item) for item in context.get_accelerator_ids().get("GPU", ()))
        return _Place(get_node_ip_address(), context.get_node_id(), os.getpid(), devices)

    def run(self, start: _Start, environment: Mapping[str, str]) -> int:
        """Runs the target until it ends; its exit code."""
        for name, value in environment.items():
            os.environ[name] = value
        # Kept for as long as the actor lives: what reads it ends the process when it is closed.
        self._connection = Client(start.address, authkey=start.key)
        _watch_peer(self._connection, is_always_read=False)
        if start.ranks:
            use_rank_starter(_RayRanks(start.ranks))
        module, _, function = start.target.partition(":")
        try:
            getattr(importlib.import_module(module), function)(self._connection, os.getppid())
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        return 0


def _watch_peer(connection: Any, *, is_always_read: bool) -> None:
    """Has the kernel close a connection whose host is gone, and send small messages at once.

    Args:
        connection: over TCP.
        is_always_read: the other end reads at once whatever comes. Elsewhere what waits there unread
            must not end the connection.
    """
    with socket.socket(fileno=socket.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if is_always_read and hasattr(socket, "TCP_USER_TIMEOUT"):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


def _limit_reads(connection: Any, seconds: int) -> None:
    """OSError where a read waits for longer than this; 0: without limit."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


class _ActorProcess:
    """See `diffulex.distributed.child_process.Process`. It has ended when what it runs has, or it is gone.

    Args:
        actor: in whose process it is.
        place: of the actor.
        run: what `RankActor.run` will return.
    """

    def __init__(self, actor: Any, place: _Place, run: Any) -> None:
        self.pid = place.pid
        self.returncode: int | None = None
        #: What Ray says of its end; None: it ended by itself.
        self.cause: str | None = None
        self._actor = actor
        self._run = run

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not ray.is_initialized():  # the cluster was left, and its processes end with that
                self.returncode, self.cause = 1, "the connection to the Ray cluster is gone"
                return self.returncode
            done, _ = ray.wait([self._run], timeout=timeout)
            if not done:
                raise subprocess.TimeoutExpired(["RankActor.run"], timeout or 0.0)
            try:
                self.returncode = cast("int", ray.get(self._run))
            except RayError as error:
                self.returncode, self.cause = 1, str(error)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Ends it, whatever the signal: Ray has no others."""
        del sig
        self.kill()

    def kill(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor)


class RayChild(ChildProcess):
    """A process in an actor, which has no standard error here: Ray passes its lines on.

    Args:
        actor: of `RankActor`.
        place: where it is.
        target: `module:function` that it runs with its end of the connection and its parent's pid.
        environment: variables in which it differs from its node's others.
        ranks: actors, and their places, for the other ranks of an engine in it.
        group: the placement group that is given back with it; None: another one's.

    Raises:
        EngineDeadError: it has ended, or does not connect.
    """

    def __init__(
        self,
        actor: Any,
        place: _Place,
        target: str,
        environment: Mapping[str, str],
        *,
        ranks: Sequence[tuple[Any, _Place]] = (),
        group: Any = None,
    ) -> None:
        self.last_lines: deque[str] = deque(maxlen=0)
        self._actors = [actor, *(rank for rank, _ in ranks)]
        self._place = place
        #: Of it and of the other ranks of its engine, in their order.
        self.places = [place, *(at for _, at in ranks)]
        self._group = group
        key, host = secrets.token_bytes(32), get_node_ip_address()
        with socket.create_server((host, 0)) as door:
            start = _Start((host, door.getsockname()[1]), key, target, ranks)
            run = actor.run.remote(start, dict(environment))
            self._process = _ActorProcess(actor, place, run)
            self.process = self._process
            self.connection = self._accept(door, key)
        _watch_peer(self.connection, is_always_read=True)

    def _accept(self, door: socket.socket, key: bytes) -> Connection[Any, Any]:
        door.settimeout(_ACCEPT_POLL_S)
        end = time.monotonic() + _CONNECT_S
        while time.monotonic() < end:
            try:
                peer, _ = door.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    break
                continue
            peer.setblocking(True)
            connection: Connection[Any, Any] = Connection(peer.detach())
            try:
                _limit_reads(connection, _CHALLENGE_S)  # a stranger may say nothing
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
                _limit_reads(connection, 0)
            except (AuthenticationError, EOFError, OSError):  # somebody else
                connection.close()
                continue
            return connection
        how = f"did not connect within {_CONNECT_S:g} s"
        if self.process.poll() is not None:
            how = self.describe_end()
        text = f"the actor (pid {self.pid}, node {self._place.host}) {how}"
        raise EngineDeadError(text, pid=self.pid)

    def describe_end(self) -> str:
        """How it ended; waits a moment for that."""
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CAUSE_S)
        where = f"on node {self._place.host} ({self._place.node[:8]})"
        if process.cause is not None:
            if "node has died" in process.cause or "node died" in process.cause.lower():
                return f"was lost with its node {where}"
            return f"was killed {where}"
        if process.returncode is None:
            return f"was lost: its connection ended {where}"
        return f"{describe_exit(process.returncode)} {where}"

    def release(self) -> None:
        """Ends the actors and gives back the placement group. Idempotent."""
        if ray.is_initialized():
            for actor in self._actors:
                with contextlib.suppress(RayError):
                    ray.kill(actor)
            if self._group is not None:
                remove_place(self._group)
        self._group = None
        super().release()


class _RayRanks:
    """Starts the other ranks in actors that are there already; see `RankStarter`."""

    shares_memory = False

    def __init__(self, ranks: Sequence[tuple[Any, _Place]]) -> None:
        self.host = get_node_ip_address()
        self._ranks = ranks

    def start(self, target: str, rank: int, environment: Mapping[str, str]) -> ChildProcess:
        return RayChild(*self._ranks[rank - 1], target, environment)


class Replicas:
    """The actors of all replicas, on nodes that have room for them; see `ReplicaStarter`.

    Args:
        sizes: ranks of a replica, and replicas.
        device: that was asked for.
        address: of the cluster.
        timeout_s: in which the cluster must have room.

    Raises:
        ConfigError: there is no cluster, or no room in it.
    """

    def __init__(self, sizes: Sizes, device: str, address: str, timeout_s: float) -> None:
        join_cluster(address)
        bundle = bundle_of(device)
        self._groups: dict[int, Any] = dict(enumerate(place_replicas(sizes, bundle, timeout_s)))
        self._ranks: dict[int, list[tuple[Any, _Place]]] = {}
        try:
            actors = {
                index: [_actor(group, rank, bundle) for rank in range(sizes.tensor)]
                for index, group in self._groups.items()
            }
            for index, members in actors.items():
                places = ray.get([actor.place.remote() for actor in members], timeout=_CONNECT_S)
                self._ranks[index] = list(zip(members, places, strict=True))
        except BaseException as error:  # also Ctrl-C, which nobody above can answer yet
            self.close()
            if not isinstance(error, RayError):
                raise
            reason = " ".join(str(error).split())
            raise EngineDeadError(f"the actors of a replica could not start: {reason}") from error

    def start(self, index: int, target: str) -> tuple[ChildProcess, Sequence[int]]:
        """The process of a replica and its CUDA devices; once for each."""
        (actor, place), *others = self._ranks[index]
        child = RayChild(
            *(actor, place, target, _shared_environment()),
            ranks=others,
            group=self._groups[index],
        )
        del self._groups[index]
        devices = [device for _, at in self._ranks[index] for device in at.devices]
        return child, devices

    def close(self) -> None:
        """Gives back the places of replicas that were not started. Idempotent."""
        while self._groups:
            remove_place(self._groups.popitem()[1])


def _shared_environment() -> dict[str, str]:
    """What a process takes over from this one. Threads are those of the CPUs that Ray gives it, else."""
    threads = get_text("OMP_NUM_THREADS")
    return {"OMP_NUM_THREADS": threads} if threads else {}


def _actor(group: Any, rank: int, bundle: Mapping[str, float]) -> Any:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=rank
    )
    return (
        ray.remote(RankActor)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": _ACTOR_ENVIRONMENT},
        )
        .remote()
    )
