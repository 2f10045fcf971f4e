# SPDX-License-Identifier: Apache-2.0
"""Wheels of other platforms: what can be told about them without these platforms."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Below Python 3.11 pytest itself needs the other.
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).resolve().parents[3]
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
#: What only GNU's linker knows.
GNU = ("--version-script", "--exclude-libs", "-z,defs", "as-needed", "$ORIGIN")


def test_platforms() -> None:
    assert TABLE["linux"]["archs"] == ["x86_64", "aarch64"]
    assert TABLE["macos"]["archs"] == ["arm64"]
    for name in re.findall(
        r"\{project\}/(\S+)", TABLE["before-build"] + TABLE["repair-wheel-command"]
    ):
        assert (ROOT / name).is_file(), name


@pytest.mark.skipif(
    importlib.util.find_spec("cibuildwheel") is None, reason="cibuildwheel is not installed"
)
@pytest.mark.parametrize(("platform", "tag"), [("linux", "manylinux"), ("macos", "macosx")])
def test_identifiers(platform: str, tag: str) -> None:
    command = [sys.executable, "-m", "cibuildwheel", "--platform", platform]
    command += ["--print-build-identifiers", str(ROOT)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    printed = result.stdout.split()
    expected = {
        f"{python.removesuffix('-*')}-{tag}_{architecture}"
        for python in TABLE["build"]
        for architecture in TABLE[platform]["archs"]
    }
    assert set(printed) == expected


def link_lines(folder: Path, *definitions: str) -> str:
    """What a build of both plugins would hand to the linker."""
    if shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.skip("cmake or ninja is not installed")
    command = ["cmake", "-S", str(ROOT), "-B", str(folder / "build"), "-G", "Ninja"]
    command += ["-DDIFFULEX_WITH_CUDA=OFF", "-DDIFFULEX_CCACHE=OFF", *definitions]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    text = (folder / "build" / "build.ninja").read_text()
    return "\n".join(re.findall(r"^  LINK_(?:FLAGS|LIBRARIES) = .*$", text, flags=re.MULTILINE))


def make_torch(folder: Path, suffix: str) -> str:
    """What the configure step reads of an installed torch."""
    files = {
        "version.py": "__version__ = '2.13.0'\ncuda = None\n",
        "include/torch/csrc/stable/library.h": "",
        f"lib/libtorch{suffix}": "",
        f"lib/libtorch_cpu{suffix}": "",
    }
    for name, text in files.items():
        path = folder / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"-DDIFFULEX_TORCH_DIR={folder / 'torch'}"


def test_linux_uses_the_options_of_its_linker(tmp_path: Path) -> None:
    """Else the next test could not fail."""
    lines = link_lines(tmp_path, make_torch(tmp_path, ".so"))
    assert [option for option in GNU[:4] if option not in lines] == []


def test_macos_gets_no_option_of_another_linker(tmp_path: Path) -> None:
    """Configured with the compiler of this host, so that only what the files of CMake say is checked."""
    lines = link_lines(
        tmp_path,
        make_torch(tmp_path, ".dylib"),
        "-DCMAKE_SYSTEM_NAME=Darwin",
        "-DCMAKE_SYSTEM_PROCESSOR=arm64",
        "-DCMAKE_CXX_COMPILER_WORKS=ON",
        "-DCMAKE_HAVE_LIBC_PTHREAD=ON",
        "-DCMAKE_INSTALL_NAME_TOOL=install_name_tool",
    )
    assert [option for option in GNU if option in lines] == []
    assert "-exported_symbol,_PyInit__core" in lines
    assert lines.count("lib/libtorch_cpu.dylib") == 1
    assert "@loader_path/../torch/lib" in lines


#: Stands for Python, pip and the programs of an environment: notes what it is asked for, makes what is expected.
STUB = r"""#!/usr/bin/env bash
set -eu
here="$(dirname "$0")"
case "$*" in
  *version_info*sys.exit*|*sys.exit*version_info*) ;;
  *cp%d%d*) echo cp311 ;;
  *find_spec*) echo /opt/torch ;;
  *torch.__file__*) exit 1 ;;
  "-m venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/auditwheel"
    ;;
  "-m pip wheel "*)
    env | grep -E '^(CMAKE_ARGS|CUDACXX|TORCH_CUDA_ARCH_LIST|DIFFULEX_)' | sort >>"$STUB_LOG"
    while [ "$1" != -w ]; do shift; done
    mkdir -p "$2"
    touch "$2/diffulex-$(cat VERSION)${DIFFULEX_LOCAL_VERSION:++$DIFFULEX_LOCAL_VERSION}-cp311-cp311-linux_x86_64.whl"
    ;;
  "repair -w "*)
    name="$(basename "${@: -1}")"
    touch "$3/${name/linux_x86_64/manylinux_2_28_x86_64}"
    ;;
  *) echo "run: $*" >>"$STUB_LOG" ;;
esac
"""
NVCC = '#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.88"\n'


def run_script(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """scripts/wheel.sh in a tree without sources, where nothing is compiled."""
    shutil.copytree(ROOT / "scripts", folder / "scripts", dirs_exist_ok=True)
    shutil.copy(ROOT / "VERSION", folder)
    for name, text in (("python", STUB), ("nvcc", NVCC)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    kept = ("CUDACXX", "CMAKE_ARGS", "TORCH_CUDA_ARCH_LIST")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in kept and not name.startswith("DIFFULEX_")
    }
    environment |= {"OUT": str(folder / "dist"), "STUB_LOG": str(folder / "log"), **variables}
    return subprocess.run(
        ["bash", "scripts/wheel.sh", *arguments], cwd=folder, env=environment,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_a_wheel_with_cuda_has_all_its_kernels_and_says_so(tmp_path: Path) -> None:
    """Everything of `scripts/wheel.sh --cuda` but the compiler."""
    python, nvcc = str(tmp_path / "python"), str(tmp_path / "nvcc")
    result = run_script(tmp_path, "--cuda", python, CUDACXX=nvcc, DIFFULEX_DEVICE="cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    version = f"{(ROOT / 'VERSION').read_text().strip()}+cu130"
    name = f"diffulex-{version}-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [name]
    log = (tmp_path / "log").read_text().splitlines()
    # No profile is named: that of setup.py is the full one.
    assert [line for line in log if not line.startswith("run: ")] == [
        "CMAKE_ARGS=-DDIFFULEX_WITH_CUDA=ON ",
        f"CUDACXX={nvcc}",
        "DIFFULEX_LOCAL_VERSION=cu130",
        "DIFFULEX_TORCH_DIR=/opt/torch",
        "TORCH_CUDA_ARCH_LIST=8.0+PTX;9.0",
    ]
    assert '"DIFFULEX_CUDA_PROFILE": "full"' in (ROOT / "setup.py").read_text()
    assert f"run: scripts/wheel_check.py {tmp_path / 'dist' / name} {version}" in log
    assert "CUDA for 8.0+PTX;9.0; an hour or more: set MAX_JOBS" in result.stdout


def test_a_wheel_for_the_cpu_has_no_cuda(tmp_path: Path) -> None:
    result = run_script(tmp_path, str(tmp_path / "python"))
    assert result.returncode == 0, result.stdout + result.stderr
    log = (tmp_path / "log").read_text().splitlines()
    found = [line for line in log if not line.startswith("run: ")]
    assert found == ["DIFFULEX_DEVICE=cpu", "DIFFULEX_TORCH_DIR=/opt/torch"]


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "message"),
    [
        ([], {}, 2, "usage: bash scripts/wheel.sh [--sdist] [--cuda] PYTHON..."),
        (["--cuda"], {}, 2, "usage: "),
        (["--fast", "python"], {}, 2, "usage: "),
        (["nothing"], {}, 1, "PYTHON: expected Python 3.10 or newer, got nothing"),
        (
            ["--cuda", "PYTHON"],
            {"CUDACXX": "/nothing"},
            1,
            "expected a working nvcc (CUDACXX, PATH",
        ),
        (["PYTHON"], {"SKIP_BUILD": "1"}, 1, "-cp311, got none"),
    ],
)
def test_errors_of_the_script_are_one_line(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], code: int, message: str
) -> None:
    words = [word.replace("PYTHON", str(tmp_path / "python")) for word in arguments]
    result = run_script(tmp_path, *words, **variables)
    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
