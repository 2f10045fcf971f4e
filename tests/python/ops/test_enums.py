# SPDX-License-Identifier: Apache-2.0
"""The enumerations of the ops have the names and the values of C++, where they are written first."""

from __future__ import annotations

import re
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest

import diffulex.ops
from diffulex.ops.comm import CollectiveAlgorithm
from diffulex.samplers.base import CONFIDENCE_KINDS, RULES
from diffulex_ext import _core

HEADERS = Path(__file__).parents[3] / "include/diffulex"
#: Those whose C++ name is another: its name, and what its enumerators begin with.
OTHER_NAMES = {
    "AcceptFlag": ("SamplerFlag", "Sampler"),
    "StatsColumn": ("TokenStatsColumn", "Stats"),
}
ENUMS = {
    name: kind
    for name, kind in [*vars(diffulex.ops).items(), ("CollectiveAlgorithm", CollectiveAlgorithm)]
    if isinstance(kind, type) and issubclass(kind, (IntEnum, IntFlag))
}


def enumerators(name: str) -> dict[str, int]:
    """Enumerators of a C++ enumeration: "MaxProb" -> 1, and so on."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(HEADERS.rglob("*.h")))
    (body,) = re.findall(rf"\benum (?:class )?{name} : \w+ \{{(.*?)\}};", text, re.DOTALL)
    body = re.sub(r"//[^\n]*", "", body)
    rows = re.findall(r"\bk(\w+) = (\d+)\s*(?:,|$)", body.strip())
    assert len(rows) == body.count("=") > 0
    return {label: int(value) for label, value in rows}


def plain(text: str) -> str:
    """A name without what tells its spelling in one language from that in the other."""
    return text.replace("_", "").lower()


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_enumeration_equals_that_of_cpp(name: str) -> None:
    cpp_name, prefix = OTHER_NAMES.get(name, (name, ""))
    wanted = {
        plain(label.removeprefix(prefix)): value
        for label, value in enumerators(cpp_name).items()
        if label.startswith(prefix)
    }
    assert {plain(member.name): member.value for member in ENUMS[name]} == wanted


def test_every_enumeration_of_the_ops_is_compared() -> None:
    folder = Path(diffulex.ops.__file__).parent
    written = {
        found
        for path in folder.glob("*.py")
        for found in re.findall(
            r"^class (\w+)\((?:enum\.)?Int(?:Enum|Flag)\)", path.read_text(), re.M
        )
    }
    assert written <= set(ENUMS)
    assert "FilterOrder" in ENUMS


def test_names_of_the_configuration_are_those_of_the_rules() -> None:
    assert {name: plain(name) for name in RULES} == {
        name: plain(label) for name, label in zip(RULES, enumerators("AcceptRule"), strict=True)
    }
    assert list(CONFIDENCE_KINDS.values()) == list(enumerators("ConfidenceKind").values())


def test_finish_reasons_and_states_are_those_of_cpp() -> None:
    for kind in (
        "RequestStatus",
        "BlockStatus",
        "BlockType",
        "FinishReason",
        "RowMode",
        "PlanKind",
    ):
        members = getattr(_core, kind).__members__
        assert {plain(n): int(m) for n, m in members.items()} == {
            plain(label): value for label, value in enumerators(kind).items()
        }
