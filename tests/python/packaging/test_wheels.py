# SPDX-License-Identifier: Apache-2.0
"""Wheels of other platforms: what can be told about them without these platforms."""

from __future__ import annotations

import importlib.util
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
