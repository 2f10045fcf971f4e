# SPDX-License-Identifier: Apache-2.0
"""Arrows between the packages of `diffulex` point down: no import goes up, for typing or not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_SPEC = importlib.util.spec_from_file_location("measure", ROOT / "tests/house/measure.py")
measure = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = measure  # dataclasses look their module up
_SPEC.loader.exec_module(measure)

#: Imports that still go up, as pairs of rooms; one that is gone has to leave the table.
EXCEPTIONS: set[tuple[str, str]] = {("families", "nn"), ("families", "ops")}
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "python/diffulex").rglob("*.py")
}


def test_no_import_goes_up() -> None:
    ties = measure.arrows(SOURCES, measure.ORDER)
    assert len(ties) > 50
    up = {tie: place for tie, place in ties.items() if measure.upward({tie: place}, measure.ORDER)}
    assert up.keys() - EXCEPTIONS == set(), up
    assert EXCEPTIONS - up.keys() == set(), "these are gone: take them out of EXCEPTIONS"


def test_only_the_exceptions_make_circles() -> None:
    ties = measure.arrows(SOURCES, measure.ORDER).keys() - EXCEPTIONS
    assert measure.circles(ties) == []


def test_every_room_of_the_order_is_there() -> None:
    rooms = {room.replace(".", "/") for room in measure.ORDER} - {"diffulex"}
    folder = ROOT / "python/diffulex"
    assert {room for room in rooms if not list(folder.glob(room + "*"))} == set()
