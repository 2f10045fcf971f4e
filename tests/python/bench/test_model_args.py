# SPDX-License-Identifier: Apache-2.0
"""Values that lm-eval's argument text cannot hold as they are."""

from __future__ import annotations

from typing import Any

import pytest

from diffulex.bench.model_args import decode_model_arg_value, encode_model_arg_value
from diffulex.errors import ConfigError


@pytest.mark.parametrize(
    "value", [{"accept_threshold": 0.95, "deep": [1, {"a": None}]}, [1, 2, 3], "a,b", "a=b", "b64json:x", []]
)  # fmt: skip
def test_maps_lists_and_commas_survive(value: Any) -> None:
    text = encode_model_arg_value(value)
    assert text is not None
    assert text.startswith("b64json:")
    assert not set(text) & {",", "="}
    assert decode_model_arg_value(text) == value


@pytest.mark.parametrize(
    ("value", "text"), [(1, "1"), (0.5, "0.5"), (True, "True"), ("a b", "a b")]
)
def test_plain_values_stay_as_they_are(value: Any, text: str) -> None:
    assert encode_model_arg_value(value) == text
    assert decode_model_arg_value(value) == value


def test_none_is_left_out_and_nonsense_refused() -> None:
    assert encode_model_arg_value(None) is None
    with pytest.raises(ConfigError, match="model_args: expected base64 of JSON"):
        decode_model_arg_value("b64json:!")
