# SPDX-License-Identifier: Apache-2.0
"""`build_info()` says what the compiled parts were made of."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import diffulex_ext

ROOT = Path(__file__).parents[3]
PACKAGE = Path(diffulex_ext.__file__).parent


def test_build_info_is_complete() -> None:
    info = diffulex_ext.build_info()
    assert info["version"] == diffulex_ext.__version__
    assert re.fullmatch(r"unknown|[0-9a-f]{40}|[0-9a-f]{64}", info["git_commit"])
    assert re.match(r"(GNU|Clang) \d+\.", info["compiler"])
    assert "-std=c++17" in info["cxx_flags"]
    assert "-O3" in info["cxx_flags"] or info["build_type"] != "Release"
    assert info["torch_target_version"] == "2.11"
    assert re.match(r"2\.\d+|[3-9]\.", info["torch_version"])
    for key in ("cuda_version", "cuda_archs", "cpu_isa_variants"):
        assert key in info
    assert "cutlass_version" not in info, "the kernels use no CUTLASS"


def test_cuda_entries_agree() -> None:
    info = diffulex_ext.build_info()
    assert bool(info["cuda_version"]) == bool(info["cuda_archs"])
    if info["cuda_version"]:
        assert info["cuda_profile"] in {"full", "minimal"}


def test_no_flag_of_the_build_host() -> None:
    flags = diffulex_ext.build_info()["cxx_flags"]
    assert "-march=native" not in flags
    assert "-ffast-math" not in flags


@pytest.mark.parametrize(
    "binary",
    [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in (".so", ".a")
    ],
)
def test_no_path_of_the_build_host(binary: str) -> None:
    """Neither in messages nor in line tables; CMake's own search paths of torch are not compiled in."""
    data = (PACKAGE / binary).read_bytes()
    found = re.findall(rb"/[\w./+-]*/(?:csrc|include/diffulex|build/cp\d+)\b[\w./-]*", data)
    absolute = sorted({path.decode() for path in found if not path.startswith(b"/../")})
    assert not absolute, absolute[:3]
    assert os.fsencode(ROOT) not in data


def test_op_library_is_loaded_once_under_this_torch() -> None:
    assert diffulex_ext.has_ops
    loaded = [path for path in torch.ops.loaded_libraries if "libdiffulex_ops" in path]
    assert len(loaded) == 1
