# SPDX-License-Identifier: Apache-2.0
"""Bodies of `multipart/form-data` (RFC 7578), which are in memory and within the limit of bodies."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser
from typing import NamedTuple

from diffulex.server.http.api_errors import ApiError

__all__ = ["FormPart", "parse_form"]

_FORM = "multipart/form-data"
#: Of a boundary, as RFC 2046 says, and of the lines before the content of a part.
_MOST_BOUNDARY, _MOST_HEAD = 70, 8 << 10


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
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_param("boundary")
    if head.get_content_type() != _FORM:
        raise ApiError(415, f"Content-Type: expected {_FORM}, got {head.get_content_type()!r}")
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
    name = head.get_param("name", header="content-disposition")
    if head.get_content_disposition() != "form-data" or not isinstance(name, str) or not name:
        raise ApiError(400, "body: expected parts of form-data with a name, got another")
    return FormPart(name, head.get_filename(), data)
