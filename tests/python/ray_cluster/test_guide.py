# SPDX-License-Identifier: Apache-2.0
"""docs/ray.md: its examples and commands, the file of deploy/, and a server with backends in a cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures.extras import need_extra

need_extra("ray", "ray", "fastapi", "zmq")

from diffulex.config.table import CONFIG_TABLE  # noqa: E402
from diffulex.ray.serve import build_openai_app  # noqa: E402
from diffulex.server.args import build_arg_parser  # noqa: E402
from diffulex.tools.cli import build_parser  # noqa: E402
from fixtures.live_server import running_server  # noqa: E402
from ray_cluster.conftest import kill, until  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)


COMMANDS = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]


def commands(*begin: str) -> list[list[str]]:
    return [command for command in COMMANDS if tuple(command[: len(begin)]) == begin]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, **variables}, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip


def test_every_kind_of_command_is_covered() -> None:
    kinds = {tuple(command[:2]) for command in COMMANDS}
    assert kinds == {
        ("pip", "install"), ("ray", "start"), ("serve", "run"), ("diffulex", "serve"),
        ("diffulex", "batch"),
    }  # fmt: skip
    assert len(blocks("python")) == 2


@pytest.mark.parametrize(("index", "printed"), [(0, "#### 7\n"), (1, "8\n")])
def test_python(cluster: Any, index: int, printed: str) -> None:
    # In the cluster of this test, which is there already.
    code = blocks("python")[index].replace('"local"', '"auto"')
    code = code.replace("ray.init(include_dashboard=False)", 'ray.init("auto")')
    result = run("-c", code, RAY_ADDRESS=cluster.address)
    assert result.returncode == 0, result.stderr
    # Of nodes that earlier tests have taken away Ray tells this program as well, on the same stream.
    assert printed in result.stdout.splitlines(keepends=True), result.stdout


def test_batch(cluster: Any, tmp_path: Path) -> None:
    """In the order of the page: two replicas here, then what is left in the cluster."""
    local, resumed = commands("diffulex", "batch")
    source = tmp_path / "prompts.jsonl"
    prompt = {"prompt": "Tom has 3 apples.", "max_tokens": 4, "temperature": 0}
    for count, command in ((3, local), (5, resumed)):
        source.write_text((json.dumps(prompt) + "\n") * count)
        words = [str(tmp_path / w) if w in ("prompts.jsonl", "answers") else w for w in command[1:]]
        result = run("-m", "diffulex", *words, RAY_ADDRESS=cluster.address)
        assert result.returncode == 0, result.stderr
    assert "[2 answered, 0 failed, 3 kept]" in result.stderr
    lines = [line for path in (tmp_path / "answers").iterdir() for line in path.open()]
    texts = [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in lines]
    assert len(texts) == 5
    assert len(set(texts)) == 1


def test_a_server_answers_from_the_cluster_and_gets_a_lost_backend_back(cluster: Any) -> None:
    import urllib.request

    from ray._private.state import actors

    def pids() -> set[int]:
        return {one["Pid"] for one in actors().values() if one["State"] == "ALIVE"}

    others = pids()  # of tests before
    (command,) = commands("diffulex", "serve")
    words = [cluster.address if word == "auto" else word for word in command[3:]]
    body = {"prompt": "Tom has 3 apples.", "max_tokens": 8, "temperature": 0}

    def ask() -> str:
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    with running_server(*words) as server:
        text = ask()
        with urllib.request.urlopen(f"{server.url}/replicas") as answer:
            (row,) = json.load(answer)["replicas"]
        assert row["state"] == "ready"
        (pid,) = pids() - others
        kill(pid)
        assert ask() == text  # it waits until there is a backend
        with urllib.request.urlopen(f"{server.url}/replicas") as answer:
            (row,) = json.load(answer)["replicas"]
        assert row["restarts"] == 1
    until(lambda: pids() <= others)


def test_failures_are_measured() -> None:
    """In clusters of its own: the loss of a process, which is known soon after."""
    program = str(ROOT / "benchmarks" / "python" / "bench_failures.py")
    result = run(program, "--rows", "F19", "--repeats", "1", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    (line,) = (json.loads(each) for each in result.stdout.splitlines() if each.startswith("{"))
    assert (line["row"], line["failure"]) == ("F19", "actor of a rank killed (Ray)")
    assert len(line["times_s"]) == 1
    assert line["times_s"][0] > 0


def test_the_file_of_an_application_is_one() -> None:
    document = yaml.safe_load((ROOT / "deploy" / "ray_serve.yaml").read_text())
    (application,) = document["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == (build_openai_app.__module__, build_openai_app.__name__)
    deployment = build_openai_app(application["args"])._bound_deployment
    assert deployment._deployment_config.autoscaling_config.max_replicas == 8
    (words,) = commands("serve", "run")
    assert words[2] == f"{module}:{name}"
    build_openai_app(dict(word.split("=") for word in words[3:]))


def test_names_exist() -> None:
    prose = re.sub(r"^```.*?^```", "", GUIDE, flags=re.DOTALL | re.MULTILINE)
    parsers = (
        build_arg_parser(),
        build_parser("batch")._subparsers._group_actions[0].choices["batch"],
    )
    known = {flag for p in parsers for action in p._actions for flag in action.option_strings}
    assert set(re.findall(r"--[a-z][\w-]+", prose)) - {"--head"} <= known
    keys = {"distributed_executor", "ray_address", "ray_placement_timeout"}
    assert keys <= set(re.findall(r"`(\w+)`", GUIDE)) & set(CONFIG_TABLE)
