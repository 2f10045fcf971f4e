# SPDX-License-Identifier: Apache-2.0
"""docs/models.md and docs/adding_a_model.md say what is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from diffulex.checkpoint.auto_model import spec_reader
from diffulex.families.listing import FAMILIES
from diffulex.registry import AutoModelForDiffusionLM, AutoSampler
from fixtures.checkpoints import write_tokenizer
from fixtures.families import DENSE_FAMILIES, SHIFTED, family_config

DOCS = Path(__file__).resolve().parents[3] / "docs"
MODELS = (DOCS / "models.md").read_text(encoding="utf-8")
ADDING = (DOCS / "adding_a_model.md").read_text(encoding="utf-8")
CODE = "".join(re.findall(r"```python\n(.*?)```", ADDING, re.DOTALL))

GENERATE = """
from diffulex import Diffulex, SamplingParams
write_tokenizer(directory, "fast")
with Diffulex(str(directory), device="cpu", num_pages=32) as engine:
    (output,) = engine.generate([5, 6, 7], SamplingParams(max_tokens=12), summary=False)
    assert engine.config.decoding.block_size == 8
    print(len(output.token_ids))
"""


def table(text: str, first: str) -> list[list[str]]:
    """Cells of the rows of the table whose header starts with `first`."""
    lines = text[text.index(f"| {first} |") :].split("\n\n", maxsplit=1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


FAMILY_ROWS = {row[0].strip("`"): row for row in table(MODELS, "Family")}


def test_every_family_is_listed():
    assert set(FAMILY_ROWS) == {family.name for family in FAMILIES}
    registry = AutoModelForDiffusionLM
    for name in FAMILY_ROWS:
        assert name in registry.available()


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_facts_of_a_family(tmp_path, family):
    """The row against what the reader makes of a configuration that says as little as it may."""
    row = FAMILY_ROWS[family]
    absent = ("mask_token_id", "block_size", "bd_size")
    config = family_config(family, vocab_size=152064, **dict.fromkeys(absent, ...))
    if family == "llada":
        config["embedding_size"] = 152064
    assert config["architectures"] == [row[2].strip("`")]
    spec = spec_reader(family)(config, tmp_path)
    assert row[5] == ("i + 1" if spec.shift else "i")
    assert spec.shift == (family in SHIFTED)
    assert int(row[6]) == spec.block_size
    assert int(row[7]) == spec.mask_token_id
    defaults = AutoSampler.get(family).family_defaults
    assert row[8].split("`")[1] == defaults.get("decoding_strategy", "multi_bd")


def test_numbers_follow_from_the_shapes():
    """Weights, reads, cache and bound of the dense rows, recomputed from the published shapes."""
    shapes = {  # V, H, L, KV heads, head size, is tied
        "Dream, DiffuCoder, Fast_dLLM_v2 7B": (152064, 3584, 28, 4, 128, False),
        "Fast_dLLM_v2 1.5B (tied)": (151936, 1536, 28, 2, 128, True),
        "SDAR-1.7B": (151936, 2048, 28, 8, 128, False),
        "SDAR-4B": (151936, 2560, 36, 8, 128, False),
        "SDAR-8B, DreamReasoner-8B": (151936, 4096, 36, 8, 128, False),
        "Stable-DiffCoder-8B": (155136, 4096, 32, 8, 128, False),
        "LLaDA-8B": (126464, 4096, 32, 32, 128, False),
    }
    rows = {row[0]: row for row in table(MODELS, "Model")}
    for name, (vocab, hidden, layers, heads, head_dim, is_tied) in shapes.items():
        _, parameters, weights, read, cache, _, bound = rows[name]
        count = int(parameters.replace(",", ""))
        cache_bytes = int(cache.replace(",", ""))
        read_bytes = 2 * (count - (0 if is_tied else vocab * hidden))
        assert cache_bytes == 2 * layers * heads * head_dim * 2, name
        assert float(weights) == pytest.approx(2 * count / 1e9, abs=0.006), name
        assert float(read) == pytest.approx(read_bytes / 1e9, abs=0.006), name
        milliseconds = (read_bytes + 1024 * cache_bytes) / 4.8e9
        assert float(bound) == pytest.approx(milliseconds, abs=0.006), name


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    """The blocks of the guide in order, then the engine over the checkpoint they wrote."""
    fixtures = Path(__file__).resolve().parents[1]
    script = (
        f"import sys\nsys.path.insert(0, {str(fixtures)!r})\n"
        f"from fixtures.checkpoints import {write_tokenizer.__name__}\n{CODE}{GENERATE}"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "12"


def test_the_example_is_not_built_in():
    assert "pebble" not in AutoModelForDiffusionLM.available()
    assert "pebble" not in AutoSampler.available()
