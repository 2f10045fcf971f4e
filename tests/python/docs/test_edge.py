# SPDX-License-Identifier: Apache-2.0
"""docs/edge.md names what can be exported: families, strategies, backends with their recipes, presets."""

from __future__ import annotations

import re
from pathlib import Path

from diffulex_edge.backends import BACKENDS
from diffulex_edge.families import EDGE_FAMILIES, EDGE_STRATEGIES
from diffulex_edge.presets import PRESETS
from diffulex_edge.recipes import RECIPES

TEXT = re.sub(
    r"^```.*?^```$",
    "",
    (Path(__file__).resolve().parents[3] / "docs/edge.md").read_text(encoding="utf-8"),
    flags=re.DOTALL | re.MULTILINE,
)


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def row(title: str, first: str) -> set[str]:
    """Names in code of the first row of a section's table that begins with this cell."""
    (line,) = re.findall(rf"^\| {re.escape(first)} .*$", section(title), re.MULTILINE)
    return set(re.findall(r"`([^`]+)`", line))


def test_families_are_those_that_the_export_takes():
    assert row("Models", "Families") == set(EDGE_FAMILIES)


def test_strategies_are_those_that_programs_serve():
    assert row("Models", "Strategies") == set(EDGE_STRATEGIES)


def test_every_backend_has_a_row_that_names_its_recipes():
    table = section("Backends")
    for name, backend in BACKENDS.items():
        (line,) = re.findall(rf"^\| `{name}`.*$", table, re.MULTILINE)
        recipes = set(re.findall(r"`([^`]+)`", line.rpartition(" | ")[2]))
        if "all but" in line:
            recipes = set(RECIPES) - recipes
        assert recipes == set(backend.recipes), name


def test_every_preset_of_a_published_model_is_named():
    named = set(re.findall(r"`([^`]+)`", section("Measuring and comparing")))
    published = {name for name in PRESETS if not name.startswith("edge_doc-")}
    assert published <= named


def test_every_recipe_is_explained():
    named = " ".join(re.findall(r"`([^`]+)`", section("Quantisation") + section("Backends")))
    assert [name for name in RECIPES if name not in named] == []
