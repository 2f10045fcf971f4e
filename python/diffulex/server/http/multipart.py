# SPDX-License-Identifier: Apache-2.0
"""Bodies of `multipart/form-data` (RFC 7578), which are in memory and within the limit of bodies."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser
from typing import NamedTuple

from diffulex.server.http.api_errors import ApiError

__all__ = ["FormPart", "parse_form"]

_FORM = "multipart/form-data"
#: Of a boundary, as RFC 2046 says.
_MOST_BOUNDARY = 70
#: Of a header with parameters, whose parser takes the square of its length.
_MOST_HEAD = 1 << 10


class FormPart(NamedTuple):
    """A field, or a file where `filename` is a text."""

    name: str
    filename: str | None
    data: bytes

    def text(self) -> str:
        """The value of a field. Raises ApiError where it is no text."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise ApiError(400, f"{self.name}: expected UTF-8, got other bytes") from None


def parse_form(content_type: str, body: bytes, max_parts: int) -> list[FormPart]:
    """The parts of a body, in order.

    Args:
        content_type: of the request, with the boundary.
        body: all of it.
        max_parts: more are refused before they are looked at.

    Raises:
        ApiError: 415 for another type of content, 400 for a body that is not of this form.
    """
    if len(content_type) > _MOST_HEAD:
        raise ApiError(400, f"Content-Type: expected at most {_MOST_HEAD} characters, got more")
    head = Message()
    try:
        head["content-type"] = content_type
        kind, boundary = head.get_content_type(), head.get_param("boundary")
    except ValueError:
        raise ApiError(400, "Content-Type: expected parameters, got others") from None
    if kind != _FORM:
        raise ApiError(415, f"Content-Type: expected {_FORM}, got {kind!r}")
    if not isinstance(boundary, str) or not 0 < len(boundary) <= _MOST_BOUNDARY:
        raise ApiError(400, f"Content-Type: expected a boundary, got {content_type[:100]!r}")
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    # One more than allowed is enough to know.
    before, *parts = (b"\r\n" + body).split(mark, max_parts + 2)
    if before or not parts:
        raise ApiError(400, "body: expected it to begin with its boundary, got other bytes")
    if len(parts) > max_parts + 1:
        raise ApiError(400, f"body: expected at most {max_parts} parts, got more")
    last = parts.pop()
    if not last.startswith(b"--"):
        raise ApiError(400, "body: expected it to end with its boundary, got other bytes")
    return [_part(part) for part in parts]


def _part(raw: bytes) -> FormPart:
    lines, found, data = raw[: _MOST_HEAD + 4].partition(b"\r\n\r\n")
    if not raw.startswith(b"\r\n") or not found:
        raise ApiError(400, "body: expected lines and an empty one before every part, got none")
    data = raw[len(lines) + 4 :]
    head = BytesHeaderParser().parsebytes(lines[2:] + b"\r\n\r\n")
    try:
        kind, filename = head.get_content_disposition(), head.get_filename()
        name = head.get_param("name", header="content-disposition")
    except ValueError:
        kind = name = filename = None
    if kind != "form-data" or not isinstance(name, str) or not name:
        raise ApiError(400, "body: expected parts of form-data with a name, got another")
    return FormPart(name, filename, data)
