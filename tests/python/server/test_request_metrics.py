# SPDX-License-Identifier: Apache-2.0
"""/metrics and the log line of a request."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from byte_tokenizer import ByteTokenizer
from diffulex.errors import ConfigError
from diffulex.log import _JsonFormatter
from diffulex.server.http.api_server import create_app
from diffulex.serving.frontend import ServerState
from diffulex.wire.protocol import ServingError
from fake_frontend import FakeFrontend
from http_client import AppClient, frames

BODY = {"prompt": "x"}


def samples(client, path="/metrics"):
    """Every sample by its name and its labels beyond the model's."""
    response = client.get(path)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake"
            found[(sample.name, tuple(sorted(labels.items())))] = sample.value
    return found


def value(found, name, **labels):
    return found[("diffulex_" + name, tuple(sorted(labels.items())))]


def test_requests_are_counted_by_route_and_status():
    client = AppClient(create_app(FakeFrontend()))
    client.post("/generate", BODY)
    client.post("/generate", {})
    client.get("/v1/models/fake")
    client.get("/made/up/1")
    client.get("/made/up/2")
    found = samples(client)
    assert value(found, "requests_total", route="/generate", status="200") == 1
    assert value(found, "requests_total", route="/generate", status="400") == 1
    route = "/v1/models/{model_id:path}"
    assert value(found, "requests_total", route=route, status="200") == 1
    assert value(found, "requests_total", route="other", status="404") == 2


def test_finished_answers_are_measured():
    client = AppClient(create_app(FakeFrontend()))
    client.post("/generate", BODY)
    frames(client.post("/generate", {**BODY, "stream": True}))
    found = samples(client)
    labels = {"finish_reason": "length", "finish_detail": "max_new_tokens_reached"}
    assert value(found, "request_finished_total", **labels) == 2
    assert value(found, "prompt_tokens_total") == 10
    assert value(found, "generation_tokens_total") == 6
    assert value(found, "cached_prompt_tokens_total") == 8
    assert value(found, "tokens_per_forward_sum") == 1.0
    assert value(found, "tokens_per_forward_bucket", le="0.5") == 2
    assert value(found, "nfe_per_request_bucket", le="4.0") == 0
    assert value(found, "nfe_per_request_bucket", le="8.0") == 2
    for name in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "queue_time_seconds",
        "prefill_time_seconds",
        "decode_time_seconds",
    ):
        assert value(found, name + "_count") == 2, name
    assert value(found, "time_to_first_snapshot_seconds_count") == 1
    assert value(found, "time_per_output_token_seconds_sum") == pytest.approx(2 * 0.75 / 3)
    assert value(found, "requests_inflight_http") == 0
    assert value(found, "requests_live") == 0


def test_numbers_of_the_backend_are_exposed():
    frontend = FakeFrontend()
    frontend.state, frontend.heartbeat_age_s, frontend.num_inflight = ServerState.DEAD, 0.5, 3
    frontend.counters = {"events_dropped": 4, "snapshots_coalesced": 5}
    frontend.info = {"decoding_strategy": "d2f", "block_size": 8}
    frontend.stats = {
        "gauges": {"requests_running": 2, "kv_cache_usage_ratio": 0.25},
        "counters": {
            "preemptions_total": 6,
            "forward_steps_total": [
                {"labels": {"phase": "prefill"}, "value": 7},
                {"labels": {"phase": "decode"}, "value": 8},
            ],
        },
        "histograms": {
            "step_time_seconds": [
                {"labels": {"phase": "decode"}, "bounds": [0.5, 1], "counts": [1, 2, 3], "sum": 9.5}
            ]
        },
        "last_gen_throughput": 1.0,
    }
    found = samples(AppClient(create_app(frontend)))
    assert value(found, "backend_up") == 0
    assert value(found, "backend_heartbeat_age_seconds") == 0.5
    assert value(found, "requests_tracked") == 3
    assert value(found, "events_dropped_total") == 4
    assert value(found, "snapshots_coalesced_total") == 5
    assert value(found, "requests_running") == 2
    assert value(found, "kv_cache_usage_ratio") == 0.25
    assert value(found, "preemptions_total") == 6
    assert value(found, "forward_steps_total", phase="decode") == 8
    assert value(found, "step_time_seconds_bucket", phase="decode", le="0.5") == 1
    assert value(found, "step_time_seconds_bucket", phase="decode", le="1.0") == 3
    assert value(found, "step_time_seconds_bucket", phase="decode", le="+Inf") == 6
    assert value(found, "step_time_seconds_sum", phase="decode") == 9.5
    (info,) = (labels for name, labels in found if name == "diffulex_engine_info")
    assert ("decoding_strategy", "d2f") in info


def test_aborts_are_counted_by_reason():
    frontend = FakeFrontend()
    frontend.on_abort = None
    client = AppClient(create_app(frontend))
    for reason in ("api", "api", "timeout"):
        frontend.on_abort("a", reason)
    found = samples(client)
    assert value(found, "request_aborted_total", reason="api") == 2
    assert value(found, "request_aborted_total", reason="timeout") == 1


def test_metrics_can_be_turned_off():
    client = AppClient(create_app(FakeFrontend(), disable_metrics=True))
    assert client.get("/metrics").status_code == 404
    assert client.post("/generate", BODY).status_code == 200


def test_metrics_on_a_port_of_their_own():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = create_app(FakeFrontend(), metrics_port=port)

    async def ask():
        async with app.router.lifespan_context(app):
            url = f"http://127.0.0.1:{port}/metrics"
            response = await asyncio.to_thread(httpx.get, url)
            assert "diffulex_backend_up" in response.text
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)

    asyncio.run(ask())
    assert (
        AppClient(create_app(FakeFrontend(), metrics_port=port)).get("/metrics").status_code == 404
    )


def test_a_metrics_port_in_use_is_one_line_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--metrics-port: cannot listen on .*:{port}: Addr"):
            create_app(FakeFrontend(), metrics_port=port)


# The log line.


def lines(caplog):
    return [
        r.getMessage() for r in caplog.records if r.name == "diffulex.server.http.request_record"
    ]


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="diffulex.server.http.request_record")
    return caplog


def test_a_line_per_generating_request(log):
    client = AppClient(create_app(FakeFrontend()))
    client.post("/v1/completions", {**BODY, "user": "secret-prompt"})
    client.get("/health")
    (line,) = lines(log)
    fields = dict(part.split("=", 1) for part in line.split())
    assert fields["rid"] == "diffulex-0"
    assert fields["route"] == "/v1/completions"
    assert fields["status"] == "200"
    assert (fields["prompt_tokens"], fields["cached_tokens"]) == ("5", "4")
    assert (fields["completion_tokens"], fields["nfe"], fields["tpf"]) == ("3", "6", "0.50")
    assert (fields["queue_ms"], fields["ttft_ms"]) == ("10.0", "100.0")
    assert float(fields["e2e_ms"]) > 0
    assert fields["finish_reason"] == "max_new_tokens_reached"
    assert "prompt=" not in line


def test_failures_are_logged_with_their_code(log):
    frontend = FakeFrontend()
    client = AppClient(create_app(frontend))
    frontend.script = lambda command: [ServingError(command.rid, "m", "kv_capacity", 400)]
    client.post("/generate", BODY)
    client.post("/generate", {**BODY, "stream": True})
    assert [("status=400" in line, "kv_capacity" in line) for line in lines(log)] == [
        (True, True),
        (True, True),
    ]


def test_prompts_are_logged_only_on_request(log, monkeypatch):
    bodies = {
        "/generate": {"prompt": "whisper"},
        "/v1/completions": {"prompt": ["a", "whisper"]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "whisper"}]},
    }
    # A text is logged as one also where the engine gets token ids.
    frontend = FakeFrontend()
    frontend.tokenizer = ByteTokenizer()
    log.set_level(logging.DEBUG, logger="diffulex.server.http.request_record")
    for detail, allowed, expected in (
        ("none", "1", 0), ("summary", "1", 1), ("full", "", 1), ("full", "0", 1), ("full", "1", 2),
    ):  # fmt: skip
        monkeypatch.setenv("DIFFULEX_LOG_PROMPTS", allowed)
        client = AppClient(create_app(frontend, log_requests=detail))
        for path, body in bodies.items():
            log.clear()
            client.post(path, body)
            assert len(lines(log)) == expected
            assert ("whisper" in log.text) is (expected == 2)
            assert all(
                "whisper" not in r.getMessage() for r in log.records if r.levelname == "INFO"
            )


def test_json_logs_have_the_fields(log):
    AppClient(create_app(FakeFrontend())).post("/generate", BODY)
    (record,) = [r for r in log.records if r.name == "diffulex.server.http.request_record"]
    entry = json.loads(_JsonFormatter().format(record))
    assert (entry["rid"], entry["status"], entry["nfe"]) == ("diffulex-0", 200, 6)


def test_the_line_of_a_request_without_an_answer_has_its_prompt(caplog):
    frontend = FakeFrontend()
    frontend.tokenizer = ByteTokenizer()
    frontend.script = lambda command: [
        ServingError(command.rid, "late", "request_timeout", 504),
    ]
    with caplog.at_level(logging.INFO, logger="diffulex"):
        AppClient(create_app(frontend)).post("/generate", {"prompt": "x" * 29})
    (line,) = [text for text in caplog.messages if text.startswith("rid=")]
    assert "status=504 prompt_tokens=29 " in line
