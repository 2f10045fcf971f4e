# SPDX-License-Identifier: Apache-2.0
"""The memory table of docs/quantization.md follows from the published shapes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex.checkpoint.loader import weight_table_of
from diffulex.checkpoint.memory import model_bytes
from diffulex.families.listing import kept_modules
from diffulex.quantization.layers import ModelQuantizer
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan
from diffulex.registry import AutoModelForDiffusionLM
from fixtures.quick import quick

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks" / "python"))

from published_shapes import SHAPES  # noqa: E402

BF16 = torch.bfloat16


def read_table() -> dict[str, list[str]]:
    text = (ROOT / "docs/quantization.md").read_text(encoding="utf-8")
    lines = text[text.index("| model | bfloat16 |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0][2:] == list(SCHEMES)
    return {row[0]: row[1:] for row in rows[2:]}


TABLE = read_table()


# Whole models of thousands of matrices of experts take seconds.
@pytest.mark.parametrize(
    "name", quick(TABLE, [name for name in TABLE if SHAPES[name].facts().spec.moe is None])
)
def test_memory_of_published_models(name: str) -> None:
    shape = SHAPES[name]
    spec = shape.facts().spec
    model: Any = AutoModelForDiffusionLM.get(shape.family)(spec, BF16, "meta")
    table = weight_table_of(model, {})
    whole = model_bytes(spec, BF16)
    plans = [
        QuantizationPlan(scheme, ignore=kept_modules(shape.family, scheme)) for scheme in SCHEMES
    ]
    saved = [ModelQuantizer(plan).saved_bytes(model, table, BF16, "cpu") for plan in plans]
    assert TABLE[name] == [f"{(whole - size) / 1e9:.2f}" for size in (0, *saved)]
