# SPDX-License-Identifier: Apache-2.0
"""Arrows between the packages of `diffulex` point down: no import goes up, for typing or not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_SPEC = importlib.util.spec_from_file_location("measure", ROOT / "tests/house/measure.py")
measure = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = measure  # dataclasses look their module up
_SPEC.loader.exec_module(measure)

#: Imports that still go up, as pairs of rooms; one that is gone has to leave the table.
EXCEPTIONS: set[tuple[str, str]] = set()
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "python/diffulex").rglob("*.py")
}


@pytest.fixture(scope="module")
def ties() -> dict[tuple[str, str], str]:
    return measure.arrows(SOURCES, measure.ORDER)


def test_no_import_goes_up(ties: dict[tuple[str, str], str]) -> None:
    assert len(ties) > 50
    up = {tie: place for tie, place in ties.items() if measure.upward({tie: place}, measure.ORDER)}
    assert up.keys() - EXCEPTIONS == set(), up
    assert EXCEPTIONS - up.keys() == set(), "these are gone: take them out of EXCEPTIONS"


def test_only_the_exceptions_make_circles(ties: dict[tuple[str, str], str]) -> None:
    assert measure.circles(ties.keys() - EXCEPTIONS) == []


def test_every_room_of_the_order_is_there() -> None:
    rooms = {room.replace(".", "/") for room in measure.ORDER} - {"diffulex"}
    folder = ROOT / "python/diffulex"
    assert {room for room in rooms if not list(folder.glob(room + "*"))} == set()


def test_families_and_checkpoints_load_no_layers() -> None:
    code = """
import importlib, pathlib, sys, diffulex
for package in ("families", "checkpoint"):
    folder = pathlib.Path(diffulex.__file__).parent / package
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        importlib.import_module(".".join(("diffulex", *parts)).removesuffix(".__init__"))
from diffulex.checkpoint.auto_model import spec_reader
from diffulex.families.listing import FAMILIES
for family in FAMILIES:
    assert spec_reader(family.name) is family.read_spec
loaded = [name for name in sys.modules if name.startswith(("diffulex.nn", "diffulex.ops", "diffulex_ext"))]
assert loaded == [], loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
