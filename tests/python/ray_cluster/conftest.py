# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster on this host, whose nodes are simulated: each has a node manager and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: Generous: the host may be loaded. Bounds of failures are measured apart.
PATIENCE_S = 180.0
#: What starts on a loaded host takes its time.
_SLOW_HOST = {
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_worker_niceness": "0",  # workers give way to everything else
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"  # compared as text: there are thousands of tests
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head without room for ranks, and two nodes with room for one each."""
    import ray
    from ray.cluster_utils import Cluster

    python = str(Path(__file__).parents[1])
    paths = [python, str(Path(__file__).parents[1] / "server"), os.environ.get("PYTHONPATH", "")]
    environment = {**_SLOW_HOST, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)  # the nodes take it over
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1)
        ray.init(address=made.address, logging_level="warning", log_to_driver=False)
        yield made
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        made.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_running(pid: int) -> bool:
    """Whether a process is there; one that has ended and waits for its parent is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Waits for it; fails after this time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "expected it within the time, got nothing"
        time.sleep(0.05)


def kill(pid: int) -> float:
    """Kills a process; when that was (monotonic clock)."""
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()
