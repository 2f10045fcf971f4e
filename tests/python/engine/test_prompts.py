# SPDX-License-Identifier: Apache-2.0
"""Forms of prompts: what is none is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffulex import PromptError, SamplingParams
from tiny_engine import TinyModel

FREE = SamplingParams(max_tokens=20, ignore_eos=True)


def test_bad_prompts(tiny: TinyModel) -> None:
    with tiny.engine(max_model_len=32, num_pages=4) as engine:
        cases: list[tuple[Any, str]] = [
            ("", "expected at least one token, got an empty prompt"),
            ([[]], "empty prompt"),
            ([], "expected at least one prompt, got none"),
            ([1] * 32, r"expected at most 31 tokens \(max_model_len 32\), got 32"),
            ([1, 300], r"expected token ids in \[0, 300\), got 300"),
            ([-1, 2], "got -1"),
            ([1, "a"], "expected a text or a list of token ids, got 'a'"),
        ]
        for prompt, message in cases:
            with pytest.raises(PromptError, match=message):
                engine.generate(prompt, FREE)
        # Nothing of a batch is started when one of it is bad.
        with pytest.raises(PromptError):
            engine.generate([[1, 2], [1] * 40], FREE)
        assert not engine.has_unfinished()
        with pytest.raises(ValueError, match="sampling_params: expected one or 2, got 1"):
            engine.generate([[1], [2]], [FREE])
        with pytest.raises(ValueError, match="mode: expected"):
            engine.stream("a", mode="words")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="on_interrupt: expected"):
            engine.generate("a", on_interrupt="ignore")  # type: ignore[arg-type]


def test_prompt_of_two_dimensions(tiny: TinyModel) -> None:
    message = r"one dimension of token ids, got the shape \[1, 3\]"
    with tiny.engine() as engine:
        with pytest.raises(PromptError, match=message):
            engine.add_request(torch.tensor([[1, 2, 3]]))
        with pytest.raises(PromptError, match=r"expected a text, token ids, .* got tensor"):
            engine.generate(torch.tensor(3))
        with pytest.raises(PromptError, match=r"token ids, got tensor\(\[1, 2, 3\]\)"):
            engine.generate([[1], [torch.tensor([1, 2, 3])]])
        # Of many prompts a row is one.
        rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
        expected = engine.generate(rows.tolist(), max_tokens=4, summary=False)
        given = engine.generate(rows, max_tokens=4, summary=False)
        assert [row.token_ids for row in given] == [row.token_ids for row in expected]
