# SPDX-License-Identifier: Apache-2.0
"""docs/glossary.md has the words of the guides, in order, and names keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diffulex import SamplingParams
from diffulex.config.table import CONFIG_TABLE

DOCS = Path(__file__).resolve().parents[3] / "docs"
TEXT = (DOCS / "glossary.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^## ([^\n]+)\n\n(.*?)(?=\n## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
#: Guide -> words of it that a newcomer looks up.
WORDS = {
    "distributed": ("replica", "rank", "expert"),
    "edge": ("bundle",),
    "evaluation": ("likelihood", "TPF", "NFE", "preset"),
    "infilling": ("infilling", "mask"),
    "quantization": ("low precision",),
    "ray": ("Ray", "replica", "rank"),
    "reproduction": ("preset", "buffer", "block"),
    "rl": ("adapter", "pause", "canvas"),
    "trajectories": ("trajectory", "forward"),
    "tuning": ("TPF", "prefill", "preemption", "CUDA graph"),
    "verify": ("fixture", "mask"),
}


def test_entries_are_in_order() -> None:
    assert len(ENTRIES) > 30
    assert list(ENTRIES) == sorted(ENTRIES, key=str.lower)


@pytest.mark.parametrize("page", WORDS)
def test_words_of_a_guide_are_explained(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8").lower()
    titles = {word.strip().lower() for title in ENTRIES for word in title.split(",")}
    for word in WORDS[page]:
        stem = word.lower().removesuffix("y")
        assert stem in text, f"{page}.md does not say {word}"
        assert word.lower() in titles, word


def test_keys_exist() -> None:
    known = {*CONFIG_TABLE, *SamplingParams.__dataclass_fields__}
    keys = [
        key
        for line in re.findall(r"^Also: .*$", TEXT, re.M)
        for key in re.findall(r"`(\w+)`", line)
    ]
    assert len(keys) > 12
    assert set(keys) <= known, set(keys) - known
