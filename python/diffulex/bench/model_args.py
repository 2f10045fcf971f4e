# SPDX-License-Identifier: Apache-2.0
"""Values in lm-eval's ``key=value,key=value`` arguments, which know neither maps nor commas."""

from __future__ import annotations

import base64
import json
from typing import Any

from diffulex.errors import ConfigError

__all__ = ["decode_model_arg_value", "encode_model_arg_value"]

_PREFIX = "b64json:"


def encode_model_arg_value(value: Any) -> str | None:
    """The text of a value; None for None, which is left out."""
    if value is None:
        return None
    is_plain = isinstance(value, (bool, int, float))
    is_plain |= isinstance(value, str) and not set(value) & {",", "="}
    if is_plain and not str(value).startswith(_PREFIX):
        return str(value)
    text = json.dumps(value, separators=(",", ":"))
    # Padding would be read as the sign between key and value.
    return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_model_arg_value(value: Any) -> Any:
    """The value of a text that `encode_model_arg_value` wrote; any other value as it is.

    Raises:
        ConfigError: the text says it is encoded and is not.
    """
    if not isinstance(value, str) or not value.startswith(_PREFIX):
        return value
    text = value[len(_PREFIX) :]
    try:
        return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError as error:
        raise ConfigError(f"model_args: expected base64 of JSON, got {value!r}") from error
