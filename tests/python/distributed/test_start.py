# SPDX-License-Identifier: Apache-2.0
"""How processes of replicas and ranks are started: without Ray, and what a cluster's settings refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from diffulex import ConfigError, Diffulex, SamplingParams
from diffulex.distributed import start
from diffulex.distributed.child_process import ChildProcess
from diffulex.distributed.layout import LOOPBACK, replica_settings
from diffulex.server.args import parse_args

LIMITS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_pages": 64, "max_num_reqs": 3}
PROMPTS = [list(range(20, 40)), list(range(50, 57)), [60]]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)


class Apart:
    """Starts ranks of this host as if they were on others: nothing of this process can be mapped."""

    host = LOOPBACK
    shares_memory = False

    def start(self, target: str, rank: int, environment: Mapping[str, str]) -> ChildProcess:
        return ChildProcess(target, f"rank {rank}", environment)


@pytest.fixture
def _apart() -> Iterator[None]:
    before = start.rank_starter()
    start.use_rank_starter(Apart())
    yield
    start.use_rank_starter(before)


def tokens(**settings: Any) -> list[tuple[int, ...]]:
    with Diffulex("demo", **LIMITS, **settings) as engine:
        outputs = engine.generate(PROMPTS, PARAMS, summary=False)
        return [output.token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"run_ahead": "on"}, {"run_ahead": "on", "buffer_size": 4}]
)
@pytest.mark.usefixtures("_apart")
def test_ranks_that_share_no_memory_get_the_arrays_of_each_step(settings: dict[str, Any]) -> None:
    assert tokens(tensor_parallel_size=2, check_ranks=True, **settings) == tokens(**settings)


def without_ray(code: str) -> subprocess.CompletedProcess[str]:
    """A program in which Ray cannot be imported."""
    lines = "import sys\nsys.modules['ray'] = None\n" + code
    return subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.slow
def test_without_ray_everything_else_works_and_it_is_named_when_asked_for() -> None:
    result = without_ray("""
from diffulex import ConfigError, Diffulex
from diffulex.tools.cli import build_parser, main
build_parser()
try:
    Diffulex("demo", device="cpu", distributed_executor="ray")
except ConfigError as error:
    print(error)
sys.exit(main(["serve", "demo", "--device", "cpu", "--distributed-executor", "ray", "--port", "0"]))
""")
    text = (
        "distributed_executor: expected ray to be installed (pip install '.[ray]' in the source directory),"
        " got ModuleNotFoundError"
    )
    assert result.stdout.strip() == text
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == f"diffulex serve: error: {text}"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"device_ids": [0]}, "device_ids: expected an empty list, with distributed_executor ray"),
        ({"device_start": 1}, "device_start: expected 0, with distributed_executor ray"),
        ({"device": "cuda:0"}, "device: expected auto, cpu or cuda, with distributed_executor ray"),
        ({"distributed_executor": "mpi"}, "distributed_executor: expected one of auto, mp, ray"),
        ({"ray_placement_timeout": 0}, "ray_placement_timeout: expected"),
    ],
)
def test_settings_that_a_cluster_refuses(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Diffulex("demo", **{"device": "cpu", "distributed_executor": "ray", **settings})
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--inproc", "--inproc: expected one process, got --distributed-executor ray"),
        (
            "--zmq-event-addr=tcp://127.0.0.1:1",
            "--zmq-event-addr: expected a backend on this host, got --distributed-executor ray",
        ),
    ],
)
def test_flags_that_a_cluster_refuses(flag: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_args(["demo", "--device", "cpu", "--distributed-executor-backend", "ray", flag])
    assert str(error.value) == text


def test_a_replica_does_not_ask_the_cluster_again() -> None:
    given = {"distributed_executor": "ray", "ray_address": "local", "ray_placement_timeout": 3}
    assert replica_settings({**given, "tensor_parallel_size": 2}, ()) == {"tensor_parallel_size": 2}
    assert start.is_of_cluster(given)
    assert not start.is_of_cluster({"distributed_executor": "mp"})
    assert not start.is_of_cluster({})
