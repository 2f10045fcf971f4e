# SPDX-License-Identifier: Apache-2.0
"""What load generators of other servers send and how they read; and this package's own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from fixtures.expected_answers import Expected
from fixtures.live_server import LiveServer

httpx = pytest.importorskip("httpx", reason="httpx is not installed")

_OUTPUT_LEN = 64


@dataclass
class Reading:
    """What a benchmark client that measures tokens by frames knows about one answer."""

    text: str = ""
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    completion_tokens: int | None = None
    is_done: bool = False


def _read(url: str, body: dict[str, Any]) -> Reading:
    """The reader of `vllm bench serve`: frames end in two newlines, `:` is a comment, the first
    frame with choices is the first token, usage counts only beside empty choices."""
    reading = Reading()
    start = last = time.perf_counter()
    headers = {"x-request-id": "bench-1", "Authorization": "Bearer none"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200, response.read()
        pending = ""
        for part in response.iter_text():
            pending += part
            *messages, pending = pending.split("\n\n")
            for message in messages:
                if message.startswith(":"):
                    continue
                data = message.removeprefix("data: ")
                if data == "[DONE]":
                    reading.is_done = True
                    continue
                content = json.loads(data)
                now = time.perf_counter()
                if choices := content.get("choices"):
                    delta = choices[0].get("delta")
                    text = choices[0].get("text") if delta is None else delta.get("content")
                    if reading.ttft is None:
                        reading.ttft = now - start
                    else:
                        reading.gaps.append(now - last)
                    reading.text += text or ""
                elif usage := content.get("usage"):
                    reading.completion_tokens = usage["completion_tokens"]
                last = now
    assert pending == ""
    return reading


def _common(server: LiveServer) -> dict[str, Any]:
    return {
        "model": httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"],
        "repetition_penalty": 1.0,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_completions_as_benchmarks_send_them(server: LiveServer, expected: list[Expected]) -> None:
    body = {
        **_common(server),
        "prompt": expected[0].question,
        "max_tokens": _OUTPUT_LEN,
        "logprobs": None,
    }
    reading = _read(f"{server.url}/v1/completions", body)
    assert reading.is_done
    assert reading.completion_tokens == _OUTPUT_LEN
    assert reading.ttft is not None
    assert reading.gaps
    assert reading.text


def test_chat_as_benchmarks_send_it(server: LiveServer, expected: list[Expected]) -> None:
    content = [{"type": "text", "text": expected[0].question}]
    body = {
        **_common(server),
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": _OUTPUT_LEN,
    }
    reading = _read(f"{server.url}/v1/chat/completions", body)
    assert reading.is_done
    assert reading.completion_tokens == _OUTPUT_LEN
    assert reading.text.startswith(expected[0].text)


def test_health_and_models_as_benchmarks_look_for_them(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]


def _bench_serve(server: LiveServer, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "diffulex", "bench", "serve", "--json"]
    result = subprocess.run(
        [*command, "--base-url", server.url, "--num-prompts", "12", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)
    return content


@pytest.mark.parametrize("api", ["chat", "completions", "generate"])
def test_the_load_generator_reads_every_route(server: LiveServer, api: str) -> None:
    flags = ("--api", api, "--max-concurrency", "4", "--output-len", "40", "--ignore-eos")
    content = _bench_serve(server, *flags)
    assert content["completed"] == 12
    assert content["total_output_tokens"] == 12 * 40
    assert content["token_semantics"] == "server_usage"
    assert content["nfe"] > 0
    assert content["tpf"] == pytest.approx(12 * 40 / content["nfe"])
    assert content["chunks_per_request"] > 1
    assert 0 < content["mean_ttft_ms"] < content["mean_e2el_ms"]
    assert content["peak_concurrency"] == 4


def test_the_load_generator_gets_exact_chunks_and_drafts(server: LiveServer) -> None:
    flags = ("--request-rate", "20", "--stream-mode", "both", "--chunk-usage")
    content = _bench_serve(server, *flags, "--goodput", "e2el:60000", "ttft:60000")
    assert content["chunk_token_semantics"] == "server_usage"
    assert 0 < content["mean_first_snapshot_ms"] < content["mean_e2el_ms"]
    assert content["request_goodput"] == pytest.approx(content["request_throughput"])


@pytest.mark.slow
def test_random_ids_of_the_load_generator_are_served(server: LiveServer) -> None:
    flags = ("--dataset", "random", "--tokenizer", "demo", "--api", "completions")
    lengths = ("--input-len", "50", "--output-len", "20", "--ignore-eos", "--warmup", "0")
    content = _bench_serve(server, *flags, *lengths)
    assert content["total_input_tokens"] == 12 * 50
    assert content["total_output_tokens"] == 12 * 20
