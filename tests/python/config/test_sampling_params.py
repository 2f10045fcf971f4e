# SPDX-License-Identifier: Apache-2.0
"""Ranges of the per-request parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diffulex import DiffulexError, SamplingParams, SamplingParamsError
from diffulex.config.table import SamplerConfig


@pytest.mark.parametrize(
    ("name", "legal", "illegal"),
    [
        ("temperature", [None, 0, 0.0, 1.0, 2], [-0.1, float("nan"), float("inf"), "1", True]),
        ("max_tokens", [1, 512], [0, -1, None, 1.0, True, 2**31]),
        ("max_nfe", [None, 1, 100], [0, -1, 1.5]),
        ("max_repetition_run", [None, 1, 2], [0, -2]),
        ("seed", [None, 0, 2**64 - 1, -1, -(2**63)], [-(2**63) - 1, 2**64, 0.5]),
        ("stop_token_ids", [[], (1, 2)], [[-1], ["a"], [2**31]]),
        ("accept_threshold", [None, 0, 0.5, 1], [-0.1, 1.1, float("nan")]),
        ("edit_threshold", [None, 0, 0.5, 1], [-0.1, 1.1, "0.5"]),
        ("add_block_threshold", [None, 0, 0.5, 1], [-0.1, 1.1, True]),
        ("semi_complete_threshold", [None, 0, 0.5, 1], [-0.1, 1.1]),
        ("token_stability_threshold", [None, 0, 0.5, 1], [-0.1, 1.1]),
        ("remask_threshold", [None, 0, 0.5, 1], [-0.1, 1.1]),
        ("max_post_edit_steps", [None, 0, 16, 2**31 - 1], [-1, 1.5, 2**31, True, "1"]),
        ("penalty_lambda", [None, 0, 2, 0.5], [-0.1, float("inf"), 1e39, "1", False]),
        ("top_p", [None, 0, 0.9, 1, 1.5], [-0.1, float("nan"), float("inf"), "1", False]),
        ("top_k", [None, -1, 0, 5], [1.0, True, 2**31, "5"]),
        ("min_p", [None, 0, 0.05, 1], [-0.1, 1.1]),
        ("ignore_eos", [True, False], [None, 1]),
    ],
)
def test_range(name: str, legal: list[Any], illegal: list[Any]) -> None:
    for value in legal:
        SamplingParams(**{name: value})
    for value in illegal:
        with pytest.raises(ValueError, match=f"SamplingParams.{name}: expected .*, got"):
            SamplingParams(**{name: value})


def test_illegal_value_names_range_and_value() -> None:
    with pytest.raises(ValueError, match=r"min_p: expected a number in \[0, 1\], got 1.5"):
        SamplingParams(min_p=1.5)
    with pytest.raises(ValueError, match=r"top_p: expected a finite number >= 0, got -1"):
        SamplingParams(top_p=-1)


def test_engine_defaults_fill_what_is_unset() -> None:
    defaults = SamplerConfig(temperature=0.7, top_p=0.9, top_k=None, min_p=0.1)
    params = SamplingParams(min_p=0.0, max_tokens=3).with_defaults(defaults)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, None, 0.0)
    core = params.to_core()
    assert (core.temperature, core.top_p, core.top_k) == pytest.approx((0.7, 0.9, 0))
    assert core.min_p == 0.0


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "nearest is 'max_tokens'"),
        ("max_new_tokens", "nearest is 'max_tokens'"),
        ("temprature", "nearest is 'temperature'"),
        ("n", r"\(n is one of generate: generate\(prompts, params, n=3\)\)"),
        ("beams", r"\(temperature, max_tokens, .*\)"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(
        TypeError, match=f"SamplingParams: expected .* {hint}, got '{name}'"
    ) as caught:
        SamplingParams(**{name: 2})
    assert isinstance(caught.value, SamplingParamsError)


def test_errors_are_those_of_the_package() -> None:
    for wrong in ({"top_p": -1}, {"stop": [""]}, {"max_token": 2}):
        with pytest.raises(DiffulexError):
            SamplingParams(**wrong)
        with pytest.raises(ValueError, match="SamplingParams"):
            SamplingParams(**wrong)


def test_one_stop_text_may_stand_alone() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    with pytest.raises(
        ValueError, match=r"SamplingParams\.stop: expected a text or a list of texts"
    ):
        SamplingParams(stop=b"END")  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("seed", "key"), [(-1, None), (-2, 2**64 - 2), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)]
)
def test_seeds_are_keys_of_64_bits(seed: int, key: int | None) -> None:
    params = SamplingParams(seed=seed)
    assert params.seed == (None if seed == -1 else seed)
    assert params.to_core().seed == key


def test_thresholds_of_a_request_reach_the_core() -> None:
    names = ("edit", "add_block", "semi_complete", "token_stability")
    params = SamplingParams(**{f"{name}_threshold": 0.25 for name in names})
    core = params.to_core()
    for name in names:
        assert getattr(core, f"{name}_threshold") == 0.25
        assert getattr(SamplingParams().to_core(), f"{name}_threshold") is None
    core = SamplingParams().to_core()
    assert (core.top_p, core.top_k, core.min_p) == (1.0, 0, 0.0)
