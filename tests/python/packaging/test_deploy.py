# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/: what can be said of them without a container engine or a running systemd."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "diffulex.service").read_text(encoding="utf-8")
COMPOSE = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of the Dockerfile, in order."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [
        (name, rest.strip())
        for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def of_kind(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def test_image_has_two_stages_and_leaves_the_compilers_behind() -> None:
    assert of_kind("FROM") == ["${BASE} AS build", "${RUNTIME}"]
    last = DOCKERFILE[DOCKERFILE.index("FROM ${RUNTIME}") :]
    assert "g++" not in last
    assert "COPY . " not in last


def test_image_runs_without_rights() -> None:
    """The last user is one that the image makes, and nothing runs as root after it."""
    names = [name for name, _ in instructions()]
    assert of_kind("USER") == ["diffulex"]
    assert "RUN" not in names[names.index("USER") :]
    assert re.search(r"useradd [^\n]*\bdiffulex\b", DOCKERFILE)


def test_image_reports_its_health_where_it_listens() -> None:
    (entry,) = of_kind("ENTRYPOINT")
    words = json.loads(entry)  # the exec form: signals reach the server
    assert words[:2] == ["diffulex", "serve"]
    port = words[words.index("--port") + 1]
    (check,) = of_kind("HEALTHCHECK")
    assert f"http://127.0.0.1:{port}/health" in check
    assert of_kind("EXPOSE") == [port]
    assert of_kind("STOPSIGNAL") == ["SIGTERM"]


def test_flags_of_image_and_unit_are_the_servers() -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from diffulex.server.args import parse_args

    (entry,) = of_kind("ENTRYPOINT")
    args = parse_args(json.loads(entry)[2:])
    assert (args.host, args.port) == ("0.0.0.0", 8000)
    (flags,) = re.findall(r'DIFFULEX_FLAGS="([^"]*)"', UNIT)
    words = [word.replace("/models/SDAR-8B-Chat", "demo") for word in shlex.split(flags)]
    assert parse_args(words).model == "demo"
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[0])
    assert stop_s >= args.drain_timeout + 10


def test_copied_files_and_build_arguments_exist() -> None:
    for arguments in of_kind("COPY"):
        if not arguments.startswith("--from"):
            assert (ROOT / arguments.split()[0]).exists()
    declared = {argument.partition("=")[0] for argument in of_kind("ARG")}
    used = set(re.findall(r"--build-arg (\w+)=", DOCKERFILE + GUIDE))
    assert used == {"BASE", "RUNTIME", "TORCH_INDEX"} <= declared
    assert set(re.findall(r"\$\{(\w+)\}", DOCKERFILE)) <= declared


def test_build_context_has_what_the_build_reads() -> None:
    """What .dockerignore leaves out is not under version control."""
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    wanted = [line for line in patterns if line and not line.startswith("#")]
    assert {".git", "build", ".deps"} <= set(wanted)
    for pattern in wanted:
        if "*" not in pattern and pattern != ".git":
            listed = subprocess.run(
                ["git", "-c", "safe.directory=*", "ls-files", pattern],
                cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert listed.stdout == "", pattern


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_unit_is_valid(tmp_path: Path) -> None:
    """With an interpreter that exists here in the place of the installed program."""
    unit = tmp_path / "diffulex.service"
    unit.write_text(UNIT.replace("/opt/diffulex/bin/diffulex", sys.executable), encoding="utf-8")
    result = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    ours = [line for line in result.stderr.splitlines() if "diffulex.service" in line]
    assert ours == []


@pytest.fixture
def _hang_up() -> Iterator[None]:
    """Below `nohup` the signal is ignored, also by what is started here."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hang_up")
def test_reload_is_for_replicas() -> None:
    """What the unit runs tells the server, unless that would end it."""
    (command,) = re.findall(r"^ExecReload=(.+)$", UNIT, re.MULTILINE)
    for flags, text in (
        ("--model m --data-parallel-size 2", ""),
        ("--data-parallel-size 16 --model m", ""),
        ("--model m", "expected --data-parallel-size in DIFFULEX_FLAGS, got none"),
        ("--model m --data-parallel-size 1", "expected several replicas, got one"),
        ("--data-parallel-size=1 --model m", "expected several replicas, got one"),
    ):
        is_told = not text
        with subprocess.Popen(["sleep", "600"]) as server:
            variables = {"DIFFULEX_FLAGS": flags, "MAINPID": str(server.pid), "PATH": os.defpath}
            result = subprocess.run(
                shlex.split(command), env=variables, capture_output=True, text=True, check=False
            )
            if not is_told:
                server.kill()
        assert (result.returncode == 0) is is_told
        assert result.stderr == (f"reload: {text}\n" if text else "")
        assert server.returncode == -(signal.SIGHUP if is_told else signal.SIGKILL)


def test_composed_server_has_two_replicas() -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from diffulex.server.args import parse_args

    (service,) = yaml.safe_load(COMPOSE)["services"].values()
    words = [word.replace("/models/SDAR-8B-Chat", "demo") for word in service["command"]]
    args = parse_args(words)
    assert args.engine_kwargs()["data_parallel_size"] == 2
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    assert int(service["stop_grace_period"].removesuffix("s")) >= args.drain_timeout + 10
    (port,) = of_kind("EXPOSE")
    assert service["ports"] == [f"{port}:{port}"]
    tag = service["image"]
    assert f"-t {tag}" in DOCKERFILE
    assert f"-t {tag}" in GUIDE


def test_unit_restarts_what_a_restart_can_help() -> None:
    assert re.search(r"^Restart=on-failure$", UNIT, re.MULTILINE)
    assert re.search(r"^RestartPreventExitStatus=2$", UNIT, re.MULTILINE)
    assert re.search(r"^DynamicUser=yes$", UNIT, re.MULTILINE)
