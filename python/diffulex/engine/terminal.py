# SPDX-License-Identifier: Apache-2.0
"""Shows denoising in a terminal: settled text is printed once, open blocks are redrawn in place."""

from __future__ import annotations

import itertools
import unicodedata
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.engine.output import DenoiseSnapshot

MASK_CHAR = "░"
#: Stands for a line break where a frame must stay one line.
_LINE_BREAK = "⏎"
_STYLES = {"settled": "", "mask": "\x1b[2m", "new": "\x1b[1;32m", "old": "\x1b[36m"}
_RESET = "\x1b[0m"


class Span(NamedTuple):
    """Text of one style: ``mask``, ``new`` (decided in the last step) or ``old``."""

    style: str
    text: str


def snapshot_spans(
    snapshot: DenoiseSnapshot,
    tokenizer: Tokenizer,
    *,
    num_settled: int | None = None,
    is_before: bool = False,
) -> list[Span]:
    """Text after the settled answer, in order, one mask character per undecided position.

    Args:
        snapshot: the blocks after a step.
        tokenizer: of the model.
        num_settled: leading answer tokens to leave out; None: those the snapshot has settled.
        is_before: the state the step started from, with a mask wherever it wrote.
    """
    if num_settled is None:
        num_settled = len(snapshot.token_ids)
    settled_end = snapshot.prompt_len + num_settled
    styled: list[tuple[str, int]] = []
    for block in snapshot.blocks:
        new = set(block.newly_written)
        for offset, token_id in enumerate(block.token_ids):
            if block.start + offset < settled_end:
                continue
            if token_id == snapshot.mask_token_id or (is_before and offset in new):
                styled.append(("mask", token_id))
            else:
                styled.append(("new" if offset in new else "old", token_id))
    spans = []
    for style, run in itertools.groupby(styled, key=lambda item: item[0]):
        ids = [token_id for _, token_id in run]
        text = MASK_CHAR * len(ids) if style == "mask" else tokenizer.decode(ids)
        spans.append(Span(style, text))
    return spans


def opening_spans(prompt_len: int, block_size: int) -> list[Span]:
    """The block that the first forward decides: masks from the end of the prompt to its own."""
    return [Span("mask", MASK_CHAR * (block_size - prompt_len % block_size))]


def char_width(char: str) -> int:
    """Columns a character takes."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def printable(text: str) -> str:
    """Without characters that move the cursor or drive the terminal in another way."""
    text = text.replace("\t", "    ")
    return "".join(
        "·" if char != "\n" and unicodedata.category(char).startswith("C") else char
        for char in text
    )


class DenoisePainter:
    """Writes settled text and redraws what follows it.

    On a terminal the open text is erased and written again at every step. Elsewhere each forward
    is one line, after line 0 with the masks at the start, so that a file or a pipe holds the whole
    course.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        is_terminal: bool,
        columns: int = 80,
        rows: int = 24,
        has_color: bool = True,
    ) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._columns = max(columns, 1)
        self._max_rows = max(rows - 1, 1)
        self._has_color = has_color and is_terminal
        self._column = 0
        self._open_rows = 0
        self._has_open = False
        self._num_frames = 0
        self._settled = ""
        self._tail = ""

    def settle(self, text: str) -> None:
        """Appends text that will not change."""
        self._settled += text
        if not self._is_terminal or not text:
            return
        self._erase_open()
        text = self._tail + printable(text)
        self._tail = ""
        # After the last column the cursor is in limbo and cannot be brought back there, so the
        # character that fills the line is redrawn with the open text.
        while text and self._advance(text, self._column)[1] == self._columns:
            self._tail = text[-1] + self._tail
            text = text[:-1]
        self._stream.write(text)
        _, self._column = self._advance(text, self._column)
        self._stream.flush()

    def show(self, spans: Sequence[Span]) -> None:
        """Replaces the open text."""
        if not self._is_terminal:
            text = self._settled + "".join(span.text for span in spans)
            self._stream.write(f"{self._num_frames:4d} | {text.replace(chr(10), _LINE_BREAK)}\n")
            self._stream.flush()
            self._num_frames += 1
            return
        self._erase_open()
        column = self._column
        for span in self._clipped([Span("settled", self._tail), *spans]):
            rows, column = self._advance(span.text, column)
            self._open_rows += rows
            self._stream.write(self._styled(span))
        self._has_open = True
        self._stream.flush()

    def finish(self) -> None:
        """Removes the open text and ends the line."""
        if self._is_terminal:
            self._erase_open()
            self._stream.write(self._tail + ("\n" if self._tail or self._column else ""))
        else:
            self._stream.write(self._settled + "\n")
        self._stream.flush()

    def interrupt(self) -> None:
        """Leaves what is on the screen and ends the line."""
        self._stream.write("\n" if self._is_terminal else self._settled + "\n")
        self._has_open = False
        self._stream.flush()

    def _styled(self, span: Span) -> str:
        return _STYLES[span.style] + span.text + _RESET if self._has_color else span.text

    def _advance(self, text: str, column: int) -> tuple[int, int]:
        """(rows moved down, column after) when `text` is written from `column`."""
        rows = 0
        for char in text:
            if char == "\n":
                rows, column = rows + 1, 0
                continue
            width = char_width(char)
            if column + width > self._columns:
                rows, column = rows + 1, 0
            column += width
        return rows, column

    def _clipped(self, spans: Sequence[Span]) -> list[Span]:
        """As much as fits on the screen: rows that scrolled away cannot be erased."""
        result: list[Span] = []
        rows, column = 0, self._column
        for span in spans:
            kept = ""
            for char in printable(span.text):
                moved, column = self._advance(char, column)
                rows += moved
                if rows >= self._max_rows:
                    return [*result, Span(span.style, kept)]
                kept += char
            result.append(Span(span.style, kept))
        return result

    def _erase_open(self) -> None:
        if not self._has_open:
            return
        up = f"\x1b[{self._open_rows}A" if self._open_rows else ""
        right = f"\x1b[{self._column}C" if self._column else ""
        self._stream.write(f"{up}\r{right}\x1b[J")
        self._open_rows = 0
        self._has_open = False
