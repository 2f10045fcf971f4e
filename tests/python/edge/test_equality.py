# SPDX-License-Identifier: Apache-2.0
"""Programs answer token for token as the engine does."""

from __future__ import annotations

import pytest

from diffulex import Diffulex, PromptError
from diffulex_edge.errors import ProgramError
from diffulex_edge.program import split_rows
from fixtures.edge import DEMO, HOST, ZOO, answers, eager_engine, questions, relabelled_dream
from fixtures.extras import need_extra

need_extra("edge", "executorch", "torchao")

NUM_PROBLEMS = 8
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "seed": 3}


def assert_equal(model, program_engine, texts, sampling=None, **settings) -> None:
    with Diffulex(str(model), **HOST, **settings) as engine, program_engine as other:
        expected = answers(engine, texts, **(sampling or {}))
        assert answers(other, texts, **(sampling or {})) == expected
        assert any(expected)


@pytest.mark.parametrize(
    ("model", "settings", "sampling"),
    [
        (DEMO, {"buffer_size": 1}, {}),
        (DEMO, {"buffer_size": 4}, {}),
        (DEMO, {"buffer_size": 4}, SAMPLED),
        (ZOO / "d2f_llada", {}, {}),
        (ZOO / "d2f_llada", {"d2f_block_grid": True}, {}),
        (ZOO / "fast_dllm_v2", {}, {}),
        (ZOO / "fast_dllm_v2", {"fdv2_use_block_cache": False}, {}),
        (ZOO / "fast_dllm_v2", {}, SAMPLED),
    ],
    ids=lambda value: getattr(value, "name", None) or "-".join(map(str, value)) or "default",
)
def test_module_answers_as_the_engine(model, settings, sampling):
    """The module that is exported, in PyTorch: shows the host's part without an export."""
    program = eager_engine(model, **settings)
    assert_equal(model, program, questions(model, NUM_PROBLEMS), sampling, **settings)


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [({}, {}), ({}, SAMPLED), ({"decoding_strategy": "multi_bd"}, {})],
)
def test_shifted_module_answers_as_the_engine(tmp_path, settings, sampling):
    model = relabelled_dream(tmp_path / "dream")
    texts = questions(ZOO, NUM_PROBLEMS)
    assert_equal(model, eager_engine(model, **settings), texts, sampling, **settings)


def test_small_programs_take_long_prompts_in_pieces():
    """32 rows a call and 2 logits rows: prompts and blocks are cut, the answers stay."""
    program = eager_engine(DEMO, max_rows=16, max_logits=3, buffer_size=4)
    assert_equal(DEMO, program, questions(DEMO, 3), buffer_size=4)


@pytest.mark.parametrize("buffer_size", [1, 4])
def test_demo_program_answers_as_the_engine(bundle, buffer_size):
    program = Diffulex(str(bundle("demo")), buffer_size=buffer_size)
    assert_equal(DEMO, program, questions(DEMO, 16), buffer_size=buffer_size)


def test_demo_program_draws_as_the_engine(bundle):
    program = Diffulex(str(bundle("demo")), buffer_size=4)
    assert_equal(DEMO, program, questions(DEMO, NUM_PROBLEMS), SAMPLED, buffer_size=4)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llada", {"decoding_strategy": "d2f", "block_size": 8}),
        ("llada", {"decoding_strategy": "multi_bd", "block_size": 4}),
        ("fast_dllm_v2", {}),
        ("dream", {"decoding_strategy": "d2f", "block_size": 8}),
    ],
)
def test_random_programs_answer_as_the_engine(bundle, checkpoint, family, settings):
    texts = ["abc defg hij", "Who?", "0123456789 0123456789"]
    assert_equal(checkpoint(family), Diffulex(str(bundle(family)), **settings), texts, **settings)


def test_d2f_prompt_beyond_the_rows_names_the_flag(bundle):
    with Diffulex(str(bundle("llada")), decoding_strategy="d2f", block_size=8) as engine:
        assert engine.generate([[1] * 128], max_tokens=2, summary=False)[0].token_ids
        with pytest.raises(PromptError, match=r"at most 128 tokens.*--max-rows\), got 129"):
            engine.generate([[1] * 129])


def test_prompt_beyond_the_cache_is_refused(bundle):
    with Diffulex(str(bundle("demo"))) as engine:
        longest = engine.config.scheduler.max_model_len
        assert longest == 512
        with pytest.raises(PromptError, match=r"at most 511 tokens \(max_model_len 512\), got 512"):
            engine.generate([[1] * longest])


def test_requests_follow_each_other_on_one_program(bundle):
    """The cache is never cleared: a short request after a long one must not see its rows."""
    texts = questions(DEMO, 6)
    with Diffulex(str(bundle("demo")), buffer_size=4) as engine:
        first = answers(engine, texts)
        batch = engine.generate([[1] * 300, [2] * 5, [3] * 200], max_tokens=20, summary=False)
        assert len(batch) == 3
        assert answers(engine, texts[::-1]) == first[::-1]


class TestSplitRows:
    def test_cuts_where_no_earlier_row_sees_the_position(self):
        ends = [(i // 4 + 1) * 4 for i in range(20)]
        assert list(split_rows(range(20), ends, 10)) == [(0, 8), (8, 16), (16, 20)]

    def test_keeps_one_call_where_the_rows_fit(self):
        assert list(split_rows(range(5), [5] * 5, 8)) == [(0, 5)]

    def test_rows_that_see_each_other_do_not_fit(self):
        with pytest.raises(ProgramError, match="at most 8 rows that see each other"):
            list(split_rows(range(12), [12] * 12, 8))

    def test_rows_of_a_cached_block_are_cut_anywhere(self):
        """Rows that see a fixed context, as the refining rows of a dual cache do not see each other
        later than it."""
        assert list(split_rows(range(40, 52), [40] * 12, 8)) == [(0, 8), (8, 12)]
