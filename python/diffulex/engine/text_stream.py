# SPDX-License-Identifier: Apache-2.0
"""Text of one request as it becomes final."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.engine.output import StreamEvent

if TYPE_CHECKING:
    from diffulex.checkpoint.detokenizer import IncrementalDecoder
    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.engine.output import StepOutput

__all__ = ["TextStream"]


class TextStream:
    """Turns the step outputs of one request, in order, into stream events.

    Without a tokenizer the events have no text. Where the engine searches for stop texts, it has
    made the text already.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._decoder: IncrementalDecoder | None = None
        if tokenizer is not None:
            skip = params.skip_special_tokens is not False
            self._decoder = tokenizer.incremental_decoder(skip)

    def event(self, step: StepOutput) -> StreamEvent:
        """The stream item of a step; the last one flushes."""
        text = step.text or ""
        if self._decoder is not None and step.text is None:
            text = self._decoder.push(step.token_ids) if step.token_ids else ""
            if step.is_finished:
                text += self._decoder.flush()
        return StreamEvent(
            step.req_id, text, step.token_ids, step.snapshot, step.output, step.logprobs
        )
