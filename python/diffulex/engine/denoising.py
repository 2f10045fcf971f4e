# SPDX-License-Identifier: Apache-2.0
"""The course of a denoising as a picture, for notebooks and for print."""

from __future__ import annotations

import html
from contextlib import closing
from typing import TYPE_CHECKING, Any

from diffulex.engine.terminal import Span, opening_spans, printable, snapshot_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex import Diffulex, RequestOutput
    from diffulex.engine.prompt import Prompt

__all__ = ["DenoisingPicture", "denoising"]

_COLORS = {"settled": "inherit", "mask": "#9aa0a6", "new": "#1a7f37", "old": "#0969da"}
_LINE_BREAK = "⏎"


class DenoisingPicture:
    """One row per forward, after the row of masks at the start.

    Attributes:
        output: the finished request.
        rows: per row the spans of the answer: `settled`, `new` (decided in this forward), `old` (decided
            before, may change) and `mask`.
    """

    def __init__(self, rows: Sequence[Sequence[Span]], output: RequestOutput) -> None:
        self.rows = [list(row) for row in rows]
        self.output = output

    @property
    def text(self) -> str:
        """The answer."""
        return self.output.text

    def __repr__(self) -> str:
        return f"DenoisingPicture({len(self.rows) - 1} forwards, text={self.text!r})"

    def __str__(self) -> str:
        lines = ("".join(span.text for span in row) for row in self.rows)
        return "\n".join(
            f"{number:4d} | {printable(line.replace(chr(10), _LINE_BREAK))}"
            for number, line in enumerate(lines)
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = []
        for number, row in enumerate(self.rows):
            spans = "".join(
                f'<span style="color:{_COLORS[span.style]};'
                f'font-weight:{"bold" if span.style == "new" else "normal"}">'
                f"{html.escape(printable(span.text.replace(chr(10), _LINE_BREAK)))}</span>"
                for span in row
            )
            rows.append(f"{number:4d} | {spans}")
        return f'<pre style="line-height:1.4">{chr(10).join(rows)}</pre>'


def denoising(
    engine: Diffulex, prompt: Prompt, *, use_chat_template: bool = True, **sampling: Any
) -> DenoisingPicture:
    """Decodes one prompt and keeps what every forward did.

    Args:
        engine: with a tokenizer.
        prompt: a text, token ids or chat messages.
        use_chat_template: treat a text as a user message, where the model has a template.
        sampling: fields of SamplingParams.

    Raises:
        PromptError: the prompt cannot be served.
    """
    tokenizer = engine.tokenizer
    has_template = use_chat_template and tokenizer.has_chat_template
    rows: list[list[Span]] = []
    output: RequestOutput | None = None
    settled: tuple[int, ...] = ()
    stream = engine.stream(prompt, None, "denoise", use_chat_template=has_template, **sampling)
    with closing(stream):
        for event in stream:
            output = event.output or output
            if event.snapshot is None:
                continue
            if not rows:
                decoding = engine.config.decoding
                # A canvas starts where the prompt ends, blocks at multiples of their size.
                offset = 0 if decoding.traits.has_canvas else event.snapshot.prompt_len
                rows.append(opening_spans(offset, decoding.block_size))
            # What the last step settled is highlighted once more before it becomes plain.
            open_spans = snapshot_spans(event.snapshot, tokenizer, num_settled=len(settled))
            rows.append([Span("settled", tokenizer.decode(settled)), *open_spans])
            settled = event.snapshot.token_ids
    if output is None:
        raise RuntimeError("stream: expected a final event, got none")
    return DenoisingPicture(rows, output)
