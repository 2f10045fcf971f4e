# SPDX-License-Identifier: Apache-2.0
"""A second `pip install` of the sources compiles nothing again: pybind11 keeps its path."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SETUP = Path(__file__).resolve().parents[3] / "setup.py"
NAMES = ("pybind11_dir", "is_of_a_running_build")


def pybind11_dir() -> Any:
    """The function of setup.py and what it calls, without running the rest of it."""
    tree = ast.parse(SETUP.read_text(encoding="utf-8"))
    wanted = [
        node
        for node in tree.body
        if (
            isinstance(node, (ast.Import, ast.ImportFrom))
            and not (isinstance(node, ast.ImportFrom) and str(node.module).startswith("setuptools"))
        )
        or (isinstance(node, ast.FunctionDef) and node.name in NAMES)
    ]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(wanted, []), str(SETUP), "exec"), names)
    return names["pybind11_dir"]


def plant(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """An environment of its own, as pip makes one for every build."""
    for name in ("include/pybind11/pybind11.h", "share/cmake/pybind11/pybind11Config.cmake"):
        (place / name).parent.mkdir(parents=True)
        (place / name).write_text("// planted\n")
    module: Any = ModuleType("pybind11")
    module.__file__, module.__version__ = str(place / "__init__.py"), "9.9"
    module.get_cmake_dir = lambda: "/usr/share/cmake/pybind11"
    monkeypatch.setitem(sys.modules, "pybind11", module)


def test_two_environments_share_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = tmp_path / "build"
    plant(monkeypatch, tmp_path / "first")
    first = pybind11_dir()(build)
    header = build / "pybind11-9.9/include/pybind11/pybind11.h"
    changed = header.stat().st_mtime_ns
    plant(monkeypatch, tmp_path / "second")
    assert pybind11_dir()(build) == first == str(build / "pybind11-9.9/share/cmake/pybind11")
    assert header.stat().st_mtime_ns == changed
    assert [path.name for path in build.iterdir()] == ["pybind11-9.9"]


def test_one_of_a_distribution_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "system").mkdir()
    plant(monkeypatch, tmp_path / "other")
    monkeypatch.setattr(sys.modules["pybind11"], "__file__", str(tmp_path / "system/__init__.py"))
    assert pybind11_dir()(tmp_path / "build") == "/usr/share/cmake/pybind11"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_copy_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    build = tmp_path / "build"
    plant(monkeypatch, tmp_path / "source")

    def interrupted(*_: Path) -> None:
        raise error

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(error):
        pybind11_dir()(build)
    assert list(build.iterdir()) == []


def test_what_killed_builds_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a running one writes is not."""
    build = tmp_path / "build"
    plant(monkeypatch, tmp_path / "source")
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    running = f"pybind11.partial.{os.getppid()}"
    left = ("pybind11.partial", f"pybind11.partial.{done.pid}", f"pybind11.partial.{os.getpid()}")
    for name in (*left, running):
        (build / name / "include").mkdir(parents=True)
    pybind11_dir()(build)
    assert {path.name for path in build.iterdir()} == {"pybind11-9.9", running}


def test_the_copy_of_another_build_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was finished while this one copied."""
    build, rename = tmp_path / "build", Path.rename
    plant(monkeypatch, tmp_path / "source")

    def late(partial: Path, copy: Path) -> None:
        shutil.copytree(partial, copy)
        rename(partial, copy)

    monkeypatch.setattr(Path, "rename", late)
    assert Path(pybind11_dir()(build)).is_dir()
    assert [path.name for path in build.iterdir()] == ["pybind11-9.9"]
