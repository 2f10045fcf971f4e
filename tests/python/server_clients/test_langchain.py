# SPDX-License-Identifier: Apache-2.0
"""LangChain's ChatOpenAI against the real server."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.expected_answers import MAX_TOKENS, Expected
from fixtures.live_server import LiveServer


@pytest.fixture(scope="module")
def langchain() -> Any:
    """The package, imported by those that run these tests: it takes seconds."""
    return pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


@pytest.fixture(scope="module")
def chat(langchain: Any, server: LiveServer) -> Any:
    return langchain.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model="demo",
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        stream_usage=True,
    )


def test_invoke_gives_text_reason_and_usage(chat: Any, expected: list[Expected]) -> None:
    item = expected[0]
    answer = chat.invoke(item.question)
    assert answer.content == item.text
    assert answer.response_metadata["finish_reason"] == item.finish_reason
    assert answer.usage_metadata["input_tokens"] == len(item.chat_ids)
    assert answer.usage_metadata["output_tokens"] == item.num_tokens


def test_a_stream_adds_up_and_has_usage_once(chat: Any, expected: list[Expected]) -> None:
    item = expected[0]
    parts = list(chat.stream(item.question))
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert total.content == item.text
    assert total.response_metadata["finish_reason"] == item.finish_reason
    # LangChain adds up what it gets: twice the usage would be twice the tokens.
    assert total.usage_metadata["output_tokens"] == item.num_tokens
    assert sum(part.usage_metadata is not None for part in parts) == 1


def test_a_batch_keeps_its_order(chat: Any, expected: list[Expected]) -> None:
    answers = chat.batch([item.question for item in expected])
    assert [answer.content for answer in answers] == [item.text for item in expected]


def test_content_in_parts_is_one_message(chat: Any, expected: list[Expected]) -> None:
    content = [{"type": "text", "text": expected[0].question}]
    assert chat.invoke([("user", content)]).content == expected[0].text


def test_bound_stop_strings_hold(chat: Any, expected: list[Expected]) -> None:
    item = next(item for item in expected if "=" in item.text)
    answer = chat.bind(stop=["="]).invoke(item.question)
    assert answer.content == item.text[: item.text.index("=")]


def test_an_image_is_refused(chat: Any) -> None:
    openai = pytest.importorskip("openai")
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(openai.BadRequestError, match="text"):
        chat.invoke([("user", content)])
