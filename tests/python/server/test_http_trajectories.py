# SPDX-License-Identifier: Apache-2.0
"""Trajectories over HTTP: `return_trajectory` on every route, and `diffulex trace` on what was sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app_server import AppServer
from diffulex import Diffulex
from diffulex.errors import ConfigError
from diffulex.server.args import parse_args
from diffulex.server.http.api_server import create_app
from diffulex.serving.backend_worker import default_engine_factory
from diffulex.serving.engine_loop import EngineLoop
from diffulex.serving.inproc_frontend import InprocFrontend
from diffulex.tools.cli import main
from diffulex.trace.files import read_traces, trajectory_of
from diffulex.trace.trajectory import Trajectory, replayed
from fake_frontend import FakeFrontend
from http_client import AppClient, check_error, frames

MESSAGES = [{"role": "user", "content": "Ben has 8 coins. He loses 3 coins. How many are left?"}]
CHAT, TEXT, NATIVE, RESPONSES = (
    "/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses",
)  # fmt: skip
SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_reqs": 4, "num_pages": 64}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    loop = EngineLoop("demo", SETTINGS, engine_factory=default_engine_factory)
    frontend = InprocFrontend(loop, tokenizer=None)
    with AppServer(create_app(frontend)) as server:
        yield server.url


@pytest.fixture(scope="module")
def expected() -> Iterator[tuple[list[int], Any, Any]]:
    """Prompt, and the outputs of the engine at both levels."""
    with Diffulex("demo", **SETTINGS) as engine:
        text = engine.tokenizer.render_chat(MESSAGES)
        prompt = engine.tokenizer.encode(text, add_special_tokens=False)
        outputs = [
            engine.generate(
                [prompt], max_tokens=32, temperature=0.0, return_trajectory=level, summary=False
            )[0]
            for level in ("full", "blocks")
        ]
        yield prompt, *outputs


def ask(url: str, path: str, prompt: list[int], **body: Any) -> httpx.Response:
    asked = {"prompt": prompt, "temperature": 0, "max_tokens": 32, **body}
    response = httpx.post(url + path, json=asked, timeout=60)
    assert response.status_code == 200, response.text
    return response


def order(trajectory: Trajectory) -> list[Any]:
    """Everything but times; confidences as they are written down."""
    return [
        (
            step.step, step.is_prefill, step.new_tokens, step.settled, step.blocks,
            [(*c[:3], None if c.confidence is None else round(c.confidence, 6))
             for c in step.changes],
        )
        for step in trajectory.steps
    ]  # fmt: skip


@pytest.mark.parametrize("mode", [None, "block_append", "denoise", "both"])
@pytest.mark.parametrize("path", [TEXT, NATIVE])
def test_the_answer_has_the_trajectory_of_the_engine(
    url: str, path: str, mode: str | None, expected: Any
) -> None:
    prompt, output, _ = expected
    stream = {} if mode is None else {"stream": True, "stream_mode": mode}
    response = ask(url, path, prompt, return_trajectory="full", **stream)
    body = response.json() if mode is None else None
    if body is None:
        events = [event for event in frames(response) if isinstance(event, dict)]
        assert response.text.count('"trajectory"') == 1
        (body,) = [event for event in events if "diffulex-trajectory" in json.dumps(event)]
    holder = body if path == NATIVE else body["choices"][0]["diffulex"]
    trajectory = trajectory_of(holder["trajectory"])
    assert trajectory.token_ids == output.token_ids
    assert order(trajectory) == order(output.trajectory)
    *_, (_, tokens) = replayed(trajectory)
    assert tuple(tokens[: len(output.token_ids)]) == output.token_ids
    texts = holder["trajectory"]["texts"]
    assert "".join(texts[str(token)] for token in output.token_ids) == output.text


def test_the_levels(url: str, expected: Any) -> None:
    prompt, _, blocks = expected
    for level, found in (("blocks", "blocks"), (True, "full")):
        body = ask(url, TEXT, prompt, return_trajectory=level).json()
        record = body["choices"][0]["diffulex"]["trajectory"]
        assert record["level"] == found
        if found == "blocks":
            assert order(trajectory_of(record)) == order(blocks.trajectory)
    for level in ({}, {"return_trajectory": None}, {"return_trajectory": False},
                  {"return_trajectory": "none"}):  # fmt: skip
        for path in (TEXT, NATIVE):
            assert '"trajectory"' not in ask(url, path, prompt, **level).text


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, RESPONSES])
def test_other_levels_are_refused(path: str) -> None:
    frontend = FakeFrontend()
    client = AppClient(create_app(frontend))
    for level in ("all", "Full", 1, ["full"], {}):
        body = {"messages": MESSAGES, "prompt": "x", "input": "x", "return_trajectory": level}
        text = check_error(
            client.post(path, body),
            *(400, "invalid_request_error", "invalid_request", "return_trajectory"),
        )
        assert "return_trajectory: expected none, blocks, full, true or false, got" in text, level
        assert frontend.commands == []


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, RESPONSES])
def test_answers_that_are_too_long_for_one_are_refused(path: str) -> None:
    frontend = FakeFrontend()
    client = AppClient(create_app(frontend, max_trajectory_tokens=32))
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    prompt = (
        {"messages": MESSAGES} if path == CHAT else {"input" if name[4] == "o" else "prompt": "x"}
    )
    for level, limit in (("none", 33), ("blocks", 32), (True, 32)):
        body = {**prompt, "return_trajectory": level, name: limit}
        assert client.post(path, body).status_code == 200
    for level in ("blocks", True):
        response = client.post(path, {**prompt, "return_trajectory": level, name: 33})
        text = check_error(
            response, 400, "invalid_request_error", "invalid_request", "return_trajectory"
        )
        assert (
            "return_trajectory: expected max_tokens to be at most 32 with it"
            " (--max-trajectory-tokens), got 33" in text
        )
    assert len(frontend.commands) == 3


def test_the_bound_on_their_answers_is_a_flag() -> None:
    assert parse_args(["demo"]).app_options()["max_trajectory_tokens"] == 8192
    given = parse_args(["demo", "--max-trajectory-tokens", "0"]).app_options()
    frontend = FakeFrontend()
    client = AppClient(create_app(frontend, max_trajectory_tokens=given["max_trajectory_tokens"]))
    assert client.post(NATIVE, {"prompt": "x"}).status_code == 200
    response = client.post(NATIVE, {"prompt": "x", "return_trajectory": True, "max_tokens": 1})
    assert response.status_code == 400
    template = {"template_token_ids": [None] * 33, "return_trajectory": True}
    client = AppClient(create_app(frontend, max_trajectory_tokens=32))
    assert "got 33" in client.post(NATIVE, {"prompt": "x", **template}).text


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_the_other_routes_pass_it_on(path: str) -> None:
    frontend = FakeFrontend()
    sent = {"format": "made up"}
    frontend.script = lambda command: [frontend.reply(command, trajectory=sent)]
    client = AppClient(create_app(frontend))
    asked: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"input": "x"}
    asked["return_trajectory"] = True
    response = client.post(path, asked)
    assert response.status_code == 200, response.text
    body = response.json()
    assert frontend.commands[0].sampling_params.return_trajectory == "full"
    holder = body["choices"][0] if path == CHAT else body
    assert holder["diffulex"]["trajectory"] == sent
    streamed = client.post(path, {**asked, "stream": True}).text
    assert streamed.count('"made up"') == 1


def test_the_command_reads_what_the_server_sent(
    url: str, expected: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, output, _ = expected
    whole = ask(url, TEXT, prompt, return_trajectory="full")
    two = ask(url, TEXT, prompt, return_trajectory="full", n=2, temperature=1.0, seed=3)
    native = ask(url, NATIVE, prompt, return_trajectory="full")
    stream = ask(url, TEXT, prompt, return_trajectory="full", stream=True, stream_mode="both")
    for name, content, count in (
        ("one line without an end", whole.text, 1),
        ("over several lines", json.dumps(whole.json(), indent=2), 1),
        ("two choices", two.text, 2),
        ("several answers", f"{whole.text}\n{two.text}\n{native.text}\n", 4),
        ("a stream", f": ping\n\n{stream.text}", 1),
    ):
        path = tmp_path / f"{name}.txt"
        path.write_text(content, encoding="utf-8")
        read = list(read_traces(path))
        assert len(read) == count, name
        assert read[0][1].token_ids == output.token_ids, name
        assert read[0][0]["model"] == "demo", name
        page = tmp_path / "page.html"
        assert main(["trace", str(path), "--html", str(page)]) == 0
        assert "diffulex-recording" in page.read_text(encoding="utf-8")
    without = tmp_path / "without.json"
    without.write_text(ask(url, TEXT, prompt).text)
    capsys.readouterr()
    assert main(["trace", str(without)]) == 2
    assert "answers to requests with return_trajectory, got none" in capsys.readouterr().err
    cut = tmp_path / "cut.json"
    cut.write_text(f"{whole.text}\n{whole.text[:-9]}")
    assert len(list(read_traces(cut))) == 1
    other = tmp_path / "other.json"
    other.write_text('{\n"a": 1\n}')
    with pytest.raises(ConfigError, match=r"other\.json:1: expected diffulex-trajectory"):
        list(read_traces(other))
