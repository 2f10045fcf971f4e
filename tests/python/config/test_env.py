# SPDX-License-Identifier: Apache-2.0
"""The table of environment variables against what the tree reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffulex.env import (
    ENV_VARIABLES,
    get_choice,
    get_flag,
    get_text,
    get_unchecked,
    set_meanwhile,
)
from diffulex.errors import ConfigError

ROOT = Path(__file__).parents[3]
ENV = ROOT / "python/diffulex/env.py"
# Below the Python package, so it cannot read through it.
BELOW = ROOT / "python/diffulex_ext/__init__.py"
NATIVE = re.compile(r"\b(?:getenv|read_switch)\(\s*([^)]*?)\s*\)")
SWITCHES = [name for name, variable in ENV_VARIABLES.items() if variable.choices]


def python_files() -> Iterator[Path]:
    for package in ("diffulex", "diffulex_ext"):
        yield from (ROOT / "python" / package).rglob("*.py")


def native_names() -> set[str]:
    """What C++ and CUDA sources ask the environment for."""
    names = set()
    for folder in ("csrc", "include"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix not in (".h", ".cuh", ".cpp", ".cu"):
                continue
            for argument in NATIVE.findall(path.read_text()):
                if argument not in ("name", "const char* name"):  # the reader of switches
                    assert argument.startswith('"'), f"{path}: a name that cannot be checked"
                    names.add(argument.strip('"'))
    return names


def test_python_reads_through_the_table() -> None:
    for path in python_files():
        for line in path.read_text().splitlines():
            if "os.environ" not in line and "getenv" not in line:
                continue
            is_write = re.search(r"os\.environ\[[^]]+\] = ", line)
            is_copy = "= {**os.environ, " in line  # for a child, whose variables these are
            assert path in (ENV, BELOW) or is_write or is_copy, f"{path}: {line.strip()}"


def test_every_variable_that_is_read_is_in_the_table() -> None:
    below = set(re.findall(r'os\.environ\.get\("(\w+)"', BELOW.read_text()))
    assert below == {"DIFFULEX_NO_TORCH"}
    native = native_names()
    assert {"DIFFULEX_CHECK", "DIFFULEX_FORCE_SM80"} <= native
    assert below | native <= set(ENV_VARIABLES)


def test_every_variable_of_the_table_is_read() -> None:
    calls = re.compile(r'get_(?:text|choice|flag|unchecked)\(\s*"(\w+)"')
    read = native_names() | {"DIFFULEX_NO_TORCH"}
    for path in python_files():
        if path != ENV:
            read |= set(calls.findall(path.read_text()))
    assert read == set(ENV_VARIABLES)


def test_every_variable_says_what_it_does() -> None:
    for name, variable in ENV_VARIABLES.items():
        assert variable.name == name
        assert variable.help.endswith(".")
        assert not variable.choices or variable.default in variable.choices


@pytest.mark.parametrize("name", SWITCHES)
def test_bad_values_are_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ConfigError, match=rf"{name}: expected one of .*, got 'maybe'"):
        get_text(name)
    assert get_unchecked(name) == "maybe"
    for empty in ("", None):
        if empty is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, empty)
        assert get_text(name) == ENV_VARIABLES[name].default
    for value in ENV_VARIABLES[name].choices:
        monkeypatch.setenv(name, value.upper())
        assert get_choice(name) == value


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFULEX_CHECK", "1")
    assert get_flag("DIFFULEX_CHECK")
    monkeypatch.setenv("DIFFULEX_CHECK", "")
    assert not get_flag("DIFFULEX_CHECK")
    with pytest.raises(KeyError):
        get_text("DIFFULEX_NO_SUCH_NAME")


@pytest.mark.slow
def test_bad_values_do_not_reach_the_kernels() -> None:
    """The library reads all its switches at the first op of a process."""
    name = "DIFFULEX_FORCE_SM80"
    code = (
        "import torch\n"
        "from diffulex import ops\n"
        "ops.rms_norm(torch.ones(1, 8), torch.ones(8), eps=1e-6)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, name: "maybe"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"environment: {name}: expected 0 or 1, got maybe" in done.stderr


def test_variables_that_are_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFULEX_ONE", "mine")
    with set_meanwhile({"DIFFULEX_ONE": "1", "DIFFULEX_TWO": "2"}):
        assert (os.environ["DIFFULEX_ONE"], os.environ["DIFFULEX_TWO"]) == ("1", "2")
    assert (os.environ["DIFFULEX_ONE"], os.environ.get("DIFFULEX_TWO")) == ("mine", None)
