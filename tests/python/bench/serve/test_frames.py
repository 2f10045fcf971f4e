# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffulex.bench.serve.errors import RequestError
from diffulex.bench.serve.frames import EventParser, Frame, parse_frame


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))),
    st.integers(1, 7),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_come_out_whole_wherever_they_are_split(
    events: list[str], size: int, line_end: str
) -> None:
    stream = "".join(f"data: {event}{line_end}{line_end}" for event in events).encode()
    parser = EventParser()
    parts = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [event for part in parts for event in parser.feed(part)] == events


def test_comments_other_fields_and_blank_lines_are_dropped() -> None:
    parser = EventParser()
    stream = b": ping\n\n\nevent: x\nid: 3\ndata: a\ndata:b\n\n: ping\n\ndata: unfinished"
    assert parser.feed(stream) == ["a\nb"]


def test_a_line_that_is_not_utf8_is_a_protocol_error() -> None:
    with pytest.raises(RequestError, match="expected UTF-8") as caught:
        EventParser().feed(b"data: \xff\n")
    assert caught.value.kind == "protocol"


def _frame(api: str, content: object) -> Frame:
    return parse_frame(api, json.dumps(content))


def test_the_terminator_is_recognised() -> None:
    assert parse_frame("chat", "[DONE]") == Frame(is_done=True)


def test_chat_content_reasoning_and_usage_are_read() -> None:
    usage = {"completion_tokens": 3}
    delta = {"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}
    assert _frame("chat", {"choices": [delta], "usage": None}) == Frame("a")
    thought = {"index": 0, "delta": {"reasoning_content": "b", "content": None}}
    assert _frame("chat", {"choices": [thought]}) == Frame("b")
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    assert _frame("chat", end) == Frame(finish_reason="length")
    assert _frame("chat", {"choices": [], "usage": usage}) == Frame(usage=usage)


def test_completions_carry_text() -> None:
    content = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
    assert _frame("completions", content) == Frame("a", finish_reason="stop")


def test_a_snapshot_is_no_content() -> None:
    snapshot = {"event": "buffer_snapshot", "text": "draft", "choices": []}
    assert _frame("chat", snapshot) == Frame(is_snapshot=True)
    assert _frame("generate", snapshot) == Frame(is_snapshot=True)


def test_the_native_route_streams_appends_and_a_final_reply() -> None:
    assert _frame("generate", {"event": "append", "text": "a"}) == Frame("a")
    usage = {"completion_tokens": 1}
    final = {"event": "final", "text": "a", "finish_reason": "stop", "usage": usage}
    assert _frame("generate", final) == Frame("a", usage=usage, finish_reason="stop", is_whole=True)


@pytest.mark.parametrize(
    "content",
    [
        {"error": {"message": "broken"}},
        {"error": "broken"},
        {"event": "error", "message": "broken"},
    ],
)
def test_an_error_frame_is_an_error(content: object) -> None:
    with pytest.raises(RequestError, match="the server reports: broken") as caught:
        _frame("chat", content)
    assert caught.value.kind == "stream_error"


@pytest.mark.parametrize("data", ["{", "[1]", '{"choices": 3}', '{"choices": ["a"]}'])
def test_anything_else_is_a_protocol_error(data: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_frame("chat", data)
    assert caught.value.kind == "protocol"
