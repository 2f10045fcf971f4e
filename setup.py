# SPDX-License-Identifier: Apache-2.0
"""Drives CMake for pip; all metadata is in pyproject.toml, all compile knowledge in CMake.

Environment: CMAKE_ARGS, CMAKE_BUILD_TYPE, MAX_JOBS, TORCH_CUDA_ARCH_LIST, DIFFULEX_TORCH_DIR,
DIFFULEX_DEVICE=cpu (leaves CUDA out), CUDACXX.
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# Given on every configure, so that a kept build tree never remembers the CMAKE_ARGS of an earlier run.
DEFAULTS = {
    "DIFFULEX_WITH_CUDA": "AUTO",
    "DIFFULEX_CUDA_ARCHS": "",
    "DIFFULEX_CUDA_PROFILE": "full",
    "DIFFULEX_BUILD_TESTS": "OFF",
    "DIFFULEX_BUILD_BENCHMARKS": "OFF",
    "DIFFULEX_WERROR": "OFF",
}


def find_tool(name: str, directory_attribute: str) -> str:
    """Path of a build tool: the one of its Python package, else the one on PATH."""
    try:
        directory = getattr(importlib.import_module(name), directory_attribute, "")
    except ImportError:
        directory = ""
    found = shutil.which(name, path=str(directory)) if directory else None
    found = found or shutil.which(name)
    if not found:
        raise SystemExit(f"setup.py: expected {name} (pip install {name}), got none")
    return found


def run_tool(command: list[str]) -> None:
    """Runs a build tool; its own message is the error, a traceback of this file is not."""
    code = subprocess.call(command)
    if code:
        raise SystemExit(
            f"setup.py: {Path(command[0]).name} ended with code {code}, see above for why"
        )


def pybind11_dir() -> str | None:
    """Directory of pybind11's CMake package, if the package is installed."""
    try:
        return str(importlib.import_module("pybind11").get_cmake_dir())
    except ImportError:
        return None


def memory_gib() -> float:
    """Memory of this host, or of the container it is limited to."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total / 2**30


def num_jobs() -> int:
    """Parallel compiles: MAX_JOBS, else by cores and 4 GiB each (large CUDA files need that)."""
    if text := os.environ.get("MAX_JOBS"):
        if not text.isdigit() or int(text) < 1:
            raise SystemExit(f"MAX_JOBS: expected a positive integer, got {text!r}")
        return int(text)
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gib() / 4)))


def cached_source_dir(build_dir: Path) -> str | None:
    """Source directory a build tree was configured for, if it was configured."""
    cache = build_dir / "CMakeCache.txt"
    if not cache.is_file():
        return None
    key = "CMAKE_HOME_DIRECTORY:INTERNAL="
    lines = cache.read_text(errors="replace").splitlines()
    return next((line[len(key) :] for line in lines if line.startswith(key)), "")


class CMakeBuild(build_ext):
    """Configures, builds and installs the two CMake components a wheel contains."""

    def run(self) -> None:
        """Build both plugins and the C++ package into the package tree."""
        cmake = find_tool("cmake", "CMAKE_BIN_DIR")
        build_dir = ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}"
        self.configure(cmake, build_dir)
        run_tool([cmake, "--build", str(build_dir), "-j", str(num_jobs())])

        in_place = self.inplace or getattr(self, "editable_mode", False)
        prefix = ROOT / "python" if in_place else Path(self.build_lib).resolve()
        package = prefix / "diffulex_ext"
        for stale in ("include", "lib"):
            shutil.rmtree(package / stale, ignore_errors=True)
        for component, destination in (("python", prefix), ("dev", package)):
            install = [cmake, "--install", str(build_dir), "--component", component]
            # Wheels are stripped; a tree that is developed in keeps its line tables.
            strip = ["--strip"] if component == "python" and not in_place else []
            run_tool([*install, "--prefix", str(destination), *strip])

    def configure(self, cmake: str, build_dir: Path) -> None:
        """Run the configure step; later definitions win over earlier ones."""
        definitions = dict(DEFAULTS)
        definitions["Python_EXECUTABLE"] = sys.executable
        definitions["CMAKE_BUILD_TYPE"] = os.environ.get("CMAKE_BUILD_TYPE") or "Release"
        # Every time: an isolated build caches the path of a ninja that pip deletes afterwards.
        definitions["CMAKE_MAKE_PROGRAM"] = find_tool("ninja", "BIN_DIR")
        if directory := pybind11_dir():
            definitions["pybind11_DIR"] = directory
        device = os.environ.get("DIFFULEX_DEVICE")
        if device == "cpu":
            definitions["DIFFULEX_WITH_CUDA"] = "OFF"
        elif device:
            raise SystemExit(f"DIFFULEX_DEVICE: expected cpu or nothing, got {device!r}")
        command = [cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
        # A copied or moved tree brings a cache of another directory.
        if cached_source_dir(build_dir) not in (None, str(ROOT)):
            command.append("--fresh")
        command += [f"-D{key}={value}" for key, value in definitions.items()]
        command += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        run_tool(command)

    def get_outputs(self) -> list[str]:
        """Nothing for setuptools to track: CMake installs the files."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing for setuptools to copy."""
        return {}


# The extension has no sources here; it makes the wheel platform-specific.
setup(
    ext_modules=[Extension("diffulex_ext._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
