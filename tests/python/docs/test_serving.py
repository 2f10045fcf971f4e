# SPDX-License-Identifier: Apache-2.0
"""docs/serving.md says what the server does: its examples run, its tables are complete."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from diffulex.server.args import build_arg_parser, parse_args
from diffulex.server.http.http_protocol import ConnectionLimits
from fixtures.live_server import LiveServer, running_server

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
DOCUMENTED_URL = "http://127.0.0.1:8000"
QUESTION = "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?"


def blocks(language: str) -> list[str]:
    """Fenced code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)


def shell_commands() -> list[list[str]]:
    """Every command of the shell blocks, in words; one may go over several lines."""
    found: list[list[str]] = []
    for block in blocks("sh"):
        pending = ""
        for line in block.splitlines():
            if line.endswith("\\"):
                pending += line[:-1]
                continue
            pending += line + "\n"
            try:
                words = shlex.split(pending)
            except ValueError:  # within quotes
                continue
            if words:
                found.append(words)
            pending = ""
        assert not pending, pending
    return found


COMMANDS = shell_commands()


def commands(name: str) -> list[list[str]]:
    return [command for command in COMMANDS if command[0] == name]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running_server("--device", "cpu") as running:
        yield running


def run(command: list[str], server: LiveServer) -> str:
    """Standard output of a command against the live server."""
    words = [word.replace(DOCUMENTED_URL, server.url) for word in command]
    result = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@functools.cache
def output_of(code: str, server: LiveServer) -> str:
    """What a program prints, which is run once for all that is asked of it."""
    return run([sys.executable, "-c", code], server)


def test_every_kind_of_command_is_covered() -> None:
    """A command that no test of this file knows would not be tested."""
    # The last one is a variable of the command that follows it; tests of deploy/ know both.
    known = {"curl", "python", "diffulex", "docker", "pip", "sudo", "DIFFULEX_API_KEY=…"}
    assert {command[0] for command in COMMANDS} == known
    assert len(commands("curl")) == 4
    assert len(blocks("python")) == 6


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", commands("curl"), ids=lambda command: command[-1][:40])
def test_curl(command: list[str], server: LiveServer) -> None:
    output = run(command, server)
    body = json.loads(command[-1])
    if body.get("stream"):
        frames = [line for line in output.splitlines() if line.startswith("data: ")]
        assert frames[-1] == "data: [DONE]"
        assert any('"buffer_snapshot"' in frame for frame in frames)
        return
    answer = json.loads(output)
    if body.get("messages") == []:
        assert answer["error"]["code"] == "invalid_request"
        assert answer["detail"] == answer["error"]["message"]
    elif "messages" in body:
        assert answer["choices"][0]["message"]["content"].endswith("#### 7")
    else:
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split("\n", 1)[0])
def test_python(code: str, server: LiveServer) -> None:
    for module in ("openai", "langchain_openai"):
        if module in code:
            pytest.importorskip(module, reason=f"{module} is not installed")
    assert output_of(code, server).strip()


def test_python_examples_answer(server: LiveServer) -> None:
    pytest.importorskip("openai", reason="openai is not installed")
    output = output_of(blocks("python")[0], server)
    assert output.count("#### 36") == 2
    assert "tokens per forward" in output
    output = output_of(blocks("python")[2], server)
    assert output.startswith("completed ")
    assert "#### 36" in output
    slow, fast = sorted(
        int(line.split()[1]) for line in output_of(blocks("python")[4], server).splitlines()
    )[::-1]
    assert slow > fast


@pytest.mark.parametrize("command", commands("python"), ids=lambda command: command[1])
def test_terminal_client(command: list[str], server: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "recording.json"
    output = run([sys.executable, *command[1:], "--record", str(file)], server)
    assert output.endswith("3+4=7\n#### 7\n")
    assert "forward 1," in output
    assert json.loads(file.read_text(encoding="utf-8"))["text"] == "3+4=7\n#### 7"
    again = run([sys.executable, command[1], "--replay", str(file), "--speed", "1000"], server)
    assert again.endswith("3+4=7\n#### 7\n")


def test_terminal_client_converses(server: LiveServer) -> None:
    program = [sys.executable, "examples/python/terminal_client.py", "--url"]
    lines = f"/threshold 0.5\n{QUESTION}\n/nonsense\n/history on\n{QUESTION}\n/quit\n"
    result = subprocess.run(
        [*program, server.url], cwd=ROOT, input=lines, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n3+4=7\n#### 7\n") == 2
    assert result.stderr.count("tokens,") == 2
    assert "error: expected /threshold X" in result.stderr
    nowhere = subprocess.run(
        [*program, "http://127.0.0.1:1", "x"], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert nowhere.returncode == 1
    assert nowhere.stderr.startswith("error: http://127.0.0.1:1: ")


@pytest.mark.parametrize("command", commands("diffulex"), ids=" ".join)
def test_server_command_is_accepted(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFULEX_API_KEY", raising=False)
    assert command[1] == "serve"
    words = [word.replace("$DIFFULEX_KEY", "key") for word in command[2:]]
    if "--model" in words:
        words[words.index("--model") + 1] = "demo"
    assert parse_args(words).model == "demo"


def test_flags_exist() -> None:
    """Every flag in the text is one of the server, or of the program named beside it."""
    known = {flag for action in build_arg_parser()._actions for flag in action.option_strings}
    known |= {"--shm-size", "--ipc"}  # of docker
    prose = re.sub(r"^```.*?^```", "", GUIDE, flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"--[a-z][\w-]+", prose)) <= known


def test_defaults_of_limits(server: LiveServer) -> None:
    info = get(server, "server_info")
    args = {**info["server_args"], "max_num_reqs": info["max_num_reqs"]}
    table = GUIDE[GUIDE.index("## Limits") :].split("\n## ")[0]
    for flags, value in re.findall(r"^\| (`--[^|]+) \| ([\w, ]+) \|", table, re.MULTILINE):
        names = [name[2:].replace("-", "_") for name in re.findall(r"--[\w-]+", flags)]
        # Words stand for 0: off, or found at the start.
        values = [int(part) if part.isdigit() else 0 for part in value.split(", ")]
        for name, expected in zip(names, values * (len(names) if len(values) == 1 else 1)):
            assert args[name] == expected, name


def test_default_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    spared = re.search(r"^\| `--max-connections` \| open files less (\d+) \|", GUIDE, re.MULTILINE)
    assert spared is not None
    assert ConnectionLimits.of(1, 1, 0).max_connections == 1024 - int(spared[1])


def get(server: LiveServer, path: str) -> Any:
    with urllib.request.urlopen(f"{server.url}/{path}") as answer:
        return json.load(answer)


def post(server: LiveServer, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"{server.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return str(answer.read().decode())


def test_table_of_routes_is_complete(server: LiveServer) -> None:
    section = GUIDE[GUIDE.index("\nRoutes:") : GUIDE.index("## Streaming")]
    documented = {path for _, path in re.findall(r"`(GET|POST) (/[^`]*)`", section)}
    paths = {
        re.sub(r"\{\w+(:path)?\}", "{id}", path) for path in get(server, "openapi.json")["paths"]
    }
    aliases = {"/get_server_info"}
    assert documented - paths == {"/ui", "/openapi.json"}
    assert paths - documented == aliases & paths


def test_table_of_usage_is_complete(server: LiveServer) -> None:
    section = GUIDE[GUIDE.index("## Usage") : GUIDE.index("## Sampling")]
    named = set(re.findall(r"`(\w+(?:\.\w+)?)`", section))
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    usage = json.loads(post(server, "v1/chat/completions", body))["usage"]
    fields = set(usage) - {"prompt_tokens_details"}
    fields |= {f"prompt_tokens_details.{name}" for name in usage["prompt_tokens_details"]}
    assert fields <= named, fields - named
    rows = set(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert listed <= fields, listed - fields
    assert usage["tpf"] == pytest.approx(usage["completion_tokens"] / usage["nfe"])


def test_table_of_snapshots_is_complete(server: LiveServer) -> None:
    section = GUIDE[GUIDE.index("### Snapshots") : GUIDE.index("A client keeps a draft")]
    rows = "".join(re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE))
    body = {
        "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True,
        "stream_mode": "denoise", "denoise_detail": True,
    }  # fmt: skip
    frames = [json.loads(line[6:]) for line in post(server, "v1/chat/completions", body).splitlines()
              if line.startswith("data: {")]  # fmt: skip
    snapshots = [frame for frame in frames if frame["event"] == "buffer_snapshot"]
    assert snapshots
    for name in re.findall(r"`(\w+)`", rows):
        assert name in snapshots[0], name
    for snapshot in snapshots:
        assert snapshot["choices"] == []
        assert len(snapshot["confidences"]) == len(snapshot["token_ids"])
        assert {"start", "end", "state", "masked"} <= set(snapshot["blocks"][0])


def test_logprobs_are_the_documented_ones(server: LiveServer) -> None:
    """The value belongs to the forward that is named, and is no probability above one."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "logprobs": True,
    }  # fmt: skip
    answer = json.loads(post(server, "v1/chat/completions", body))
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == answer["choices"][0]["message"]["content"]
    assert all(item["logprob"] <= 0 for item in content)
    assert all(1 <= item["diffulex"]["step"] <= answer["usage"]["nfe"] for item in content)
