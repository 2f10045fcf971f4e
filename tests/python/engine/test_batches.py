# SPDX-License-Identifier: Apache-2.0
"""Every family on a tiny checkpoint: an answer depends neither on its batch nor on what was cached."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffulex import Diffulex, SamplingParams
from fixtures.families import DENSE_FAMILIES, family_builder
from fixtures.moe_families import MOE_FAMILIES, moe_builder

pytestmark = pytest.mark.slow

#: Canvases have a test of their own (test_canvas.py).
FAMILIES = (*DENSE_FAMILIES, *MOE_FAMILIES)
COUNT = 16
PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, seed=3)


def prompts() -> list[list[int]]:
    """Of mixed lengths; every second one has a beginning that is longer than any block."""
    rng = random.Random(17)
    texts = [[rng.randrange(5, 200) for _ in range(rng.randrange(1, 20))] for _ in range(COUNT)]
    common = [rng.randrange(5, 200) for _ in range(34)]
    return [common + text if index % 2 else text for index, text in enumerate(texts)]


PROMPTS = prompts()


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make = moe_builder if request.param in MOE_FAMILIES else family_builder
    make(request.param).write(folder)
    return folder


def engine(folder: Path, **settings: Any) -> Diffulex:
    # Its files are those of dream.
    name = {"model_name": "diffucoder"} if folder.name.startswith("diffucoder") else {}
    return Diffulex(
        str(folder), device="cpu", dtype="float32", max_model_len=96, page_size=8, num_pages=256,
        max_num_reqs=COUNT, **name, **settings,
    )  # fmt: skip


def answers(model: Diffulex, asked: list[list[int]], size: int) -> list[tuple[int, ...]]:
    """Decoded so many at a time."""
    found: list[tuple[int, ...]] = []
    for first in range(0, len(asked), size):
        part = asked[first : first + size]
        found += [out.token_ids for out in model.generate(part, PARAMS, summary=False)]
    return found


@pytest.fixture(scope="module")
def alone(directory: Path) -> Iterator[list[tuple[int, ...]]]:
    """Every prompt by itself, with nothing cached."""
    with engine(directory, enable_prefix_caching=False) as model:
        yield answers(model, PROMPTS, 1)


@pytest.mark.parametrize("size", [4, COUNT])
def test_an_answer_is_the_same_in_every_batch(
    directory: Path, alone: list[tuple[int, ...]], size: int
) -> None:
    assert len({len(tokens) for tokens in alone}) == 1
    with engine(directory, enable_prefix_caching=False) as model:
        assert answers(model, PROMPTS, size) == alone


def test_a_cached_prefix_changes_nothing(directory: Path, alone: list[tuple[int, ...]]) -> None:
    with engine(directory) as model:
        assert answers(model, PROMPTS, 4) == alone
        assert answers(model, PROMPTS, COUNT) == alone
        if model.config.cache.enable_prefix_caching:
            assert model.stats().num_prefix_hit_tokens > 0


def test_a_second_turn_is_a_single_prefill(directory: Path, alone: list[tuple[int, ...]]) -> None:
    """After a first turn whose pages are kept, and in an engine that has seen nothing."""
    turns = [[*prompt, *answer, 7, 9] for prompt, answer in zip(PROMPTS, alone, strict=True)]
    with engine(directory) as model:
        answers(model, PROMPTS, COUNT)
        second = answers(model, turns, COUNT)
    with engine(directory, enable_prefix_caching=False) as fresh:
        assert second == answers(fresh, turns, COUNT)
