# SPDX-License-Identifier: Apache-2.0
"""How the build finds torch: located, never imported, also from an isolated environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

cmake = shutil.which("cmake")
pytestmark = pytest.mark.skipif(cmake is None, reason="cmake is not on PATH")

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(search LANGUAGES NONE)
list(APPEND CMAKE_MODULE_PATH "{root}/cmake")
include(DiffulexTorch)
file(WRITE "${{CMAKE_BINARY_DIR}}/result.txt"
  "${{DIFFULEX_TORCH_PACKAGE_DIR}};${{DIFFULEX_TORCH_VERSION}};${{DIFFULEX_TORCH_CUDA_VERSION}}")
"""


def make_torch(site: Path, version: str = "2.13.0+cpu", cuda: str | None = None) -> Path:
    """A torch that fails when imported and has only what the search looks at."""
    package = site / "torch"
    stable = package / "include" / "torch" / "csrc" / "stable"
    stable.mkdir(parents=True)
    (stable / "library.h").touch()
    (package / "lib").mkdir()
    for name in ("libtorch.so", "libtorch_cpu.so"):
        (package / "lib" / name).touch()
    (package / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    (package / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n"
    )
    return package


class Search:
    """A throw-away CMake project that only looks for torch."""

    def __init__(self, directory: Path) -> None:
        self.source = directory / "source"
        self.build = directory / "build"
        self.source.mkdir()
        (self.source / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))

    def run(self, *definitions: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Configure with a clean environment plus `environment`."""
        assert cmake is not None
        drop = {"VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "DIFFULEX_TORCH_DIR"}
        clean = {key: value for key, value in os.environ.items() if key not in drop}
        command = [cmake, "-S", str(self.source), "-B", str(self.build), *definitions]
        return subprocess.run(
            command, env={**clean, **environment}, capture_output=True, text=True, check=False
        )

    def found(self) -> list[str]:
        return (self.build / "result.txt").read_text().split(";")


@pytest.fixture
def search(tmp_path: Path) -> Search:
    return Search(tmp_path)


@pytest.fixture
def empty_python(tmp_path: Path) -> tuple[Path, Path]:
    """Interpreter and site-packages of an environment without torch."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    command = [str(python), "-I", "-c", code]
    site = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return python, Path(site)


def test_finds_torch_of_the_interpreter_without_importing_it(
    search: Search, empty_python: tuple[Path, Path]
) -> None:
    python, site = empty_python
    package = make_torch(site, cuda="13.0")
    result = search.run(f"-DPython_EXECUTABLE={python}")
    assert result.returncode == 0, result.stderr
    assert search.found() == [str(package), "2.13.0+cpu", "13.0"]


def test_sees_through_an_isolated_environment(
    search: Search, empty_python: tuple[Path, Path], tmp_path: Path
) -> None:
    # pip hides the user's site-packages with a sitecustomize module on PYTHONPATH.
    python, site = empty_python
    package = make_torch(site)
    isolated = tmp_path / "isolated"
    isolated.mkdir()
    (isolated / "sitecustomize.py").write_text(f"import sys\nsys.path.remove({str(site)!r})\n")
    hidden = [str(python), "-c", "import importlib.util as u; assert u.find_spec('torch') is None"]
    subprocess.run(hidden, env={**os.environ, "PYTHONPATH": str(isolated)}, check=True)
    result = search.run(f"-DPython_EXECUTABLE={python}", PYTHONPATH=str(isolated))
    assert result.returncode == 0, result.stderr
    assert search.found()[0] == str(package)


def test_falls_back_to_the_active_environment(
    search: Search, empty_python: tuple[Path, Path], tmp_path: Path
) -> None:
    python, site = empty_python
    package = make_torch(site)
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    other = tmp_path / "other" / "bin" / "python"
    active = str(python.parents[1])
    result = search.run(f"-DPython_EXECUTABLE={other}", VIRTUAL_ENV=active)
    assert result.returncode == 0, result.stderr
    assert search.found()[0] == str(package)


def test_a_named_directory_wins_and_is_not_remembered(
    search: Search, empty_python: tuple[Path, Path], tmp_path: Path
) -> None:
    python, site = empty_python
    package = make_torch(site)
    named = make_torch(tmp_path / "named", version="2.11.0+cu130", cuda="13.0")
    interpreter = f"-DPython_EXECUTABLE={python}"
    assert search.run(interpreter, DIFFULEX_TORCH_DIR=str(named)).returncode == 0
    assert search.found() == [str(named), "2.11.0+cu130", "13.0"]
    assert search.run(interpreter).returncode == 0
    assert search.found() == [str(package), "2.13.0+cpu", ""]


def test_no_torch_names_three_remedies(search: Search, empty_python: tuple[Path, Path]) -> None:
    python, _ = empty_python
    result = search.run(f"-DPython_EXECUTABLE={python}")
    assert result.returncode != 0
    for remedy in ("whl/cpu", "DIFFULEX_TORCH_DIR", "-DDIFFULEX_BUILD_OPS=OFF"):
        assert remedy in result.stderr


def test_old_torch_is_refused(search: Search, tmp_path: Path) -> None:
    package = make_torch(tmp_path / "old", version="2.9.1")
    result = search.run(f"-DDIFFULEX_TORCH_DIR={package}", f"-DPython_EXECUTABLE={sys.executable}")
    assert result.returncode != 0
    assert "got 2.9.1" in " ".join(result.stderr.split())
