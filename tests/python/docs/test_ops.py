# SPDX-License-Identifier: Apache-2.0
"""docs/ops.md names every op, and says truly which of them the engine calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from diffulex import ops

ROOT = Path(__file__).resolve().parents[3]
#: name -> who calls it, as documented.
ROWS = re.findall(
    r"^\| `(\w+)` \| ([\w ]+) \| \S", (ROOT / "docs/ops.md").read_text("utf-8"), re.MULTILINE
)
CALLERS = dict(ROWS)
#: Ops that exchange between devices are methods of a `PeerGroup`; a wrapper that writes memory of its
#: caller may say so.
CALL = r"\b(?:ops\.(?:diffulex\.)?|_peers\.)(\w+?)(?:_into)?\("
# Neither the wrappers, nor what checks or measures an installation, make an op one that is in use.
OUTSIDE = ("ops/", "bench/", "self_test.py")


def registered() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1].split(".")[0] for name in names if name.startswith("diffulex::")}


def called() -> set[str]:
    package = ROOT / "python/diffulex"
    names: set[str] = set()
    for path in package.rglob("*.py"):
        if not path.relative_to(package).as_posix().startswith(OUTSIDE):
            names |= set(re.findall(CALL, path.read_text("utf-8")))
    return names


def test_every_op_is_documented_once() -> None:
    assert len(ROWS) == len(CALLERS)
    assert set(CALLERS) == registered()
    assert set(CALLERS.values()) == {"engine", "embedders", "several GPUs"}


def test_the_engine_calls_what_it_is_said_to_call() -> None:
    documented = {name for name, who in CALLERS.items() if who == "engine"}
    assert documented == called() & registered()


@pytest.mark.parametrize("name", CALLERS)
def test_every_op_has_its_three_forms(name: str) -> None:
    headers = (ROOT / "include/diffulex").rglob("*.h")
    assert any(re.search(rf"\bStatus {name}\(", header.read_text("utf-8")) for header in headers)
    has_wrapper = hasattr(ops, name) or hasattr(ops.PeerGroup, name)
    assert has_wrapper == (name != "advance_decode")
