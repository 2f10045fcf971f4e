# SPDX-License-Identifier: Apache-2.0
"""The denoising painter, judged by what a terminal would show."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffulex.checkpoint.tokenizer import Tokenizer
from diffulex.engine.output import BlockSnapshot, DenoiseSnapshot
from diffulex.engine.terminal import MASK_CHAR, DenoisePainter, Span, snapshot_spans
from fixtures.checkpoints import MASK_ID, write_tokenizer

_TOKEN = re.compile(r"\x1b\[(\d*)([A-Za-z;])|\x1b\[[\d;]*m|(.)", re.DOTALL)


class Screen:
    """The few terminal functions the painter may use; anything else fails the test."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        for match in _TOKEN.finditer(text):
            if match[3] is not None:
                self._put(match[3])
            elif match[2] == "A":
                self.row -= int(match[1])
                assert self.row >= 0
            elif match[2] == "C":
                self.column += int(match[1])
                assert self.column < self.columns
            elif match[2] == "J":
                self.lines = self.lines[: self.row + 1]
                del self.lines[self.row][self.column :]
            else:
                assert match[0].endswith("m"), match[0]

    def _put(self, char: str) -> None:
        if char == "\r":
            self.column = 0
            return
        if char == "\n" or self.column == self.columns:
            self.row += 1
            self.column = 0
            if self.row == len(self.lines):
                self.lines.append([])
        if char != "\n":
            line = self.lines[self.row]
            line[self.column : self.column + 1] = [char]
            self.column += 1

    def text(self) -> str:
        return "\n".join("".join(line) for line in self.lines)


def wrapped(text: str, columns: int) -> str:
    screen = Screen(columns)
    screen.feed(text)
    return screen.text()


def make(columns: int = 10, rows: int = 100, **kwargs) -> tuple[io.StringIO, DenoisePainter]:
    stream = io.StringIO()
    kwargs.setdefault("is_terminal", True)
    return stream, DenoisePainter(stream, columns=columns, rows=rows, **kwargs)


texts = st.text(alphabet="ab \n", max_size=25)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(st.tuples(texts, texts), max_size=6), columns=st.integers(2, 12))
def test_screen_shows_settled_then_open_text(steps, columns):
    stream, painter = make(columns)
    settled = ""
    for final, pending in steps:
        painter.settle(final)
        settled += final
        painter.show([Span("old", pending[:3]), Span("mask", pending[3:])])
        screen = Screen(columns)
        screen.feed(stream.getvalue())
        assert screen.text().rstrip("\n") == wrapped(settled + pending, columns).rstrip("\n")
    painter.finish()
    screen = Screen(columns)
    screen.feed(stream.getvalue())
    assert screen.text().rstrip("\n") == wrapped(settled, columns).rstrip("\n")


def test_open_text_higher_than_the_screen_is_clipped():
    stream, painter = make(columns=4, rows=3)
    painter.show([Span("mask", "x" * 40)])
    assert stream.getvalue().count("x") == 8
    painter.show([Span("old", "ab")])
    screen = Screen(4)
    screen.feed(stream.getvalue())
    assert screen.text() == "ab"


def test_wide_characters_take_two_columns():
    stream, painter = make(columns=4)
    painter.show([Span("old", "漢字漢")])
    painter.show([])
    assert "\x1b[1A" in stream.getvalue()


@pytest.mark.parametrize("has_color", [True, False])
def test_colors(has_color):
    stream, painter = make(has_color=has_color)
    painter.show([Span("new", "a"), Span("mask", MASK_CHAR)])
    assert ("\x1b[1;32m" in stream.getvalue()) is has_color


def test_pipe_gets_one_line_per_step_and_the_final_text():
    stream, painter = make(is_terminal=False)
    painter.show([Span("mask", MASK_CHAR * 2)])
    painter.settle("a\n")
    painter.show([Span("new", "b")])
    painter.settle("b")
    painter.finish()
    assert stream.getvalue() == "   0 | ░░\n   1 | a⏎b\na\nb\n"


def test_spans_of_a_snapshot(tmp_path):
    write_tokenizer(tmp_path, "fast")
    tokenizer = Tokenizer.from_dir(tmp_path)
    first = BlockSnapshot(0, 0, "ACTIVE", (112, 97, MASK_ID, 98), (3,), (0, 0, 0, 0.9))
    second = BlockSnapshot(1, 4, "ACTIVE", (MASK_ID, MASK_ID, 99, 100), (), (0.0,) * 4)
    snapshot = DenoiseSnapshot(0, MASK_ID, 1, (97,), (first, second))
    assert snapshot_spans(snapshot, tokenizer) == [
        Span("mask", MASK_CHAR),
        Span("new", "b"),
        Span("mask", MASK_CHAR * 2),
        Span("old", "cd"),
    ]
