# SPDX-License-Identifier: Apache-2.0
"""The program with which `diffulex doctor` tries ExecuTorch's runtime."""

from __future__ import annotations

import pytest

from diffulex.errors import ConfigError
from diffulex.tools import doctor
from diffulex_edge import runtime_check
from diffulex_edge.errors import ProgramError
from diffulex_edge.runtime_check import CHECK_PROGRAM, check_runtime, write_check_program
from fixtures.extras import need_extra

need_extra("edge", "executorch", "torchao")


def test_the_packaged_program_runs_and_the_backends_are_named():
    assert "XnnpackBackend" in check_runtime()
    assert CHECK_PROGRAM.stat().st_size < 4096


def test_it_can_be_made_anew(tmp_path):
    path = tmp_path / "new.pte"
    write_check_program(path)
    assert check_runtime(path) == check_runtime()


def test_a_damaged_program_is_a_finding(tmp_path):
    path = tmp_path / "cut.pte"
    path.write_bytes(CHECK_PROGRAM.read_bytes()[:200])
    with pytest.raises(ProgramError, match="program: cannot run"):
        check_runtime(path)


def test_other_numbers_are_a_finding(monkeypatch):
    monkeypatch.setattr(runtime_check, "_EXPECTED", (0.0,) * 4)
    with pytest.raises(ProgramError, match=r"expected \[0.0, .*got \[1.0, 3.0, 5.0, 7.0\]"):
        check_runtime()


def test_without_the_package_it_says_so(monkeypatch):
    monkeypatch.setattr(runtime_check, "_RUNTIME", "executorch_that_is_not_there")
    with pytest.raises(ConfigError, match=r"pip install '\.\[edge"):
        check_runtime()


@pytest.mark.parametrize("is_installed", [True, False])
def test_doctor_tries_it_where_it_is_installed(monkeypatch, is_installed):
    for name in ("_build_facts", "_models", "_self_tests"):
        monkeypatch.setattr(doctor, name, dict)
    monkeypatch.setattr(doctor, "_device_facts", lambda: {"cuda devices": {}})
    if not is_installed:
        monkeypatch.setattr(doctor, "_version", lambda _: "not installed")
    report = doctor.examine()
    found = [check for check in report.checks if check.name == "edge program"]
    assert [check.is_ok for check in found] == [True] * is_installed
    assert report.is_healthy
