# SPDX-License-Identifier: Apache-2.0
"""The examples of README.md run as they are printed."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.live_server import running_server

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Fenced code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@functools.cache
def result_of(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Of a program, which is run once for all that is asked of it."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize("code", blocks("python"))
def test_python_example(code: str, directory: Path) -> None:
    result = result_of(code, directory)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_python_example_answers_its_question(directory: Path) -> None:
    result = result_of(blocks("python")[0], directory)
    assert result.stdout.count("#### 36") == 3, result.stdout
    assert "#### 5" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)  # the zoo has some twenty runs, and the host may do other work
@pytest.mark.parametrize("line", [x for x in "".join(blocks("sh")).splitlines() if x])
def test_shell_example(line: str, tmp_path: Path) -> None:
    command = line.split("#", maxsplit=1)[0].strip()
    if command.startswith("bash "):
        script = command.split()[1]
        assert (ROOT / script).is_file(), f"README.md names {script}"
        return
    if command.startswith("diffulex serve"):
        pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
        with running_server(*command.split()[2:]) as server:
            assert server.url
        return
    # A zoo has some twenty runs; the models are in the source tree only.
    limit = 2 if "--zoo" in command else 8
    command = re.sub(r"--limit \d+", f"--limit {limit}", command)
    uses_tree = "--zoo" in command or "examples/" in command
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    result = subprocess.run(
        command, shell=True, cwd=ROOT if uses_tree else tmp_path, capture_output=True, text=True,
        check=False, input="/quit\n", env=environment, timeout=570,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_commands_of_a_wheel() -> None:
    """What scripts/first_answer.py runs and times in a bare environment; here without the first line."""
    (block,) = blocks("shell")
    install, answer = block.splitlines()
    assert install == "pip install diffulex-*.whl"
    command = [sys.executable, "-m", *shlex.split(answer)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert result.stdout.endswith("#### 31\n")
    assert 'ANSWER = "#### 31"' in (ROOT / "scripts/first_answer.py").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_cpp_example(tmp_path: Path) -> None:
    (code,) = blocks("cpp")
    (cmake,) = blocks("cmake")
    (tmp_path / "main.cpp").write_text(code, encoding="utf-8")
    (tmp_path / "CMakeLists.txt").write_text(cmake, encoding="utf-8")
    (commands,) = blocks("bash")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-ec", commands], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": path}, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^done after \d+ steps$", result.stdout, re.MULTILINE)


def test_says_what_the_bundled_model_is_for() -> None:
    """Before the first command that a reader may try with a question of their own."""
    start = README[: README.index("## Use it")]
    assert "answer arithmetic word problems in English" in " ".join(start.split())
