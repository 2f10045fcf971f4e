# SPDX-License-Identifier: Apache-2.0
"""How values are shown in the messages of errors."""

from __future__ import annotations

import pytest

from diffulex.server.http.api_errors import ApiError, _first_invalid, shown
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
