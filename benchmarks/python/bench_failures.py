# SPDX-License-Identifier: Apache-2.0
"""Seconds from a failure of a process until it is known, on the CPU with the bundled model.

    python benchmarks/python/bench_failures.py --repeats 5

Each row makes its engine or server anew and kills, stops or breaks one of its processes; the times are those of
docs/distributed.md. `--rows` takes some of them, `--rows ray` those that need Ray: they make a cluster of several
nodes on this host, each of which has a node manager and processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from server_process import running_server
from step_timing import machine_facts, markdown_table

from diffulex import Diffulex, SamplingParams
from diffulex.errors import CheckpointError, ConfigError, EngineDeadError

_FAULT, _MARK = "BENCH_FAILURES_FAULT", "BENCH_FAILURES_MARK"
_SETTINGS: dict[str, Any] = {"device": "cpu", "num_pages": 64, "max_num_reqs": 4}
_LONG = SamplingParams(max_tokens=400, ignore_eos=True)
_TEXT = "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?"
_BODY = {
    "prompt": _TEXT, "max_tokens": 400, "ignore_eos": True, "stream": True, "stream_mode": "block_append",
    "decoding": {"accept_threshold": 1.0},
}  # fmt: skip
_PATIENCE_S = 120.0
_COLUMNS = ("failure", "known by", "median s", "most s")


def _until(condition: Callable[[], object]) -> float:
    """When it became true."""
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError("bench_failures: expected the failure to be known, got nothing")
        time.sleep(0.001)
    return time.monotonic()


def _is_gone(pid: int) -> bool:
    """It has ended, whether or not its parent has asked."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def _executor(engine: Diffulex) -> Any:
    return engine._executor


def _worker(engine: Diffulex) -> int:
    return int(_executor(engine)._followers._group._pipes.children[0].pid)


def _step_until_dead(engine: Diffulex) -> float:
    with contextlib.suppress(EngineDeadError):
        while True:
            if not engine.has_unfinished():
                engine.add_request(_TEXT, _LONG)
            engine.step()
    return time.monotonic()


@contextlib.contextmanager
def _pair(**settings: Any) -> Iterator[Diffulex]:
    with Diffulex("demo", tensor_parallel_size=2, **_SETTINGS, **settings) as engine:
        engine.generate(_TEXT, max_tokens=8, summary=False)
        yield engine


def _signal_later(pid: int, number: int) -> list[float]:
    """Sends a signal while the caller goes on; when, once it has."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(pid, number)

    threading.Timer(0.2, send).start()
    return sent


def worker_killed_idle() -> float:
    with _pair() as engine:
        begin = time.monotonic()
        os.kill(_worker(engine), signal.SIGKILL)
        return _until(lambda: engine._executor.death) - begin


def worker_killed_in_a_step() -> float:
    with _pair() as engine:
        sent = _signal_later(_worker(engine), signal.SIGKILL)
        return _step_until_dead(engine) - sent[0]


def worker_raises_in_a_step() -> float:
    with _faulty("raise") as mark, _pair(worker_imports=["bench_failures"]) as engine:
        return _step_until_dead(engine) - float(mark.read_text())


def rank_0_raises_in_a_step() -> float:
    with _pair() as engine:
        begin: list[float] = []

        def fail(inputs: object) -> None:
            begin.append(time.monotonic())
            raise ValueError("injected")

        executor, worker = _executor(engine), _worker(engine)
        executor.runner.sampler = fail
        _step_until_dead(engine)
        return _until(lambda: _is_gone(worker)) - begin[0]


def worker_hangs() -> float:
    with _pair(collective_timeout_seconds=2) as engine:
        sent = _signal_later(_worker(engine), signal.SIGSTOP)
        return _step_until_dead(engine) - sent[0]


def rank_0_killed() -> float:
    command = [sys.executable, __file__, "--hold"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        worker = int(first.stdout.readline())
        begin = time.monotonic()
        first.kill()
        return _until(lambda: _is_gone(worker)) - begin


def worker_cannot_load() -> float:
    with _faulty("load") as mark:
        try:
            Diffulex(
                "demo", tensor_parallel_size=2, worker_imports=["bench_failures"], **_SETTINGS
            ).close()
        except CheckpointError:
            return time.monotonic() - float(mark.read_text())
    raise RuntimeError("bench_failures: expected no engine, got one")


def replica_killed() -> float:
    """Until its requests are given to the other one; all of them are answered."""
    known: list[float] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: known.append(time.monotonic())  # type: ignore[method-assign]
    log = logging.getLogger("diffulex")
    with Diffulex("demo", data_parallel_size=2, **_SETTINGS) as engine:
        loop: Any = engine._loop
        log.addHandler(handler)
        try:
            sent = _signal_later(loop.replicas[0].child.pid, signal.SIGKILL)
            outputs = engine.generate([_TEXT] * 16, _LONG, summary=False)
        finally:
            log.removeHandler(handler)
    if len(outputs) != 16 or not known:
        raise RuntimeError(f"bench_failures: expected 16 answers and a warning, got {len(outputs)}")
    return known[0] - sent[0]


def _post(url: str, body: Any = None) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=_PATIENCE_S)


def _backends(pid: int) -> list[int]:
    """In the order of the replicas, which are started one after the other."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return sorted(child for child, command in found.items() if b"resource_tracker" not in command)


def replica_of_a_stream_killed() -> float:
    with running_server("demo", "--device", "cpu", "--data-parallel-size", "2") as server:
        _post(f"{server.url}/replicas/1/drain").close()
        with _post(f"{server.url}/generate", _BODY) as stream:
            next(line for line in stream if line.startswith(b"data:"))  # final text was delivered
            begin = time.monotonic()
            os.kill(_backends(server.pid)[0], signal.SIGKILL)
            for line in stream:
                if b"replica_lost" in line:
                    return time.monotonic() - begin
    raise RuntimeError("bench_failures: expected replica_lost, got the end of the stream")


def _health(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def all_replicas_killed() -> float:
    with running_server("demo", "--device", "cpu", "--data-parallel-size", "2") as server:
        begin = time.monotonic()
        for pid in _backends(server.pid):
            os.kill(pid, signal.SIGKILL)
        seconds = _until(lambda: _health(server.url) == 503) - begin
        _until(lambda: _health(server.url) == 200)
    return seconds


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """A head without room for ranks, and two nodes with room for one each."""
    import ray  # noqa: PLC0415 (of these rows alone)
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextlib.contextmanager
def _pair_of_nodes() -> Iterator[tuple[Any, Diffulex, Any]]:
    """The cluster, an engine whose ranks are on its nodes, and where the second rank is."""
    ray = {"distributed_executor": "ray", "tensor_parallel_size": 2}
    with _cluster() as cluster, Diffulex("demo", **ray, **_SETTINGS) as engine:
        engine.generate(_TEXT, max_tokens=8, summary=False)
        loop: Any = engine._loop
        yield cluster, engine, loop.replicas[0].child.places[1]


def ray_actor_killed() -> float:
    with _pair_of_nodes() as (_, engine, place):
        sent = _signal_later(place.pid, signal.SIGKILL)
        return _step_until_dead(engine) - sent[0]


def ray_node_lost() -> float:
    with _pair_of_nodes() as (cluster, engine, place):
        (node,) = [each for each in cluster.worker_nodes if each.node_id == place.node]
        begin: list[float] = []

        def lose() -> None:
            begin.append(time.monotonic())
            cluster.remove_node(node, allow_graceful=False)

        timer = threading.Timer(0.2, lose)
        timer.start()
        known = _step_until_dead(engine)
        timer.join()
        return known - begin[0]


def ray_has_no_room() -> float:
    ray = {"distributed_executor": "ray", "data_parallel_size": 3, "ray_placement_timeout": 2}
    with _cluster():
        begin = time.monotonic()
        try:
            Diffulex("demo", **ray, **_SETTINGS).close()
        except ConfigError as error:
            if "expected room for" in str(error):
                return time.monotonic() - begin
            raise
    raise RuntimeError("bench_failures: expected no room, got an engine")


@contextlib.contextmanager
def _faulty(kind: str) -> Iterator[Path]:
    """Workers fail so; the file has the time at which one did."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        os.environ |= {_FAULT: kind, _MARK: str(mark)}
        try:
            yield mark
        finally:
            del os.environ[_FAULT], os.environ[_MARK]


def _inject() -> None:
    """In a worker, which imports this file."""
    from diffulex.checkpoint import auto_model  # noqa: PLC0415 (workers only)
    from diffulex.engine.ranks.follower import Follower  # noqa: PLC0415

    unchanged, kind, mark = Follower.execute, os.environ[_FAULT], Path(os.environ[_MARK])

    def execute(self: Any, header: Any) -> bytes | None:
        if header.step >= 20:
            mark.write_text(str(time.monotonic()))
            raise ValueError("injected")
        return unchanged(self, header)

    def load(*arguments: object, **options: object) -> None:
        mark.write_text(str(time.monotonic()))
        raise CheckpointError("injected")

    if kind == "raise":
        Follower.execute = execute  # type: ignore[method-assign]
    else:
        auto_model.load_model = load  # type: ignore[assignment]


if sys.argv[0] == "-c" and _FAULT in os.environ:
    _inject()

_ROWS: dict[str, tuple[Callable[[], float], str, str]] = {
    "F1": (worker_killed_idle, "worker killed, idle", "the engine"),
    "F2": (worker_killed_in_a_step, "worker killed in a step", "`step`"),
    "F5": (worker_raises_in_a_step, "worker raises in a step", "`step`"),
    "F6": (rank_0_raises_in_a_step, "rank 0 raises in a step", "`step`, and its worker is gone"),
    "F7": (worker_hangs, "worker stopped, limit 2 s", "`step`"),
    "F8": (rank_0_killed, "rank 0 killed", "its worker, which is gone"),
    "F10": (worker_cannot_load, "worker cannot load", "the constructor"),
    "F15": (replica_killed, "replica killed, offline", "the warning; its requests start again"),
    "F16": (replica_of_a_stream_killed, "replica of a stream killed", "event `replica_lost`"),
    "F17": (all_replicas_killed, "all replicas of a server killed", "`/health` 503"),
    "F19": (ray_actor_killed, "actor of a rank killed (Ray)", "`step`"),
    "F19 node": (ray_node_lost, "node of a rank lost (Ray)", "`step`"),
    "F20": (ray_has_no_room, "no room in the cluster, limit 2 s (Ray)", "the constructor"),
}
_OF_RAY = ("F19", "F19 node", "F20")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", default=",".join(name for name in _ROWS if name not in _OF_RAY))
    parser.add_argument("--json", type=Path, help="also append the lines to this file")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.hold:
        with _pair() as engine:
            print(_worker(engine), flush=True)
            while True:
                time.sleep(1)
    names = list(_OF_RAY) if options.rows == "ray" else options.rows.split(",")
    if not set(names) <= _ROWS.keys():
        parser.error(f"--rows: expected some of {','.join(_ROWS)}, got {options.rows}")
    lines: list[dict[str, Any]] = []
    for name in names:
        run, failure, known = _ROWS[name]
        times = sorted(round(run(), 3) for _ in range(options.repeats))
        facts = {"benchmark": "bench_failures", "row": name, **machine_facts("cpu")}
        shown = (failure, known, f"{statistics.median(times):.3f}", f"{times[-1]:.3f}")
        lines.append({**facts, **dict(zip(_COLUMNS, shown, strict=True)), "times_s": times})
        print(json.dumps(lines[-1]), flush=True)
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    print(markdown_table(_COLUMNS, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
