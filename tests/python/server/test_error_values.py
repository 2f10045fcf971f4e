# SPDX-License-Identifier: Apache-2.0
"""How values are shown in the messages of errors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from diffulex.omni import images_routes, videos_routes
from diffulex.server.http.api_errors import _EXPECTED, ApiError, _first_invalid, shown
from diffulex.server.openai import request_schema, responses_schema, tokenizer_routes
from diffulex.server.openai.request_schema import CompletionRequest
from diffulex.server.openai.unsupported_fields import check_supported


class Endless:
    """A value whose text takes too long to write."""

    def __repr__(self):
        raise AssertionError("expected the text to end before")


@pytest.mark.parametrize(
    "value",
    [
        [0] * 100 + [Endless()],
        {str(number): None for number in range(100)} | {"last": Endless()},
        {"a": [{"b": "x" * 200}, Endless()]},
    ],
)
def test_of_a_large_value_only_the_beginning_is_written(value):
    text = shown(value)
    assert len(text) == 60
    assert text.endswith("...")
    error = {"loc": ("body", "seed"), "msg": "expected a number", "input": value}
    message = _first_invalid([error]).message
    assert message == f"seed: expected a number, got {shown(value, 100)}"
    request = CompletionRequest(prompt="x", guided_json=value)
    with pytest.raises(ApiError, match="guided_json: expected null"):
        check_supported(request)


@pytest.mark.parametrize("value", [{}, [], {"a": [1, {"b": None}], "c": "d'"}, "x\n", 1.5, None])
def test_of_a_small_value_all_is_written(value):
    assert shown(value) == repr(value)


#: Values of every kind, some of them out of every bound.
_VALUES = (
    *(None, True, 1, -1, 1.5, 10**30, float("inf"), "", "x", "nan", "9" * 5000, "y" * 40_000),
    *([], [1.5], ["x"] * 5000, [{}], {}, {"a": 1}, {str(number): "x" for number in range(100)}),
)
_SCHEMAS = (request_schema, responses_schema, tokenizer_routes, images_routes, videos_routes)


def _bodies(base: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    for body in base.__subclasses__():
        if body.__module__ in {module.__name__ for module in _SCHEMAS}:
            yield body
        yield from _bodies(body)


def _errors_of(
    body: type[BaseModel], field: str, value: object, is_strict: bool | None
) -> list[Any]:
    try:
        body.model_validate({field: value}, strict=is_strict)
    except ValidationError as error:
        return error.errors()
    return []


def test_all_that_a_schema_rejects_is_told_in_the_same_words():
    kinds = set()
    for body in set(_bodies()):
        for error in itertools.chain.from_iterable(
            # As in JSON, and as in a form, where numbers are texts.
            _errors_of(body, field, value, is_strict)
            for field, value, is_strict in itertools.product(
                body.model_fields, _VALUES, (None, False)
            )
        ):
            message = _first_invalid([error]).message
            where = str((*error["loc"], "body")[0])
            assert re.match(rf"{where}\b.*: expected .*, got ", message), message
            kinds.add(error["type"])
    with pytest.raises(
        ValidationError
    ) as caught:  # roles of messages, which are no bodies, are short
        request_schema.ChatCompletionRequest(messages=[{"role": "", "content": "x"}])
    kinds |= {error["type"] for error in caught.value.errors()}
    assert kinds - {"missing", "too_long", "model_type", "value_error"} == set(_EXPECTED)


def test_an_object_with_too_many_entries() -> None:
    body = {"model": "m", "input": "a", "metadata": {str(index): "x" for index in range(20)}}
    with pytest.raises(ValidationError) as caught:
        responses_schema.ResponsesRequest.model_validate(body)
    found = _first_invalid(caught.value.errors())
    assert "expected at most 16 entries, got 20" in str(found)
