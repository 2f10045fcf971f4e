# SPDX-License-Identifier: Apache-2.0
"""Whether this host can run several ranks, and how well, for ``diffulex doctor --distributed``.

Real processes are started as those of an engine are, exchange and answer over their pipes: two on the CPU
where there are fewer than two CUDA devices, else one for each of at most eight devices.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Literal

from diffulex.config.parallel import ParallelConfig
from diffulex.distributed.child_process import ChildProcess, error_parts, read_forever, stop_all
from diffulex.distributed.layout import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from torch import Tensor

    from diffulex.distributed.comm import Comm

__all__ = ["Finding", "examine_distributed", "run_rank"]

_MAX_RANKS = 8
#: A rank imports torch, which takes a busy host long.
_START_S = 120
_EXCHANGE_S = 30
#: 256 KB of fp32.
_SHAPE = (64, 1024)
_ROUNDS = 20
#: What NCCL shares between the processes of a host; containers have 64 MB unless told.
_SHARED_BYTES = 1 << 30
_SHARED_DIR = "/dev/shm"
_RAY_S = 120.0
#: Prints the nodes of the cluster that `ray_address=auto` means.
_RAY_NODES = """\
import ray
try:
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
except ConnectionError:
    print("no cluster runs: start one with ray start --head")
else:
    nodes = []
    for node in ray.nodes():
        has = [f"{name} {node['Resources'].get(name, 0):g}" for name in ("CPU", "GPU")]
        what = ", ".join(has) if node["Alive"] else "lost"
        nodes.append(f"{node['NodeManagerAddress']} ({what})")
    print(f"nodes {len(nodes)}: {', '.join(nodes)}")
"""
_CHILD = "diffulex.tools.distributed_doctor:run_rank"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, and what to do if it is not ok."""

    name: str
    state: Literal["ok", "slow", "missing"]
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.state} ({self.detail})"


def examine_distributed(as_json: bool) -> tuple[str, bool]:
    """Looks at everything; whatever is missing becomes a line, not an exception.

    Returns:
        The report, and whether ranks can run here.
    """
    num_devices, failure = _count_devices()
    findings = [
        failure or _attempt("devices", _devices),
        _attempt("peer access", lambda: _peer_access(num_devices)),
        _attempt("libraries", lambda: _libraries(num_devices)),
        *(_arenas(), _shared_memory(_SHARED_DIR, num_devices), _ports()),
        _attempt("ray", _ray),
    ]
    if num_devices > 1:
        devices = [f"cuda:{index}" for index in range(min(num_devices, _MAX_RANKS))]
    else:
        devices = ["cpu", "cpu"]
    findings += _ranks(devices)
    is_healthy = all(finding.state != "missing" for finding in findings)
    if as_json:
        content = {"findings": [asdict(each) for each in findings], "is_healthy": is_healthy}
        return json.dumps(content, indent=2), is_healthy
    end = "healthy" if is_healthy else "broken: see what is missing"
    return "\n".join([*map(str, findings), end]), is_healthy


def _attempt(name: str, look: Callable[[], Finding]) -> Finding:
    """What it finds; a line about whatever it raises instead, as a broken driver does anywhere."""
    try:
        return look()
    except Exception as error:
        kind, text, _ = error_parts(error)
        return Finding(name, "missing", f"{kind}: {text}")


def _count_devices() -> tuple[int, Finding | None]:
    """CUDA devices, and why there are none to look at, if that is an error."""
    import torch  # noqa: PLC0415 (slow to import)

    count = 0

    def look() -> Finding:
        nonlocal count
        count = torch.cuda.device_count()
        return Finding("devices", "ok", str(count))

    found = _attempt("devices", look)
    return count, None if found.state == "ok" else found


def _devices() -> Finding:
    import torch  # noqa: PLC0415

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    text = ", ".join(f"cuda:{index} {name}" for index, name in enumerate(names))
    return Finding("devices", "ok", text or "no CUDA device: ranks run on the CPU")


def _peer_access(num_devices: int) -> Finding:
    import torch  # noqa: PLC0415

    if num_devices < 2:
        return Finding("peer access", "ok", f"not needed with CUDA devices: {num_devices}")
    without = [
        f"cuda:{i} to cuda:{j}"
        for i in range(num_devices)
        for j in range(num_devices)
        if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
    if without:
        return Finding(
            "peer access",
            "slow",
            f"none from {', '.join(without)}: put the ranks of an engine on others (device_ids)",
        )
    return Finding("peer access", "ok", f"between all {num_devices} devices")


def _libraries(num_devices: int) -> Finding:
    from torch import distributed  # noqa: PLC0415

    has = {
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
        "nccl": distributed.is_available() and distributed.is_nccl_available(),
    }
    needed = "nccl" if num_devices > 1 else "gloo"
    text = ", ".join(f"{name} {'built in' if there else 'absent'}" for name, there in has.items())
    if has[needed]:
        return Finding("libraries", "ok", text)
    return Finding("libraries", "missing", f"{text}: install a torch with {needed}")


def _arenas() -> Finding:
    from diffulex.distributed.arenas import SharedArenas  # noqa: PLC0415

    name = "arenas"
    try:
        arenas = SharedArenas(4096, 2, SharedArenas.create(4096, 2))
        arenas.fill(1, memoryview(b"x"))
    except (OSError, AttributeError) as error:
        return Finding(name, "missing", f"{error}: needs Linux with memfd_create")
    is_kept = int(arenas.tensors[1][0]) == ord("x")
    detail = "files in memory are shared" if is_kept else "a file in memory loses what is written"
    return Finding(name, "ok" if is_kept else "missing", detail)


def _shared_memory(folder: str | Path, num_devices: int) -> Finding:
    name = "shared memory"
    try:
        total = shutil.disk_usage(folder).total
    except OSError as error:
        total, text = 0, f"{folder}: {error.strerror}"
    else:
        text = f"{folder} has {total / 2**20:.0f} MiB"
    if num_devices < 2:
        return Finding(name, "ok", f"{text}; only NCCL uses it")
    if total < _SHARED_BYTES:
        remedy = "start the container with --ipc host or --shm-size 1g"
        return Finding(name, "slow", f"{text}, NCCL may want {_SHARED_BYTES >> 20}: {remedy}")
    return Finding(name, "ok", text)


def _ports() -> Finding:
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection((LOOPBACK, port), timeout=5):
                pass
    except OSError as error:
        return Finding("ports", "missing", f"none at {LOOPBACK} ({error}): allow local connections")
    return Finding("ports", "ok", f"one was free at {LOOPBACK}, and reached")


def _ray() -> Finding:
    try:
        release = version("ray")
    except PackageNotFoundError:
        return Finding("ray", "ok", "not installed; only several hosts need the extra ray")
    # In a process of its own: this one is not to join a cluster.
    command = [sys.executable, "-c", _RAY_NODES]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_RAY_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding("ray", "slow", f"{release}, no answer within {_RAY_S:g} s: see ray status")
    *_, last = asked.stdout.splitlines() or [""]
    if asked.returncode != 0:
        *_, last = asked.stderr.splitlines() or ["no output"]
        return Finding("ray", "slow", f"{release}, ended with {asked.returncode}: {last}")
    return Finding("ray", "ok", f"{release}, {last}")


def _ranks(devices: Sequence[str]) -> list[Finding]:
    """Starts a rank on each device, and measures what they exchange."""
    from diffulex.distributed.store import make_store  # noqa: PLC0415 (imports torch)

    children: list[ChildProcess] = []
    try:
        store = make_store(len(devices))
        for rank, device in enumerate(devices):
            child = ChildProcess(_CHILD, f"rank {rank}", {})
            children.append(child)
            child.connection.send((rank, len(devices), device, store.port))
        results = _collect(children, _START_S + 2 * _EXCHANGE_S)
        channel = _round_trip(children[-1])
    except (OSError, EOFError, RuntimeError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return [Finding("ranks", "missing", text)]
    finally:
        stop_all(children, grace_s=0.0)
    latency = max(microseconds for microseconds, _ in results)
    found = [
        Finding("ranks", "ok", f"started and ended on {', '.join(devices)}"),
        Finding("all-reduce", "ok", f"{latency:.0f} us for 256 KB"),
        Finding("control channel", "ok", f"{channel:.0f} us there and back"),
    ]
    reason = results[0][1]
    if devices[0] == "cpu":
        found.append(Finding("peer memory", "ok", "not used on the CPU"))
    elif reason:
        found.append(Finding("peer memory", "slow", f"{reason}: NCCL is used, without graphs"))
    else:
        found.append(Finding("peer memory", "ok", "shared between the processes"))
    return found


def _collect(children: Sequence[ChildProcess], seconds: float) -> list[tuple[float, str]]:
    """What the ranks have measured, in their order.

    Raises:
        RuntimeError: one has failed, has ended or is late.
    """
    end = time.monotonic() + seconds
    results: dict[int, tuple[float, str]] = {}
    while len(results) < len(children):
        waiting = {
            child.connection: rank for rank, child in enumerate(children) if rank not in results
        }
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            late = ", ".join(map(str, waiting.values()))
            raise RuntimeError(f"no answer of rank {late} within {seconds:g} s")
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            try:
                kind, *content = children[rank].connection.recv()
            except (EOFError, OSError):
                text = f"rank {rank} {children[rank].describe_end()}"
                raise RuntimeError(
                    ": ".join([text, *list(children[rank].last_lines)[-1:]])
                ) from None
            if kind != "measured":
                raise RuntimeError(f"rank {rank}: {': '.join(content)}")
            results[rank] = (content[0], content[1])
    return [results[rank] for rank in range(len(children))]


def _round_trip(child: ChildProcess) -> float:
    """Microseconds of a message to a rank and its answer, the median."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        child.connection.send("ping")
        if not child.connection.poll(_EXCHANGE_S):
            raise RuntimeError(f"no answer over the control channel within {_EXCHANGE_S:g} s")
        child.connection.recv()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def run_rank(connection: Connection[Any, Any], parent: int) -> None:
    """The process of a rank: exchanges, tells what it has measured, answers until it is ended."""
    rank, size, device, port = connection.recv()
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    read_forever(connection, parent, messages.put)
    try:
        microseconds, reason = _exchange(rank, size, device, port)
    except Exception as error:  # whatever fails is a finding
        kind, text, _ = error_parts(error)
        connection.send(("failed", kind, text))
    else:
        connection.send(("measured", microseconds, reason))
    while True:
        connection.send(messages.get())


def _exchange(rank: int, size: int, device: str, port: int) -> tuple[float, str]:
    """Median microseconds of an all-reduce, and why peer memory is not used; empty: it is.

    Raises:
        RuntimeError: the ranks do not find each other, or a sum is wrong.
    """
    import torch  # noqa: PLC0415

    from diffulex.engine.ranks.worker import make_comm  # noqa: PLC0415

    if device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    else:
        torch.cuda.set_device(device)
    parallel = ParallelConfig(
        tensor_parallel_size=size,
        distributed_timeout_seconds=_START_S,
        collective_timeout_seconds=_EXCHANGE_S,
    )
    comm = make_comm(parallel, device, rank, (LOOPBACK, port), LOOPBACK)
    try:
        return _measure(comm, torch.empty(_SHAPE, device=device)), comm.no_capture_reason or ""
    finally:
        comm.close()


def _measure(comm: Comm, x: Tensor) -> float:
    import torch  # noqa: PLC0415

    times = []
    for _ in range(_ROUNDS):
        x.fill_(comm.rank + 1)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        start = time.perf_counter()
        comm.all_reduce_(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append((time.perf_counter() - start) * 1e6)
        want = comm.size * (comm.size + 1) / 2
        if not bool((x == want).all()):
            raise RuntimeError(f"all-reduce: expected {want:g}, got {float(x.flatten()[0]):g}")
    return statistics.median(times)
