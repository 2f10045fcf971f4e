# SPDX-License-Identifier: Apache-2.0
"""A server over several replicas with a fake engine: whole processes over real sockets."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import time
from typing import Any

import httpx
import pytest

from diffulex.errors import ConfigError
from diffulex.server.args import parse_args
from test_launch import OpenStream, Server, is_gone, start  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

BODY = {"prompt": "hi", "max_tokens": 8, "ignore_eos": True}
DP2 = ("--data-parallel-size", "2", "--drain-timeout", "30")


def pids(server: Server) -> list[int]:
    """Backends in the order in which they said that they started."""
    return [int(line.split()[1]) for line in server.logged("start")]


def alive(server: Server) -> list[int]:
    return [pid for pid in pids(server) if not is_gone(pid)]


def replicas(url: str) -> list[dict[str, Any]]:
    return httpx.get(f"{url}/replicas").json()["replicas"]


def states(url: str) -> list[str]:
    return [row["state"] for row in replicas(url)]


def ask(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/generate", json={**BODY, **fields}, timeout=60)


def test_life(start):  # noqa: F811
    """Ready with both, requests on both, reports with labels, drain, nothing left."""
    server = start(*DP2)
    url = server.ready()
    assert re.search(r"READY url=.* load=\S+ replicas=2 tp=1$", server.text(), re.MULTILINE)
    assert httpx.get(f"{url}/health").json() == {"status": "ready"}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(url).json()["text"], range(24)))
    assert answers == ["ABCDEFGH"] * 24
    rows = replicas(url)
    assert [row["replica"] for row in rows] == [0, 1]
    assert states(url) == ["ready", "ready"]
    info = httpx.get(f"{url}/server_info").json()
    assert (info["world_size"], info["data_parallel_size"], info["max_num_reqs"]) == (2, 2, 16)
    card = httpx.get(f"{url}/v1/models").json()["data"][0]
    assert (card["world_size"], card["tensor_parallel_size"]) == (2, 1)
    check_metrics(server, url)
    check_operations(url)
    stream = OpenStream(url, max_tokens=200)
    server.until(lambda: stream.frames)
    server.process.send_signal(signal.SIGTERM)
    stream.thread.join(60)
    assert stream.frames[-1] == "[DONE]"
    assert server.wait() == 0
    assert all(map(is_gone, pids(server)))
    assert not list(server.temporary.iterdir())


def check_metrics(server: Server, url: str) -> None:
    def text() -> str:
        return httpx.get(f"{url}/metrics").text

    names = ("0", "1")
    running = [f'diffulex_requests_running{{model_name="demo",replica="{name}"}}' for name in names]
    server.until(lambda: all(map(text().__contains__, running)))
    found = text()
    for replica in names:
        sent = re.search(
            rf'diffulex_router_requests_total{{.*policy="prefix",replica="{replica}"}} (\S+)', found
        )
        assert sent is not None
        assert float(sent[1]) > 0
        line = f'diffulex_replica_state{{model_name="demo",replica="{replica}",state="ready"}} 1.0'
        assert line in found
    assert 'diffulex_parallel_info{dp="2",ep="1",model_name="demo",tp="1"} 1.0' in found


def check_operations(url: str) -> None:
    """What needs one engine says so; the cache of both is emptied."""
    assert httpx.post(f"{url}/flush_cache").json()["num_dropped_units"] == 0
    for path in ("start_profile", "stop_profile", "pause", "unload_lora"):
        answer = httpx.post(f"{url}/{path}")
        assert answer.status_code == 409
        assert "expected data_parallel_size 1, got 2" in answer.json()["error"]["message"]
    assert httpx.post(f"{url}/replicas/7/drain").status_code == 404
    assert httpx.post(f"{url}/replicas/x/drain").status_code == 404


def test_a_replica_that_is_killed(start):  # noqa: F811
    """What had no text starts again, what had some ends with replica_lost, and it comes back."""
    server = start(*DP2)
    url = server.ready()
    streams = [OpenStream(url, max_tokens=100_000) for _ in range(2)]
    server.until(lambda: all(stream.frames for stream in streams))
    assert sorted(row["in_flight"] for row in replicas(url)) == [1, 1]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        # Whole answers: nothing of them is delivered before they end.
        waiting = [pool.submit(ask, url, max_tokens=400) for _ in range(6)]
        server.until(lambda: sum(row["in_flight"] for row in replicas(url)) == 8)
        os.kill(alive(server)[0], signal.SIGKILL)
        answers = [future.result() for future in waiting]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert all(len(answer.json()["text"]) == 400 for answer in answers)
    server.until(lambda: any(not stream.thread.is_alive() for stream in streams))
    lost = [stream for stream in streams if not stream.thread.is_alive()]
    assert len(lost) == 1
    assert lost[0].error()["code"] == "replica_lost"
    assert lost[0].error()["retryable"]
    server.until(lambda: states(url) == ["ready", "ready"])
    assert sum(row["restarts"] for row in replicas(url)) == 1
    metrics = httpx.get(f"{url}/metrics").text
    assert re.search(r"^diffulex_requests_retried_total{.*} [1-9]", metrics, re.MULTILINE)
    assert re.search(r"^diffulex_requests_lost_total{.*} 1.0$", metrics, re.MULTILINE)
    for stream in streams:
        stream.leave.set()


def test_a_request_that_kills_replicas_is_not_retried_for_ever(start):  # noqa: F811
    server = start("--data-parallel-size", "4", "--replica-retries", "1")
    url = server.ready()
    answer = ask(url, prompt=[*b"crash"])
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "replica_lost"
    assert ask(url).json()["text"] == "ABCDEFGH"
    server.until(lambda: states(url) == ["ready"] * 4)
    assert sum(row["restarts"] for row in replicas(url)) == 2


def test_all_of_them_are_killed(start):  # noqa: F811
    server = start(*DP2, "--early-bind")
    url = server.ready()
    for pid in alive(server):
        os.kill(pid, signal.SIGKILL)
    health = server.until(lambda: unhealthy(url))
    assert health.json()["degraded"] == [0, 1]
    assert "retry-after" in health.headers
    server.until(lambda: httpx.get(f"{url}/health").status_code == 200)
    assert ask(url).status_code == 200
    assert server.process.poll() is None


def unhealthy(url: str) -> httpx.Response | None:
    answer = httpx.get(f"{url}/health")
    return answer if answer.status_code == 503 else None


def test_drain_resume_restart(start):  # noqa: F811
    server = start(*DP2)
    url = server.ready()
    assert httpx.post(f"{url}/replicas/0/drain").json()["state"] == "draining"
    assert httpx.get(f"{url}/health").json() == {"status": "ready", "degraded": [0]}
    everyone = httpx.get(f"{url}/health?all=1")
    assert everyone.status_code == 503
    assert everyone.json()["error"]["code"] == "replica_degraded"
    before = [row for row in replicas(url) if row["replica"] == 0]
    for _ in range(6):
        assert ask(url).status_code == 200
    assert [row for row in replicas(url) if row["replica"] == 0] == before
    assert httpx.post(f"{url}/replicas/0/resume").json()["state"] == "ready"
    assert httpx.get(f"{url}/health?all=1").status_code == 200
    known = set(pids(server))
    assert httpx.post(f"{url}/replicas/1/restart").status_code == 200
    assert httpx.post(f"{url}/replicas/0/restart").status_code == 409
    assert httpx.post(f"{url}/replicas/0/resume").status_code == 409
    server.until(lambda: states(url) == ["ready", "ready"] and len(pids(server)) == 3)
    assert len(set(pids(server)) - known) == 1
    assert [row["restarts"] for row in replicas(url)] == [0, 1]


def test_admin_routes_can_be_off(start):  # noqa: F811
    server = start(*DP2, "--disable-admin-routes")
    url = server.ready()
    assert httpx.post(f"{url}/replicas/0/drain").status_code == 404
    assert states(url) == ["ready", "ready"]


def test_rolling_restart_under_load(start):  # noqa: F811
    """SIGHUP: every backend is another one afterwards, and no request failed."""
    server = start(*DP2)
    url = server.ready()
    known = set(pids(server))
    is_done = False
    serving: list[int] = []

    def client(number: int) -> list[int]:
        codes = []
        while not is_done:
            answer = ask(url, max_tokens=8 + number, stream=number % 2 == 0)
            codes.append(answer.status_code if "error" not in answer.text else 500)
        return codes

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        try:
            server.process.send_signal(signal.SIGHUP)
            end = time.monotonic() + 60
            while len(pids(server)) < 4 or states(url) != ["ready", "ready"]:
                assert time.monotonic() < end, server.text()
                serving.append(states(url).count("ready"))
                time.sleep(0.05)
        finally:
            is_done = True
        codes = [code for future in clients for code in future.result()]
    assert set(codes) == {200}
    assert len(codes) > 20
    assert min(serving) >= 1
    assert not known & set(alive(server))
    assert httpx.get(f"{url}/metrics").text.count("replica_restarts_total{") == 2


def test_one_that_does_not_start(start, tmp_path):  # noqa: F811
    server = start(*DP2, factory="make_second_broken")
    assert server.wait() == 1
    assert "diffulex serve: error: replica " in server.text()
    assert "device: expected free memory, got none" in server.text()
    assert all(map(is_gone, pids(server)))


def test_one_that_does_not_start_is_not_needed(start):  # noqa: F811
    server = start(*DP2, "--min-ready-replicas", "1", factory="make_second_broken")
    url = server.ready()
    assert ask(url).json()["text"] == "ABCDEFGH"
    server.until(lambda: sorted(states(url)) == ["dead", "ready"])
    (broken,) = httpx.get(f"{url}/health").json()["degraded"]
    # The third engine that is started works.
    assert httpx.post(f"{url}/replicas/{broken}/restart").status_code == 200
    server.until(lambda: states(url) == ["ready", "ready"])


def test_backends_of_a_killed_server_end(start):  # noqa: F811
    server = start(*DP2)
    server.ready()
    found = pids(server)
    assert len(found) == 2
    server.process.kill()
    server.until(lambda: all(map(is_gone, found)))


REFUSED = [
    ("--data-parallel-size 2 --inproc", "--inproc: expected data_parallel_size 1, got 2"),
    (
        "--data-parallel-size 2 --zmq-command-addr ipc:///x",
        "--zmq-command-addr: expected data_parallel_size 1, got 2",
    ),
    (
        "--data-parallel-size 2 --profiler torch --torch-profiler-dir x",
        "--profiler: expected data_parallel_size 1, got 2",
    ),
    (
        "--data-parallel-size 2 --min-ready-replicas 3",
        "--min-ready-replicas: expected at most data_parallel_size 2, got 3",
    ),
    (
        "--min-ready-replicas 2",
        "--min-ready-replicas: expected at most data_parallel_size 1, got 2",
    ),
    (
        "--data-parallel-size 2 --expert-parallel-size 2 --min-ready-replicas 1",
        "--min-ready-replicas: expected 0 with expert_parallel_size 2, whose replicas run and end"
        " together, got 1",
    ),
    (
        "--data-parallel-size 2 --expert-parallel-size 2 --replica-retries 1",
        "--replica-retries: expected 2 with expert_parallel_size 2, whose replicas run and end"
        " together, got 1",
    ),
    (
        "--data-parallel-size 2 --device cuda:1",
        "device: expected cuda with data_parallel_size 2 (device_ids chooses), got 'cuda:1'",
    ),
    (
        "--data-parallel-size 2 --device-ids 1,1",
        "device_ids: expected distinct devices, got [1, 1]",
    ),
    (
        "--data-parallel-size 3 --device-ids 1,0",
        "device_ids: expected 3 devices for data_parallel_size 3, got [1, 0]",
    ),
    (
        "--data-parallel-size 3 --master-port 65534",
        "master_port: expected at most 65533 for data_parallel_size 3, got 65534",
    ),
    (
        "--data-parallel-size 2 --data-parallel-policy random",
        "data_parallel_policy: expected one of prefix, least_loaded, round_robin, got 'random'",
    ),
]


@pytest.mark.parametrize(("line", "text"), REFUSED)
def test_command_lines_that_are_refused(line: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(line.split())
    assert str(caught.value) == text
