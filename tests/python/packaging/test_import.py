# SPDX-License-Identifier: Apache-2.0
"""Importing the compiled package: with torch, without it, and how fast."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import diffulex_ext


def run_python(code: str, directory: Path, *options: str, **environment: str) -> str:
    """Output of a fresh interpreter that runs `code`; fails with its error text."""
    result = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_without_torch_the_import_is_fast_and_torch_free(tmp_path: Path) -> None:
    code = """
import sys, time
start = time.process_time()
import diffulex_ext
seconds = time.process_time() - start
assert not diffulex_ext.has_ops
assert "torch" not in sys.modules
print(seconds)
"""
    # Of the processor, the best of three, and a tenth of what torch takes: the host is shared.
    seconds = [float(run_python(code, tmp_path, DIFFULEX_NO_TORCH="1")) for _ in range(3)]
    assert min(seconds) < 0.25


def test_import_works_where_torch_is_not_installed(tmp_path: Path) -> None:
    # -S leaves site-packages out; the link makes this one package visible again.
    (tmp_path / "diffulex_ext").symlink_to(Path(diffulex_ext.__file__).parent)
    code = """
import importlib.util
assert importlib.util.find_spec("torch") is None
import diffulex_ext
print(diffulex_ext.has_ops, diffulex_ext.build_info()["version"])
"""
    output = run_python(code, tmp_path, "-S", PYTHONPATH=str(tmp_path))
    assert output == f"False {diffulex_ext.__version__}"


@pytest.mark.slow
def test_both_import_orders_work(tmp_path: Path) -> None:
    for first, second in (("torch", "diffulex_ext"), ("diffulex_ext", "torch")):
        code = f"import {first}, {second}, diffulex_ext; print(diffulex_ext.has_ops)"
        assert run_python(code, tmp_path) == "True"


def test_importing_diffulex_leaves_heavy_packages_alone(tmp_path: Path) -> None:
    code = """
import sys
import diffulex
print([name for name in ("transformers", "fastapi", "diffulex.server") if name in sys.modules])
"""
    assert run_python(code, tmp_path) == "[]"


def test_the_engine_has_the_names_that_others_give_it() -> None:
    from diffulex import LLM, Diffulex, DiffulexEngine

    assert LLM is Diffulex is DiffulexEngine


def test_a_torch_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def load_library(path: Path) -> None:
        raise OSError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    found = re.escape(torch.__version__)
    expected = rf"expected a torch >= 2\.11 that can load it, got torch {found}: undefined"
    with pytest.raises(ImportError, match=expected):
        diffulex_ext._load_ops()
