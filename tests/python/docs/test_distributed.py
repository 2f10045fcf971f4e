# SPDX-License-Identifier: Apache-2.0
"""docs/distributed.md: its example runs, its commands are answered by a server with two replicas."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from diffulex.distributed.router import POLICIES
from diffulex.server.args import build_arg_parser, parse_args
from diffulex.tools.cli import build_parser
from fixtures.live_server import LiveServer, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # longer than that of what it starts

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)


COMMANDS = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    (serve,) = (command for command in COMMANDS if command[0] == "diffulex")
    assert parse_args(serve[2:]).data_parallel_size == 2
    with running_server(*serve[3:]) as running:
        yield running


def test_every_kind_of_command_is_covered() -> None:
    assert {command[0] for command in COMMANDS} == {"curl", "diffulex", "python"}
    assert len(blocks("python")) == 4


def test_memory_of_ranks_is_what_the_program_finds() -> None:
    (command,) = (command for command in COMMANDS if command[0] == "python")
    result = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") > 8
    assert result.stdout in GUIDE


@pytest.mark.parametrize(
    ("index", "printed"), [(0, "8 2\n"), (1, "1 2\n"), (2, "2\n"), (3, "1 2\n")]
)
def test_python(index: int, printed: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", blocks("python")[index]],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == printed


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: LiveServer) -> None:
    """In the order of the page: replica 1 is drained in the middle."""
    answers = []
    for command in COMMANDS:
        if command[0] == "curl":
            words = [word.replace("http://127.0.0.1:8000", server.url) for word in command]
            result = subprocess.run(words, capture_output=True, text=True, check=True, timeout=240)
            answers.append(json.loads(result.stdout))
    assert [row["state"] for row in answers[0]["replicas"]] == ["ready", "ready"]
    assert answers[1]["state"] == "draining"
    assert answers[2] == {"status": "ready", "degraded": [1]}
    assert answers[3]["state"] == "ready"
    assert answers[4] == {"status": "ready"}


def test_answers_and_reports_are_those_of_the_page(server: LiveServer) -> None:
    """The bundled model on two replicas, as a client of OpenAI's API sees it; routes and metrics."""
    body = {
        "messages": [
            {"role": "user", "content": "Tom has 3 apples. He buys 4 more apples. How many apples"
             " does Tom have now?"}
        ],
        "temperature": 0,
    }  # fmt: skip
    texts = {post(server, "v1/chat/completions", body) for _ in range(4)}
    assert len(texts) == 1
    assert texts.pop().endswith("#### 7")
    paths = set(json.loads(get(server, "openapi.json"))["paths"])
    routes = set(re.findall(r"^\| `(?:GET|POST) (/[^`?]*)", GUIDE, re.MULTILINE))
    assert routes <= paths
    assert {path for path in paths if path.startswith("/replicas")} <= routes
    text = get(server, "metrics")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", GUIDE, re.MULTILINE)
    assert len(rows) == 7
    for name, _, labels in rows:
        sample = re.search(rf"^diffulex_{name}{{(.*?)}} ", text, re.MULTILINE)
        assert sample is not None, name
        found = set(re.findall(r"(\w+)=", sample[1])) - {"model_name"}
        assert found == set(re.findall(r"`(\w+)`", labels)), name


def get(server: LiveServer, path: str) -> str:
    with urllib.request.urlopen(f"{server.url}/{path}") as answer:
        return str(answer.read().decode())


def post(server: LiveServer, path: str, body: object) -> str:
    request = urllib.request.Request(
        f"{server.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def test_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = {flag for action in build_arg_parser()._actions for flag in action.option_strings}
    with pytest.raises(SystemExit):
        build_parser("doctor").parse_args(["doctor", "--help"])
    known |= set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out))
    for path in set(re.findall(r"benchmarks/python/\w+\.py", GUIDE)):
        program = (ROOT / path).read_text(encoding="utf-8")
        known |= set(re.findall(r'add_argument\("(--[a-z][\w-]+)"', program))
    prose = re.sub(r"^```.*?^```", "", GUIDE, flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"--[a-z][\w-]+", prose)) <= known
    assert all(policy in GUIDE for policy in POLICIES[1:])
