# SPDX-License-Identifier: Apache-2.0
"""The C++ package inside the Python package: `find_package(diffulex)` after `pip install`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import diffulex_ext

ROOT = Path(__file__).parents[3]

cmake = shutil.which("cmake")
needs_cmake = pytest.mark.skipif(cmake is None, reason="cmake is not on PATH")


def build(project: Path, directory: Path, *definitions: str) -> None:
    """Configure and build a project that knows only the package's prefix."""
    assert cmake is not None
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    prefix = f"-DCMAKE_PREFIX_PATH={diffulex_ext.cmake_prefix_path}"
    configure = [cmake, "-S", str(project), "-B", str(directory), *generator, prefix, *definitions]
    for command in (configure, [cmake, "--build", str(directory)]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_command_line_prints_the_prefix(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diffulex_ext", "--cmake-prefix-path"]
    # Nothing here needs torch, which takes seconds to import.
    environment = {**os.environ, "DIFFULEX_NO_TORCH": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    prefix = Path(result.stdout.strip())
    assert prefix == Path(diffulex_ext.cmake_prefix_path)
    assert (prefix / "lib" / "cmake" / "diffulex" / "diffulexConfig.cmake").is_file()


@pytest.mark.slow
@needs_cmake
@pytest.mark.parametrize("component", ["core", "kernels"])
def test_consumer_project(tmp_path: Path, component: str) -> None:
    version = diffulex_ext.__version__
    build(
        ROOT / "tests" / "cmake" / "consumer",
        tmp_path,
        f"-DCONSUMER_COMPONENT={component}",
        f"-DCONSUMER_VERSION={version}",
    )
    assert f"diffulex {version} {component}" in output_of(str(tmp_path / "consumer"))


@pytest.mark.slow
@needs_cmake
def test_embedding_example(tmp_path: Path) -> None:
    build(ROOT / "examples" / "cpp_embed", tmp_path)
    assert output_of(str(tmp_path / "cpp_embed"))
