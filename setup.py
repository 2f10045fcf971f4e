# SPDX-License-Identifier: Apache-2.0
"""Drives CMake for pip; all metadata is in pyproject.toml, all compile knowledge in CMake.

Environment: CMAKE_ARGS, CMAKE_BUILD_TYPE, MAX_JOBS, TORCH_CUDA_ARCH_LIST, DIFFULEX_TORCH_DIR,
DIFFULEX_DEVICE=cpu (leaves CUDA out), CUDACXX, DIFFULEX_LOCAL_VERSION (what follows the + of the
package's version; the compiled parts keep the plain one).
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


def package_version() -> str:
    """The version of the file VERSION, with the local part of the environment."""
    version = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
    local = os.environ.get("DIFFULEX_LOCAL_VERSION", "")
    return f"{version}+{local}" if local else version


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


def pybind11_dir(build_dir: Path) -> str | None:
    """Directory of a copy of pybind11's CMake package, if the package is installed.

    A copy in the build tree: an isolated build has its own pybind11 under a random name, and sources
    that include headers of another path are compiled again.
    """
    try:
        package = importlib.import_module("pybind11")
    except ImportError:
        return None
    source = Path(package.__file__).parent
    if not (source / "share").is_dir():  # a distribution keeps it elsewhere, always in one place
        return str(package.get_cmake_dir())
    copy = build_dir / f"pybind11-{package.__version__}"
    if not copy.is_dir():
        for left in build_dir.glob("pybind11.partial*"):
            if not is_of_a_running_build(left):
                shutil.rmtree(left, ignore_errors=True)
        partial = build_dir / f"pybind11.partial.{os.getpid()}"
        try:
            for kind in ("include", "share"):
                shutil.copytree(source / kind, partial / kind)
            partial.rename(copy)
        except OSError:
            if not copy.is_dir():  # by another build beside this one
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return str(copy / "share" / "cmake" / "pybind11")


def is_of_a_running_build(partial: Path) -> bool:
    """Whether another process is writing the folder, whose name ends in its id."""
    pid = partial.suffix[1:]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


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
    # Not every system can bind a process to some of its cores.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(cores, int(memory_gib() / 4)))


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
        if directory := pybind11_dir(build_dir):
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
    version=package_version(),
    ext_modules=[Extension("diffulex_ext._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
