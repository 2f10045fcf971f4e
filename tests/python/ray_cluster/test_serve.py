# SPDX-License-Identifier: Apache-2.0
"""The application of Ray Serve: the OpenAI API, health, replicas that are lost, added and taken away."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fixtures.extras import need_extra

need_extra("ray", "ray", "fastapi", "zmq")

sys.path.append(str(Path(__file__).parents[1] / "server"))  # whose engines import each other

import slow_engine  # noqa: E402
from diffulex.errors import ConfigError  # noqa: E402
from diffulex.ray.serve import build_openai_app, openai_app  # noqa: E402
from ray_cluster.conftest import kill, until  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

URL = "http://127.0.0.1:8123"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24}


def post(body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    request = urllib.request.Request(
        URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        content = answer.read().decode()
    return content if body.get("stream") else json.loads(content)


def num_running() -> int:
    from ray import serve

    (deployment,) = serve.status().applications["default"].deployments.values()
    return int(deployment.replica_states.get("RUNNING", 0))


@pytest.fixture
def served(cluster: Any, tmp_path: Path) -> Iterator[Path]:
    """One replica, at most two, with an engine that logs its process; the log."""
    from ray import serve

    node = cluster.add_node(num_cpus=4)
    log = tmp_path / "engines.log"
    app = openai_app(
        {"model": "demo", "device": "cpu", "served_model_name": ("fake",), "max_num_reqs": 8},
        {
            "autoscaling_config": {
                "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2,
                "upscale_delay_s": 0.5, "downscale_delay_s": 2.0, "metrics_interval_s": 0.5,
                "look_back_period_s": 1.0,
            },
            "health_check_period_s": 1.0,
            "ray_actor_options": {
                "num_cpus": 1, "runtime_env": {"env_vars": {"DIFFULEX_TEST_LOG": str(log)}}
            },
        },
        engine_factory=slow_engine.make_slow,
    )  # fmt: skip
    # One proxy: those of several nodes would share the port of this host.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": 8123})
    serve.run(app, route_prefix="/")
    until(is_routed)  # the proxy hears of the application later than `run` returns
    yield log
    serve.shutdown()
    cluster.remove_node(node)


def test_an_application_serves_heals_and_scales(served: Path) -> None:
    answer = post(CHAT)
    assert answer["model"] == "fake"
    assert len(answer["choices"][0]["message"]["content"]) == 24
    lines = [line for line in post({**CHAT, "stream": True}).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    text = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines[:-1]
    )
    assert text == answer["choices"][0]["message"]["content"]
    assert is_routed()
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post({**CHAT, "max_tokens": -1})

    # The engine is killed: Serve replaces the replica, which serves again.
    (engine,) = [
        int(line.split()[1]) for line in served.read_text().splitlines() if "start" in line
    ]
    begin = kill(engine)
    until(lambda: served.read_text().count("start") == 2 and is_answered())
    print(f"a lost engine is replaced after {time.monotonic() - begin:.1f} s")

    # Load adds a replica, and its end takes one away.
    with ThreadPoolExecutor(12) as pool:
        is_busy = True

        def ask() -> None:
            while is_busy:
                with suppress(urllib.error.URLError):
                    post({**CHAT, "max_tokens": 128})

        for _ in range(12):
            pool.submit(ask)
        try:
            until(lambda: num_running() == 2)
        finally:
            is_busy = False
    until(lambda: num_running() == 1)
    assert is_answered()


def is_routed() -> bool:
    with (
        suppress(urllib.error.URLError, ConnectionError),
        urllib.request.urlopen(f"{URL}/health", timeout=60) as health,
    ):
        return bool(json.load(health)["status"] == "ready")
    return False


def is_answered() -> bool:
    with suppress(urllib.error.URLError, ConnectionError):
        return len(post(CHAT)["choices"][0]["message"]["content"]) == 24
    return False


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"modle": "demo"}, "modle: expected a setting of diffulex serve, got an unknown one"),
        ({"port": 80}, "port: expected it as an option of Ray Serve, got it here"),
        ({"data_parallel_size": 2}, "data_parallel_size: expected 1 under Ray Serve, which has"),
        ({"distributed_executor": "ray"}, "distributed_executor: expected auto or mp under Ray"),
        ({"master_port": "2333"}, "master_port: expected 0 under Ray Serve, which has replicas"),
        ({"max_num_reqs": "many"}, "max_num_reqs: expected an integer, got 'many'"),
        ({"llm_configs": []}, "llm_configs: expected one model (others are applications of"),
        ({"llm_configs": [{"model": 1}]}, "llm_configs: expected one of model_loading_config,"),
        ({"llm_configs": [{}]}, "model_loading_config: expected model_id or model_source, got"),
        ({"deployment_config": {"replicas": 2}}, "deployment_config: expected options of Ray"),
    ],
)
def test_what_is_not_right_is_one_line(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_openai_app(args)
    assert str(error.value).startswith(text)
    assert "\n" not in str(error.value)


def test_options_of_the_deployment_follow_from_the_engine() -> None:
    config = {
        "model_loading_config": {"model_id": "small", "model_source": "demo"},
        "engine_kwargs": {"max_num_reqs": 8, "tensor_parallel_size": 2},
        "accelerator_type": "H200",
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 8}},
    }
    deployment = build_openai_app({"llm_configs": [config], "drain_timeout": "7"})._bound_deployment
    assert deployment.max_ongoing_requests == 16
    assert deployment.ray_actor_options["num_gpus"] == 2
    assert deployment.ray_actor_options["accelerator_type"] == "H200"
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 7
    assert deployment._deployment_config.autoscaling_config.max_replicas == 8
    (settings, _) = deployment.init_args
    assert settings["served_model_name"] == ("small",)
