# SPDX-License-Identifier: Apache-2.0
"""One real server for all clients, and what an engine of this process answers to the same prompts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diffulex import Diffulex, SamplingParams
from diffulex.bench.evaluate import read_problems
from fixtures.expected_answers import MAX_TOKENS, Expected
from fixtures.live_server import LiveServer, running_server

#: Flags of the server; the engine gets the same settings.
_FLAGS = ("--model", "demo", "--device", "cpu")
_NUM_QUESTIONS = 6


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """A server with default settings."""
    with running_server(*_FLAGS) as live:
        yield live


@pytest.fixture(scope="session")
def strict_server() -> Iterator[LiveServer]:
    """A server with a key, one running request and a queue of one."""
    flags = (*_FLAGS, "--api-key", "right-key", "--max-num-reqs", "1", "--max-queue-size", "1")
    with running_server(*flags) as live:
        yield live


@pytest.fixture(scope="session")
def expected() -> list[Expected]:
    """Answers of an engine in this process, computed once."""
    questions = [problem.question for problem in read_problems(None)[:_NUM_QUESTIONS]]
    with Diffulex("demo", device="cpu") as engine:
        prompts = [
            engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
            for question in questions
        ]
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        outputs = engine.generate(prompts, params, use_tqdm=False, summary=False)
    reasons = {"eos_token_generated": "stop", "max_new_tokens_reached": "length"}
    return [
        Expected(
            question,
            prompt,
            output.text,
            len(output.token_ids),
            reasons[str(output.completion_reason)],
        )
        for question, prompt, output in zip(questions, prompts, outputs, strict=True)
    ]
