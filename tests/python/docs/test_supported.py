# SPDX-License-Identifier: Apache-2.0
"""The table of families and strategies in README.md says what the engine does."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex import SamplingParams
from diffulex.errors import ConfigError
from diffulex.families.listing import FAMILIES
from diffulex.strategies.listing import STRATEGIES

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks" / "python"))

from published_shapes import SHAPES, Shape  # noqa: E402
from random_engine import build_engine, build_model, random_prompts, resolve_config  # noqa: E402


def read_table() -> dict[str, dict[str, str]]:
    """Family -> strategy -> entry, a row of several families taken apart."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text[text.index("| Family |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    strategies = [name.strip("`") for name in rows[0][1:]]
    return {
        family: dict(zip(strategies, row[1:], strict=True))
        for row in rows[2:]
        for family in re.findall(r"`(\w+)`", row[0])
    }


TABLE = read_table()


def tiny_shape(family: str) -> Shape:
    return next(shape.tiny() for shape in SHAPES.values() if shape.model_name == family)


def settings(strategy: str) -> dict[str, Any]:
    if strategy == "edit":
        return {"decoding_strategy": "multi_bd", "sampling_mode": "edit"}
    if strategy == "multi_bd":
        return {"decoding_strategy": "multi_bd", "sampling_mode": "naive"}
    return {"decoding_strategy": strategy}


def column(strategy: str, mode: str) -> str:
    return "edit" if (strategy, mode) == ("multi_bd", "edit") else strategy


def test_table_has_every_family_and_strategy() -> None:
    assert {family.name for family in FAMILIES} <= TABLE.keys()
    assert all(row.keys() == {*STRATEGIES, "edit"} for row in TABLE.values())


@pytest.mark.parametrize("family", TABLE)
def test_default(family: str) -> None:
    decoding = resolve_config(tiny_shape(family), device="cpu").decoding
    (default,) = [name for name, entry in TABLE[family].items() if entry == "default"]
    assert column(decoding.decoding_strategy, decoding.sampling_mode) == default


@pytest.mark.parametrize(
    ("family", "strategy"),
    [(family, name) for family, row in TABLE.items() for name, entry in row.items() if entry],
)
def test_supported(family: str, strategy: str) -> None:
    """Greedy and filtered requests with thresholds of their own run to their end."""
    shape = tiny_shape(family)
    model = build_model(shape, torch.float32, "cpu")
    filtered = SamplingParams(
        max_tokens=9,
        ignore_eos=True,
        temperature=1.0,
        top_k=5,
        top_p=0.9,
        min_p=0.01,
        seed=1,
        accept_threshold=0.5,
    )
    options = {"max_num_reqs": 2, "max_model_len": 320, **settings(strategy)}
    with build_engine(shape, model, "cpu", **options) as engine:
        decoding = engine.config.decoding
        assert column(decoding.decoding_strategy, decoding.sampling_mode) == strategy
        outputs = engine.generate(
            random_prompts(model.spec, 2, 20),
            [SamplingParams(max_tokens=9, ignore_eos=True), filtered],
            summary=False,
        )
    assert [len(output.token_ids) for output in outputs] == [9, 9]


@pytest.mark.parametrize(
    ("family", "strategy"),
    [(family, name) for family, row in TABLE.items() for name, entry in row.items() if not entry],
)
def test_not_supported(family: str, strategy: str) -> None:
    """What the table leaves out is refused."""
    with pytest.raises(ConfigError, match=r"^(decoding_strategy|sampling_mode): expected"):
        resolve_config(tiny_shape(family), device="cpu", **settings(strategy))
