# SPDX-License-Identifier: Apache-2.0
"""JSON bodies and frames, written by the fast encoder."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

__all__ = ["JSONBody", "encode_json"]

_ENCODER = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    """UTF-8 JSON; characters beyond ASCII stay, unpaired surrogates become question marks."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return _ENCODER.encode(_encodable(value))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(item) for item in value]
    return value


class JSONBody(Response):
    """A response whose content is a plain tree of JSON values."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encode_json(content)
