# SPDX-License-Identifier: Apache-2.0
"""Ranges of the per-request parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diffulex import SamplingParams


@pytest.mark.parametrize(
    ("name", "legal", "illegal"),
    [
        ("temperature", [None, 0, 0.0, 1.0, 2], [-0.1, float("nan"), float("inf"), "1", True]),
        ("max_tokens", [1, 512], [0, -1, None, 1.0, True, 2**31]),
        ("max_nfe", [None, 1, 100], [0, -1, 1.5]),
        ("max_repetition_run", [None, 1, 2], [0, -2]),
        ("seed", [None, 0, 2**64 - 1], [-1, 2**64, 0.5]),
        ("stop_token_ids", [[], (1, 2)], [[-1], ["a"], [2**31]]),
        ("accept_threshold", [None, 0, 0.5, 1], [-0.1, 1.1, float("nan")]),
    ],
)
def test_range(name: str, legal: list[Any], illegal: list[Any]) -> None:
    for value in legal:
        SamplingParams(**{name: value})
    for value in illegal:
        with pytest.raises(ValueError, match=f"SamplingParams.{name}: expected .*, got"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [("top_p", 0.9, r"\(0, 1\]"), ("top_k", 5, ">= 1"), ("min_p", 0.0, r"\[0, 1\]")],
)
def test_filters_are_not_supported(name: str, value: float, legal: str) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams.{name}: only None .*{legal}.*{value}"):
        SamplingParams(**{name: value})


def test_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


def test_core_parameters() -> None:
    core = SamplingParams(
        max_tokens=7, max_nfe=9, max_repetition_run=3, ignore_eos=True, stop_token_ids=[4], seed=5
    ).to_core(0.5)
    assert core.temperature == 0.5
    assert (core.max_tokens, core.max_nfe, core.max_repetition_run) == (7, 9, 3)
    assert core.ignore_eos
    assert list(core.stop_token_ids) == [4]
    assert core.seed == 5
    assert core.accept_threshold is None
    core = SamplingParams(temperature=0.0, accept_threshold=0.5).to_core(1.0)
    assert core.temperature == 0.0
    assert core.accept_threshold == 0.5
    assert (core.max_nfe, core.max_repetition_run, core.seed) == (0, 0, None)
