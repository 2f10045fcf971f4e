# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, and what a frame of each API says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from diffulex.bench.serve.errors import RequestError

__all__ = ["APIS", "Api", "EventParser", "Frame", "parse_frame", "path_of"]

Api = Literal["completions", "chat", "generate"]
APIS: tuple[Api, ...] = get_args(Api)

_PATHS: Mapping[Api, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/generate",
}
_DONE = "[DONE]"
#: Where servers put text that a chat model writes; reasoning is output too.
_DELTA_TEXTS = ("reasoning_content", "reasoning", "content")


def path_of(api: Api) -> str:
    """Path of the route."""
    return _PATHS[api]


class EventParser:
    """Takes bytes as they come and gives the data of complete events; comments are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, part: bytes) -> list[str]:
        """Data of the events that end in `part`.

        Raises:
            RequestError: a line is not UTF-8.
        """
        *lines, self._rest = (self._rest + part).split(b"\n")
        events = []
        for line in lines:
            text = self._decode(line.removesuffix(b"\r"))
            if text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
            elif not text and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    @staticmethod
    def _decode(line: bytes) -> str:
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError("protocol", f"stream: expected UTF-8, got {line[:80]!r}") from error


@dataclass(frozen=True, slots=True)
class Frame:
    """One event of an answer."""

    text: str = ""
    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    #: A draft that may still change; it is no content.
    is_snapshot: bool = False
    #: Repeats the whole answer: content only when nothing came before.
    is_whole: bool = False
    is_done: bool = False


def parse_frame(api: Api, data: str) -> Frame:
    """Reads the data of one event.

    Raises:
        RequestError: `stream_error` for an error frame, `protocol` for anything unknown.
    """
    if data == _DONE:
        return Frame(is_done=True)
    try:
        content = json.loads(data)
    except ValueError as error:
        raise RequestError("protocol", f"stream: expected JSON, got {data[:80]!r}") from error
    if not isinstance(content, dict):
        raise RequestError("protocol", f"stream: expected an object, got {data[:80]!r}")
    _raise_error(content)
    usage = content.get("usage")
    usage = usage if isinstance(usage, dict) else None
    event = content.get("event")
    if event == "buffer_snapshot":
        return Frame(usage=usage, is_snapshot=True)
    if api == "generate":
        is_final = event == "final"
        return Frame(
            text=_text(content.get("text")),
            usage=usage,
            finish_reason=content.get("finish_reason") if is_final else None,
            is_whole=is_final,
        )
    return _parse_choices(content.get("choices") or [], usage, event == "final")


def _raise_error(content: Mapping[str, Any]) -> None:
    error = content.get("error")
    if content.get("event") == "error":
        error = content
    if error is None:
        return
    message = error.get("message", error) if isinstance(error, dict) else error
    raise RequestError("stream_error", f"stream: the server reports: {message}")


def _parse_choices(choices: Any, usage: Mapping[str, Any] | None, is_whole: bool) -> Frame:
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise RequestError("protocol", f"stream: expected a list of choices, got {choices!r}")
    texts = []
    finish_reason = None
    for choice in choices:
        texts.append(_text(choice.get("text")))
        delta = choice.get("delta") or {}
        texts += [_text(delta.get(name)) for name in _DELTA_TEXTS]
        finish_reason = choice.get("finish_reason") or finish_reason
    return Frame("".join(texts), usage, finish_reason, is_whole=is_whole)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
