# SPDX-License-Identifier: Apache-2.0
"""Infilling: fixed tokens stay, free positions are decoded around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.engine.template import template_token_ids
from diffulex.errors import PromptError, SamplingParamsError
from tiny_engine import TinyModel

QUESTION = "Ben has 8 coins. He loses 3 coins. How many coins does Ben have now?"
PROMPT = list(range(10, 22))  # three blocks of four
FIXED = [33, 34, 35, 36, 37]
TEMPLATES = [
    [*FIXED, None, None, None],
    [None, 40, None, None, 41, 42, 43, 44, None, None, 45],
    [None] * 9,
    [40, None, *FIXED * 3],
]


@pytest.fixture(scope="module")
def demo() -> Iterator[Diffulex]:
    with Diffulex("demo", max_num_reqs=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(tiny: TinyModel) -> Iterator[Diffulex]:
    with tiny.engine(block_size=4, buffer_size=3) as engine:
        yield engine


def filled(engine: Diffulex, template: list[int | None], **sampling: Any) -> tuple[int, ...]:
    outputs = engine.generate([PROMPT], template_token_ids=template, summary=False, **sampling)
    return outputs[0].token_ids


def keeps(template: list[int | None], token_ids: tuple[int, ...]) -> bool:
    mates = zip(template, token_ids, strict=True)
    return all(fixed is None or fixed == token for fixed, token in mates)


def test_a_sentence_of_the_bundled_model(demo: Diffulex) -> None:
    template = template_token_ids("<mask>-<mask>=<mask>\n#### <mask>", demo.tokenizer)
    (output,) = demo.generate(
        QUESTION, use_chat_template=True, template_token_ids=template, summary=False
    )
    assert keeps(list(template), output.token_ids)
    assert output.text == "8-3=5\n#### 5"
    assert (output.finish_reason, output.metrics.completion_tokens) == ("length", len(template))
    events = list(demo.stream(QUESTION, use_chat_template=True, template_token_ids=template))
    assert "".join(event.text for event in events) == output.text


@pytest.mark.every(5)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"buffer_size": 1},
        {"block_size": 8, "enable_prefix_caching": False},
        {"decoding_strategy": "d2f"},
    ],
)
def test_fixed_tokens_stay(
    tiny: TinyModel, settings: dict[str, Any], template: list[int | None]
) -> None:
    with tiny.engine(**{"block_size": 4, "buffer_size": 3, **settings}) as engine:
        alone = filled(engine, template)
        assert keeps(template, alone)
        drawn = filled(engine, template, temperature=0.9, seed=3)
        assert keeps(template, drawn)
        params = [SamplingParams(template_token_ids=item) for item in TEMPLATES]
        params.append(SamplingParams(max_tokens=20))
        outputs = engine.generate([PROMPT] * len(params), params, summary=False)
        assert outputs[TEMPLATES.index(template)].token_ids == alone
        assert engine.stats().num_running == 0


def test_fixed_blocks_are_as_good_as_a_prompt(engine: Diffulex) -> None:
    fixed = [50, 51, 52, 53]
    answer = engine.generate(
        [[*PROMPT, *fixed]], max_tokens=12, ignore_eos=True, summary=False
    )[0].token_ids  # fmt: skip
    whole = filled(engine, [*fixed, *[None] * 12], ignore_eos=True)
    assert whole == (*fixed, *answer)


def test_stops_wait_for_the_last_fixed_token(tiny: TinyModel) -> None:
    with tiny.engine(block_size=4, buffer_size=1) as engine:
        free = filled(engine, [None] * 12)
        params = SamplingParams(template_token_ids=[None] * 12, stop_token_ids=free[5:6])
        (output,) = engine.generate([PROMPT], params, summary=False)
        assert output.completion_reason == "eos_token_generated"
        assert len(output.token_ids) <= 5
        template = [None] * 11 + [FIXED[0] if free[5] != FIXED[0] else FIXED[1]]
        whole = filled(engine, template, stop_token_ids=free[5:6])
        assert len(whole) == 12
        assert free[5] not in whole


def test_its_course_is_recorded(engine: Diffulex) -> None:
    template = TEMPLATES[1]
    (output,) = engine.generate(
        [PROMPT], template_token_ids=template, return_trajectory=True, summary=False
    )
    assert output.trajectory is not None
    tokens = output.trajectory.tokens
    assert tuple(token.token for token in tokens) == output.token_ids
    for token, fixed in zip(tokens, template, strict=True):
        assert fixed is None or token.confidence is None
        assert token.edits == 0


def test_masks_in_a_prompt(tiny: TinyModel) -> None:
    with tiny.engine(block_size=4, allow_mask_in_prompt=True) as engine:
        mask = engine.config.model.mask_token_id
        template = TEMPLATES[1]
        masked = [mask if item is None else item for item in template]
        (output,) = engine.generate([[*PROMPT, *masked]], max_tokens=2, summary=False)
        assert output.token_ids == filled(engine, template)
        assert list(output.prompt_token_ids) == PROMPT
        with pytest.raises(SamplingParamsError, match="expected none with masks in the prompt"):
            engine.generate([[*PROMPT, mask]], template_token_ids=[None], summary=False)
        with pytest.raises(SamplingParamsError, match="expected a token before the first mask"):
            engine.generate([[mask, *PROMPT]], summary=False)


def test_without_the_key_a_mask_in_a_prompt_is_a_token(engine: Diffulex) -> None:
    mask = engine.config.model.mask_token_id
    prompt = [*PROMPT, mask, *PROMPT]
    (output,) = engine.generate([prompt], max_tokens=4, summary=False)
    assert list(output.prompt_token_ids) == prompt
    assert len(output.token_ids) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template_token_ids": "abc"}, "expected a list of token ids and None, got 'abc'"),
        ({"template_token_ids": [1.5]}, "expected token ids >= 0, and None at free positions"),
        ({"template_token_ids": [-1]}, "expected token ids >= 0, and None at free positions"),
        (
            {"template_token_ids": [None] * 9, "max_tokens": 8},
            r"expected at most max_tokens \(8\) positions, got 9",
        ),
        ({"template_token_ids": [None], "logprobs": 1}, "expected None with a template"),
        (
            {"template_token_ids": [5, 5, 5, None], "max_repetition_run": 3},
            "max_repetition_run: expected None with a template, .*, got 3",
        ),
        ({"template_token_ids": 5}, "expected a list of token ids and None, got 5"),
        ({"template_token_ids": np.array(5)}, "expected a list of token ids and None, got 5"),
        ({"template_token_ids": {5, 6}}, "expected a list of token ids and None, got {5, 6}"),
        ({"template_token_ids": {5: 6}}, "expected a list of token ids and None, got {5: 6}"),
        ({"template_token_ids": np.array([[5, 6]])}, r"token ids >= 0, .*, got \[5, 6\]"),
        ({"template_token_ids": np.array([5.0])}, "token ids >= 0, .*, got 5.0"),
        ({"template_token_ids": [np.bool_(True)]}, "token ids >= 0, .*, got True"),
        ({"template_token_ids": [None, np.float32(1)]}, "token ids >= 0, .*, got 1.0"),
    ],
)
def test_parameters_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        ([], ()),
        (np.array([]), ()),
        (np.array([5, 6], dtype=np.int32), (5, 6)),
        (torch.tensor([5, 6]), (5, 6)),
        ([np.int64(5), None, torch.tensor(6)], (5, None, 6)),
        (iter([5, None]), (5, None)),
    ],
)
def test_forms_that_are_accepted(given: Any, expected: tuple[int | None, ...]) -> None:
    params = SamplingParams(template_token_ids=given)
    assert params.template_token_ids == expected
    assert {type(token) for token in params.template_token_ids} <= {int, type(None)}
    core = params.to_core()
    assert list(core.template_token_ids) == [-1 if token is None else token for token in expected]
    assert params.max_tokens == (len(expected) or 512)


def test_templates_that_are_refused(engine: Diffulex) -> None:
    for template, message in (
        ([5, 6], "expected at least one free position"),
        ([None, 100_000], "expected ids in"),
        ([None] * 120, "expected at most 116 positions after the prompt"),
    ):
        with pytest.raises(SamplingParamsError, match=message):
            filled(engine, template)


def test_texts(demo: Diffulex) -> None:
    encode = demo.tokenizer.encode
    assert template_token_ids("a<mask>b<mask:3>", demo.tokenizer) == (
        *encode("a", add_special_tokens=False),
        None,
        *encode("b", add_special_tokens=False),
        *[None] * 3,
    )
    for text in ("no mark", "<mask:0>", "<mask:65537>", "<mask:99999999999>"):
        with pytest.raises(SamplingParamsError, match="template: expected"):
            template_token_ids(text, demo.tokenizer)
    with pytest.raises(PromptError, match="expected UTF-8 text"):
        template_token_ids("\ud800<mask>", demo.tokenizer)
