# SPDX-License-Identifier: Apache-2.0
"""What the task files name by ``!function``: their items and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffulex.bench.datasets import load_split
from diffulex.bench.scoring.boxed import score_boxed
from diffulex.bench.scoring.candidates import score_candidates
from diffulex.bench.scoring.code import score_code, score_code_definitions

Doc = dict[str, Any]
Score = dict[str, float]


def items(name: str, data_files: str | None = None, **_: Any) -> dict[str, Any]:
    """The split ``test`` of a bundled data set, as the package datasets has it."""
    from datasets import Dataset  # noqa: PLC0415 (optional)

    return {"test": Dataset.from_list(load_split(name, data_files))}


def _texts(results: Sequence[Any]) -> list[str]:
    """The answers to one item: several where a task repeats it."""
    flat: list[str] = []
    for result in results:
        flat += [result] if isinstance(result, str) else list(result)
    return flat


def _mean(scores: list[Score]) -> Score:
    return {key: sum(score[key] for score in scores) / len(scores) for key in scores[0]}


def boxed(doc: Doc, results: Sequence[Any]) -> Score:
    """Mathematics: the last box."""
    return _mean([score_boxed(doc, text) for text in _texts(results)])


def candidates(doc: Doc, results: Sequence[Any]) -> Score:
    """Numbers: the likeliest candidate, and the two likeliest."""
    return _mean([score_candidates(doc, text) for text in _texts(results)])


def code(doc: Doc, results: Sequence[Any]) -> Score:
    """Programs: their tests."""
    return _mean([score_code(doc, text) for text in _texts(results)])


def code_definitions(doc: Doc, results: Sequence[Any]) -> Score:
    """Programs, of which only the definitions are kept."""
    return _mean([score_code_definitions(doc, text) for text in _texts(results)])
