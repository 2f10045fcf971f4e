# SPDX-License-Identifier: Apache-2.0
"""openai-python against the real server: nothing in here knows that the server is not OpenAI's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fixtures.expected_answers import MAX_TOKENS, Expected
from fixtures.live_server import LiveServer

openai: Any
_GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}


@pytest.fixture(autouse=True, scope="module")
def _imported_openai() -> None:
    """Where its tests run: each process that collects them would take a second to import it."""
    global openai  # noqa: PLW0603
    openai = pytest.importorskip("openai", reason="openai is not installed")


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def model(client: Any) -> str:
    return client.models.list().data[0].id


def _user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_model_is_listed_and_found(client: Any, model: str) -> None:
    (card,) = client.models.list().data
    assert card.object == "model"
    assert card.owned_by == "diffulex"
    assert card.max_model_len > 0
    assert client.models.retrieve(model).id == model


def test_chat_gives_the_engines_answer(client: Any, model: str, expected: list[Expected]) -> None:
    for item in expected:
        answer = client.chat.completions.create(
            model=model, messages=_user(item.question), **_GREEDY
        )
        (choice,) = answer.choices
        assert answer.object == "chat.completion"
        assert answer.id.startswith("chatcmpl-")
        assert choice.message.role == "assistant"
        assert choice.message.content == item.text
        assert choice.finish_reason == item.finish_reason
        assert answer.usage.prompt_tokens == len(item.chat_ids)
        assert answer.usage.completion_tokens == item.num_tokens
        assert answer.usage.total_tokens == len(item.chat_ids) + item.num_tokens
        assert answer.usage.nfe >= 1
        assert answer.usage.tpf == pytest.approx(item.num_tokens / answer.usage.nfe)


def test_a_stream_is_the_same_answer_in_chunks(
    client: Any, model: str, expected: list[Expected]
) -> None:
    item = expected[0]
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=_user(item.question),
            stream=True,
            stream_options={"include_usage": True},
            **_GREEDY,
        )
    )
    *parts, last = chunks
    assert all(chunk.choices is not None for chunk in chunks)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    # The role comes alone, as clients expect it.
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[0].choices[0].delta.content == ""
    texts = [chunk.choices[0].delta.content for chunk in parts[1:-1]]
    assert all(texts)
    assert "".join(texts) == item.text
    assert [chunk.choices[0].finish_reason for chunk in parts[1:]] == [
        *[None] * len(texts),
        item.finish_reason,
    ]
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == []
    assert last.usage.completion_tokens == item.num_tokens


def test_without_being_asked_a_stream_has_no_usage(
    client: Any, model: str, expected: list[Expected]
) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model, messages=_user(expected[0].question), stream=True, **_GREEDY
        )
    )
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


_RESPONSE: dict[str, Any] = {"temperature": 0, "max_output_tokens": MAX_TOKENS}
_STATUS = {"stop": "completed", "length": "incomplete"}


def _check_response(response: Any, item: Expected) -> None:
    assert response.output_text == item.text
    assert response.status == _STATUS[item.finish_reason]
    assert response.usage.input_tokens == len(item.chat_ids)
    assert response.usage.output_tokens == item.num_tokens
    assert response.error is None


def test_responses_give_the_engines_answer(
    client: Any, model: str, expected: list[Expected]
) -> None:
    for item in expected:
        response = client.responses.create(model=model, input=item.question, **_RESPONSE)
        _check_response(response, item)
        assert response.id.startswith("resp_")
    turns = [*_user("Hello"), *response.output, *_user(item.question)]
    again = client.responses.create(model=model, input=turns, instructions="Think.", **_RESPONSE)
    assert again.output_text == item.text  # the model reads the last question only


def test_events_of_a_response(client: Any, model: str, expected: list[Expected]) -> None:
    item = next(item for item in expected if item.finish_reason == "stop")
    arguments = {"model": model, "input": item.question, **_RESPONSE}
    events = list(client.responses.create(stream=True, **arguments))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == item.text
    assert all(deltas)
    _check_response(events[-1].response, item)
    # The helper checks the order, and puts the parts together itself.
    with client.responses.stream(**arguments, extra_body={"stream_mode": "both"}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert "diffulex.response.denoise" in kinds
    _check_response(final, item)


def test_asynchronous_responses(server: LiveServer, model: str, expected: list[Expected]) -> None:
    async def ask_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
            create = api.responses.create
            calls = [create(model=model, input=item.question, **_RESPONSE) for item in expected]
            return await asyncio.gather(*calls)

    for response, item in zip(asyncio.run(ask_all()), expected, strict=True):
        _check_response(response, item)


def test_refused_fields_of_a_response(client: Any, model: str) -> None:
    for name, value in (
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("tools", [{"type": "web_search"}]),
        ("reasoning", {"effort": "low"}),
        ("text", {"format": {"type": "json_object"}}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=model, input="x", **{name: value})
        assert caught.value.param == name
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_completions_of_text_ids_and_lists(
    client: Any, model: str, expected: list[Expected]
) -> None:
    ids = [item.chat_ids for item in expected[:3]]
    answer = client.completions.create(model=model, prompt=ids, **_GREEDY)
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [item.text for item in expected[:3]]
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert answer.usage.completion_tokens == sum(item.num_tokens for item in expected[:3])
    texts = ["1 + 2 =", "3 + 4 ="]
    together = client.completions.create(model=model, prompt=texts, temperature=0)
    alone = [client.completions.create(model=model, prompt=text, temperature=0) for text in texts]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone]
    # The default of this route is 16 tokens.
    assert together.usage.completion_tokens <= 32


def test_echo_repeats_the_prompt(client: Any, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "prompt": "1 + 2 =", "temperature": 0}
    plain = client.completions.create(**fields).choices[0].text
    assert client.completions.create(echo=True, **fields).choices[0].text == "1 + 2 =" + plain


def test_a_stream_of_completions(client: Any, model: str, expected: list[Expected]) -> None:
    texts = {0: "", 1: ""}
    reasons = {}
    prompts = [item.chat_ids for item in expected[:2]]
    for chunk in client.completions.create(model=model, prompt=prompts, stream=True, **_GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == {index: item.text for index, item in enumerate(expected[:2])}
    assert reasons == {index: item.finish_reason for index, item in enumerate(expected[:2])}


def test_a_stop_string_ends_the_answer_before_it(
    client: Any, model: str, expected: list[Expected]
) -> None:
    item = next(item for item in expected if "=" in item.text)
    answer = client.chat.completions.create(
        model=model, messages=_user(item.question), stop=["=", "never"], **_GREEDY
    )
    assert answer.choices[0].message.content == item.text[: item.text.index("=")]
    assert answer.choices[0].finish_reason == "stop"


def test_a_limit_of_tokens_is_said(client: Any, model: str, expected: list[Expected]) -> None:
    answer = client.chat.completions.create(
        model=model, messages=_user(expected[0].question), temperature=0, max_completion_tokens=3
    )
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"
    assert expected[0].text.startswith(answer.choices[0].message.content)


def test_a_seed_repeats_drawn_answers(client: Any, model: str) -> None:
    def draw(seed: int) -> list[str]:
        # Nothing the model has learnt to answer: it is sure of nothing.
        answer = client.completions.create(
            model=model, prompt="Blue", n=2, seed=seed, temperature=3, max_tokens=24
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.text for choice in answer.choices]

    first = draw(7)
    assert first == draw(7)
    # Choice i has the seed of the request plus i.
    assert draw(8)[0] == first[1]
    assert len({*first, *draw(100), *draw(200)}) > 1


def test_log_probabilities_belong_to_the_tokens(
    client: Any, model: str, expected: list[Expected]
) -> None:
    item = expected[0]
    answer = client.chat.completions.create(
        model=model, messages=_user(item.question), logprobs=True, **_GREEDY
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == item.num_tokens
    assert b"".join(bytes(token.bytes) for token in content).decode() == item.text
    assert all(token.logprob <= 0 for token in content)
    assert all(token.diffulex["step"] >= 0 for token in content)


def test_drafts_are_a_legal_stream(client: Any, model: str, expected: list[Expected]) -> None:
    """A client that knows nothing of drafts still reads the whole answer at the end."""
    item = expected[0]
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=_user(item.question),
            stream=True,
            extra_body={"stream_mode": "denoise"},
            **_GREEDY,
        )
    )
    assert chunks[0].object == "diffulex.chat.completion.denoise"
    assert all(chunk.choices == [] for chunk in chunks[:-1])
    assert {chunk.event for chunk in chunks[:-1]} == {"buffer_snapshot"}
    (choice,) = chunks[-1].choices
    assert choice.delta.content == item.text


def test_both_streams_at_once(client: Any, model: str, expected: list[Expected]) -> None:
    item = expected[0]
    # A reader that is slow, as on a busy host, gets fewer drafts: it may be that they come as one.
    for _ in range(10):
        text, num_drafts = "", 0
        for chunk in client.chat.completions.create(
            model=model,
            messages=_user(item.question),
            stream=True,
            extra_body={"stream_mode": "both"},
            **_GREEDY,
        ):
            num_drafts += not chunk.choices
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == item.text
        if num_drafts > 1:
            break
    assert num_drafts > 1


def test_sixty_four_requests_at_once(
    server: LiveServer, model: str, expected: list[Expected]
) -> None:
    """Answers do not depend on what else is decoded."""

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as api:
            tasks = [
                api.chat.completions.create(
                    model=model, messages=_user(expected[i % len(expected)].question), **_GREEDY
                )
                for i in range(64)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*tasks)]

    texts = asyncio.run(ask())
    assert texts == [expected[i % len(expected)].text for i in range(64)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"decoding": {"accept_threshold": 3}}}, None),
        ({"messages": []}, "messages"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: Any, model: str, fields: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": model, "messages": _user("a"), **fields})
    error = caught.value
    assert error.type == "invalid_request_error"
    if param is not None:
        assert param in (error.param or "")
        assert param in error.message


def test_neutral_values_are_accepted(client: Any, model: str) -> None:
    client.chat.completions.create(
        model=model,
        messages=_user("a"),
        max_tokens=1,
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        parallel_tool_calls=False,
        user="u",
        metadata={"a": "b"},
        extra_body={"repetition_penalty": 1.0, "an_unknown_key": 1},
    )


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_says_so(client: Any, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=[5] * 100_000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=[5], max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=_user("a"))
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_a_wrong_key_is_refused(strict_server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{strict_server.url}/v1", api_key="wrong", max_retries=0) as api:
        with pytest.raises(openai.AuthenticationError) as caught:
            api.models.list()
        assert caught.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=f"{strict_server.url}/v1", api_key="right-key") as api:
        assert api.models.list().data


def test_a_full_queue_is_a_rate_limit_that_retries_overcome(strict_server: LiveServer) -> None:
    url = f"{strict_server.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="right-key", max_retries=0) as impatient,
        # One of three is refused at a time, and asks again every second.
        openai.OpenAI(base_url=url, api_key="right-key", max_retries=100) as patient,
        ThreadPoolExecutor(6) as pool,
    ):
        model = impatient.models.list().data[0].id
        fields: dict[str, Any] = {
            "model": model, "messages": _user("a"), "temperature": 0,
            "max_tokens": 256,
            # Many forwards: six requests are there before the first one is answered.
            "extra_body": {"ignore_eos": True, "decoding": {"accept_threshold": 1.0}},
        }  # fmt: skip

        def ask(client: openai.OpenAI) -> Any:
            try:
                return client.chat.completions.create(**fields)
            except openai.RateLimitError as error:
                return error

        # Two places for six at once.
        answers = list(pool.map(ask, [impatient] * 6))
        rejected = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
        assert 0 < len(rejected) < 6
        for error in rejected:
            assert error.code == "queue_full"
            assert int(error.response.headers["retry-after"]) >= 1
        served = list(pool.map(ask, [patient] * 3))
        assert [answer.usage.completion_tokens for answer in served] == [256] * 3
