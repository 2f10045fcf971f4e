# SPDX-License-Identifier: Apache-2.0
"""`Diffulex(..., distributed_executor="ray")`: ranks and replicas on several nodes, and their loss."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.extras import need_extra

need_extra("ray", "ray")

from diffulex import Diffulex, SamplingParams  # noqa: E402
from diffulex.errors import ConfigError, EngineDeadError  # noqa: E402
from diffulex.ray.backend import new_address, ray_backend  # noqa: E402
from ray_cluster.conftest import PATIENCE_S, is_running, kill, until  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_reqs": 3, "num_pages": 15}
RAY = {**SETTINGS, "distributed_executor": "ray"}
PROMPTS = [
    f"Tom has {i} apples. He buys 4 more apples. How many apples does Tom have now?"
    for i in range(1, 9)
]
#: Half of the requests draw. Their seeds are given: numbers of requests go on from call to call.
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i) for i in range(len(PROMPTS))
]


def facts(outputs: Any) -> list[Any]:
    """What must not depend on where the processes are."""
    return [(out.token_ids, out.text, out.completion_reason, out.metrics.nfe) for out in outputs]


def answers(engine: Diffulex) -> list[Any]:
    return facts(engine.generate(PROMPTS, PARAMS, summary=False))


def places(engine: Diffulex) -> list[Any]:
    """Of the first rank of each replica."""
    return [replica.child._place for replica in engine._loop.replicas]  # type: ignore[union-attr]


def step_until_it_fails(engine: Diffulex) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        engine.step()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with Diffulex("demo", **SETTINGS) as engine:
        return answers(engine)


@pytest.fixture(scope="module")
def expected_of_two() -> list[Any]:
    with Diffulex("demo", tensor_parallel_size=2, **SETTINGS) as engine:
        return answers(engine)


@pytest.fixture
def pair(cluster: Any) -> Iterator[Diffulex]:
    """Two ranks, on the two nodes."""
    with Diffulex("demo", tensor_parallel_size=2, check_ranks=True, **RAY) as engine:
        yield engine


def test_two_ranks_of_two_nodes_decode_what_those_of_one_host_do(
    pair: Diffulex, expected_of_two: list[Any]
) -> None:
    (replica,) = pair._loop.replicas  # type: ignore[union-attr]
    nodes = {place.node for place in replica.child.places}
    assert len(nodes) == 2
    assert answers(pair) == expected_of_two
    with pytest.raises(RuntimeError, match="score: expected distributed_executor mp, got ray"):
        pair.score([[20, 21]], [(0, 1)])
    # A rank is killed: the group is dead, in time, and nothing of it is left.
    first, second = (place.pid for place in replica.child.places)
    pair.add_request(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    pair.step()
    begin = kill(second)
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(pid {second}, cpu\) was") as death:
        step_until_it_fails(pair)
    print(f"a killed rank is an error after {time.monotonic() - begin:.2f} s")
    assert str(death.value).startswith("replica 0")
    with pytest.raises(EngineDeadError):
        pair.generate(PROMPTS[0])
    until(lambda: not is_running(first))


def free_ports(count: int) -> int:
    """The first of some that follow each other."""
    for port in range(21000 + os.getpid() % 5000, 30000):
        with contextlib.ExitStack() as doors:
            try:
                for index in range(count):
                    doors.enter_context(socket.create_server(("", port + index)))
            except OSError:
                continue
            return port
    raise RuntimeError("expected free ports, got none")


def test_replicas_of_one_node_have_a_port_each(cluster: Any, expected_of_two: list[Any]) -> None:
    node = cluster.add_node(num_cpus=4)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2, "master_port": free_ports(2)}
    try:
        with Diffulex("demo", **sizes, **RAY) as engine:
            assert {place.node for place in places(engine)} == {node.node_id}
            assert answers(engine) == expected_of_two
    finally:
        cluster.remove_node(node)


def test_every_backend_of_a_server_has_a_port() -> None:
    given = {"data_parallel_size": 2, "distributed_executor": "ray", "master_port": 2333}
    address = new_address()
    found = [
        ray_backend("demo", given, (address, address), None, "", index)._settings["engine_kwargs"]
        for index in range(2)
    ]
    assert found == [{"master_port": 2333}, {"master_port": 2334}]


def test_replicas_and_the_loss_of_a_node(cluster: Any, expected: list[Any]) -> None:
    """The requests of a lost node are decoded on the other one; without any, the error says where."""
    import ray

    node = cluster.add_node(num_cpus=1, resources={"third": 1})
    with Diffulex("demo", data_parallel_size=3, **RAY) as engine:
        assert len({place.node for place in places(engine)}) == 3
        assert answers(engine) == expected
        # One process, then one node.
        index = next(i for i, place in enumerate(places(engine)) if place.node != node.node_id)
        kill(places(engine)[index].pid)
        assert answers(engine) == expected
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            engine.add_request(prompt, params)
        engine.step()
        begin = time.monotonic()
        cluster.remove_node(node, allow_graceful=False)
        results = {}
        while engine.has_unfinished():
            for step in engine.step():
                if step.output is not None:
                    results[step.req_id] = step.output
        print(f"answers of a lost node are there after {time.monotonic() - begin:.2f} s")
        assert facts([results[key] for key in sorted(results)]) == expected

        def alive() -> list[Any]:
            return [replica for replica in engine._loop.replicas if replica.is_alive]  # type: ignore[union-attr]

        # Its requests may have been answered before it was lost, which the next ones find out.
        until(lambda: answers(engine) == expected and len(alive()) == 1)
        kill(alive()[0].child.pid)
        with pytest.raises(EngineDeadError, match=r"replica \d \(pid \d+, cpu\) was"):
            answers(engine)
    until(lambda: ray.available_resources().get("CPU", 0) == 2)


def test_no_room_names_what_was_wanted_and_what_is_there(cluster: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError) as error:
        Diffulex("demo", data_parallel_size=3, ray_placement_timeout=2, **RAY)
    assert time.monotonic() - begin >= 2  # the cluster might have grown
    text = str(error.value)
    assert text.startswith(
        "distributed_executor: expected room for 1 x CPU 1 for replica 2 in the Ray cluster within"
        " 2 s (ray_placement_timeout), got "
    )
    # In any order, and a node that was lost may be listed a moment longer.
    nodes = [node.rpartition(" on ")[0] for node in text.partition(", got ")[2].split("; ")]
    assert nodes.count("nothing") == 1
    assert nodes.count("CPU 0 of 1 free") >= 2
    assert "\n" not in text
    settings = {**RAY, "device": "cuda"}
    with pytest.raises(ConfigError, match=r"expected room for 1 x CPU 1 GPU 1 for replica 0"):
        Diffulex("demo", data_parallel_size=2, ray_placement_timeout=1, **settings)


def test_the_places_of_actors_that_start_are_given_back_after_ctrl_c(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    until(lambda: ray.available_resources().get("CPU", 0) == 2)
    with monkeypatch.context() as patch:
        patch.setattr("diffulex.ray.executor.ray.get", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Diffulex("demo", data_parallel_size=2, **RAY)
    until(lambda: ray.available_resources().get("CPU", 0) == 2)


def test_no_cluster_is_one_line() -> None:
    """In a process of its own: this one is in a cluster."""
    code = (
        "from diffulex import ConfigError, Diffulex\n"
        "try: Diffulex('demo', device='cpu', distributed_executor='ray', ray_address='127.0.0.1:9')\n"
        "except ConfigError as error: print(error)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    text = "ray_address: expected a running Ray cluster (ray start --head), got '127.0.0.1:9': "
    assert result.stdout.startswith(text)
    assert result.stdout.count("\n") == 1
