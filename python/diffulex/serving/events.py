# SPDX-License-Identifier: Apache-2.0
"""What clients are told of a request: wire events, made from the engine's step outputs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.checkpoint.detokenizer import robust_decode
from diffulex.serving.job_tick import JobState
from diffulex.trace.files import trace_record
from diffulex.wire.finish_reasons import openai_finish_reason
from diffulex.wire.protocol import (
    JobEvent,
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingGenerate,
    ServingReply,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diffulex.distributed.executor import TokenLogprob
    from diffulex.engine.metrics import RequestRecord
    from diffulex.engine.output import DenoiseSnapshot, RequestOutput, StepOutput

__all__ = ["EventMaker", "ServingRequestState"]

# Reasons that deliver no answer. The tick forgets what it aborts, so an end of a request that it
# still knows came from elsewhere.
_NO_ANSWER = {"aborted": "aborted", "rejected": "kv_capacity", "error": "engine_error"}


@dataclass
class ServingRequestState(JobState):
    """A request, and what its client has been told.

    Attributes:
        record: the engine's account of the request.
        max_tokens: those of the request, as far as the model's length allows.
        num_sent: answer tokens in deltas.
        num_reported: tokens reported as committed by snapshots.
        last_draft: place and tokens of the last snapshot.
        confidences: of drafts, by position.
    """

    command: ServingGenerate
    record: RequestRecord
    max_tokens: int
    num_sent: int = 0
    num_reported: int = 0
    first_token_at: float | None = None
    last_draft: tuple[int, list[int]] | None = None
    confidences: dict[int, float] = field(default_factory=dict)


class EventMaker:
    """Turns step outputs into events.

    Args:
        tokenizer: None: there are no texts.
        mask_token_id: None for a canvas, which has no masks.
    """

    def __init__(self, tokenizer: Any, mask_token_id: int | None) -> None:
        self._mask_token_id, self._tokenizer = mask_token_id, tokenizer
        self._decoders = {}
        if tokenizer is not None:
            self._decoders = {skip: robust_decode(tokenizer, skip) for skip in (False, True)}
        #: Snapshots carry text.
        self.has_draft_text = True

    def events(self, state: ServingRequestState, step: StepOutput) -> list[JobEvent]:
        """Everything there is to say about a step, in order."""
        output, command = step.output, state.command
        failure = None if output is None else _failure(state, output)
        if failure is not None:
            return [failure]
        if state.first_token_at is None and state.record.token_ids:
            state.first_token_at = time.perf_counter()
        made: list[JobEvent | None] = []
        if command.stream and command.stream_mode != "denoise":
            made.append(self._delta(state, step))
        if command.stream and command.stream_mode != "block_append":
            made.append(self._snapshot(state, step))
        if output is not None:
            made.append(self._reply(state, output, step.snapshot))
        return [event for event in made if event is not None]

    def _delta(self, state: ServingRequestState, step: StepOutput) -> ServingDelta | None:
        """What became final; None if nothing did."""
        text = step.text or ""
        if not step.token_ids and not text:
            return None
        offset = state.num_sent
        state.num_sent += len(step.token_ids)
        return ServingDelta(
            rid=state.rid,
            token_offset=offset,
            text=text,
            token_ids=list(step.token_ids),
            nfe=state.record.num_steps,
            finished=step.is_finished,
            logprobs=self._logprobs(state, step.logprobs, offset),
            **_decode_numbers(state.record),
        )

    def _snapshot(
        self, state: ServingRequestState, step: StepOutput
    ) -> ServingBufferSnapshot | None:
        """The draft after what was reported as committed; None if it says nothing new."""
        record, begin, output = state.record, state.num_reported, step.output
        if output is not None:
            committed = len(output.token_ids)
            draft = list(output.token_ids[begin:])
        else:
            # A stop text may still cut what is final but not delivered.
            has_stops = bool(state.command.sampling_params.stop)
            committed = record.num_delivered if has_stops else len(record.token_ids)
            draft = _draft_ids(record, step.snapshot, begin)
            draft = draft[: max(0, state.max_tokens - begin)]
        if state.last_draft == (begin, draft) or not (draft or (output and state.last_draft)):
            return None
        state.last_draft = (begin, draft)
        state.num_reported = max(begin, committed)
        start = len(record.prompt_token_ids) + begin
        blocks, confidences = None, None
        if state.command.denoise_detail:
            blocks = list(self._blocks(step.snapshot, start, start + len(draft)))
            confidences = _confidences(state.confidences, step.snapshot, start, len(draft))
        return ServingBufferSnapshot(
            rid=state.rid,
            token_offset=begin,
            absolute_start=start,
            absolute_end=start + len(draft),
            text=self._decode(draft, False) if self.has_draft_text else None,
            token_ids=draft,
            nfe=record.num_steps,
            finished=step.is_finished,
            committed=committed,
            mask_token_id=self._mask_token_id,
            blocks=blocks,
            confidences=confidences,
            **_decode_numbers(record),
        )

    def _reply(
        self, state: ServingRequestState, output: RequestOutput, snapshot: DenoiseSnapshot | None
    ) -> ServingReply:
        """The whole answer."""
        record, metrics, params = state.record, output.metrics, state.command.sampling_params
        generated: Sequence[int] = output.generated_ids
        if record.is_cut:
            generated = _draft_ids(record, snapshot, 0)
        full = [token for token in generated if token != self._mask_token_id]
        # Tokens after a stop text are discarded; those after an end token stay in the full answer.
        full = full if len(full) >= len(output.token_ids) else list(output.token_ids)
        detail = "stop" if output.matched_stop is not None else output.completion_reason
        now = time.perf_counter()
        return ServingReply(
            rid=state.rid,
            text=output.text,
            token_ids=list(output.token_ids),
            nfe=metrics.nfe,
            finish_reason=detail,
            full_text=self._decode(full, bool(params.skip_special_tokens)),
            full_token_ids=full,
            **_decode_numbers(record),
            finish_detail=detail,
            matched_stop=output.matched_stop,
            prompt_tokens=metrics.prompt_tokens,
            cached_tokens=metrics.cached_tokens,
            prefill_steps=metrics.prefill_steps,
            decode_steps=metrics.decode_steps,
            prefill_output_tokens=record.prefill_tokens,
            prefill_time_s=record.prefill_s,
            queue_time_s=metrics.queue_s,
            ttft_s=None if state.first_token_at is None else state.first_token_at - state.added_at,
            e2e_time_s=now - state.added_at,
            num_masked=self._num_open(generated[: state.max_tokens], detail),
            num_preemptions=metrics.num_preemptions,
            seed=params.seed,
            logprobs=self._logprobs(state, output.logprobs or (), 0),
            trajectory=None if output.trajectory is None else trace_record(output, self._tokenizer),
        )

    def _num_open(self, generated: Sequence[int], detail: str) -> int:
        """Undecided positions of an answer that was cut off; after a stop nothing is missing."""
        if openai_finish_reason(detail) == "stop":
            return 0
        return sum(token == self._mask_token_id for token in generated)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str | None:
        decode = self._decoders.get(skip_special_tokens)
        return None if decode is None else decode(token_ids)

    def _blocks(
        self, snapshot: DenoiseSnapshot | None, start: int, end: int
    ) -> Iterator[dict[str, Any]]:
        """Maps of the wire for the open blocks, as far as they are within the positions."""
        for block in () if snapshot is None else snapshot.blocks:
            first = max(block.start, start)
            last = min(block.start + len(block.token_ids), end)
            if first >= last:
                continue
            part = block.token_ids[first - block.start : last - block.start]
            masked = 0 if self._mask_token_id is None else part.count(self._mask_token_id)
            state = block.status.lower()
            yield {
                "id": block.block_id,
                "start": first,
                "end": last,
                "state": state,
                "masked": masked,
            }

    def _logprobs(
        self, state: ServingRequestState, records: Sequence[TokenLogprob], begin: int
    ) -> list[dict[str, Any]] | None:
        """Maps of the wire for the tokens from index `begin` on; None if they were not asked for."""
        if state.command.sampling_params.logprobs is None:
            return None
        listed = []
        for index, item in enumerate(records, begin):
            shown = self._token(item.token_id, item.logprob)
            shown["step"], shown["confidence"] = item.step, item.confidence
            shown["top"] = [self._token(*pair) for pair in item.top]
            # Special tokens may be left out of the text, and a character may have several tokens.
            answer = state.record.answer
            span = None if answer is None else answer.span(index)
            if span is not None:
                shown["text_offset"], shown["bytes"] = span[0], list(span[1].encode())
            listed.append(shown)
        return listed

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._decode([token_id], False) or ""
        return {
            "token_id": token_id,
            "token": text,
            "bytes": list(text.encode()),
            "logprob": logprob,
        }


def _failure(state: ServingRequestState, output: RequestOutput) -> ServingError | None:
    """The error of a request that has no answer; None for all others."""
    reason = output.completion_reason
    name, _, code = reason.partition(":")
    if name not in _NO_ANSWER:
        return None
    message = output.error or f"request {state.rid}: ended with {reason}"
    return ServingError(state.rid, message, code or _NO_ANSWER[name], 500)


def _decode_numbers(record: RequestRecord) -> dict[str, Any]:
    tokens, seconds = record.decode_tokens, record.decode_s
    return {
        "engine_decode_time_s": seconds,
        "engine_decode_tokens": tokens,
        "engine_decode_tps": tokens / seconds if tokens and seconds > 0 else None,
    }


def _draft_ids(record: RequestRecord, snapshot: DenoiseSnapshot | None, begin: int) -> list[int]:
    """Tokens and masks from `begin` to the end of the last open block."""
    draft = record.token_ids[begin:]
    end = len(record.prompt_token_ids) + begin + len(draft)
    for block in () if snapshot is None else snapshot.blocks:
        # Blocks follow each other; a part of the first may be settled or prompt.
        skipped = max(0, end - block.start)
        draft.extend(block.token_ids[skipped:])
        end = max(end, block.start + len(block.token_ids))
    return draft


def _confidences(
    known: dict[int, float], snapshot: DenoiseSnapshot | None, start: int, count: int
) -> list[float]:
    """By position; what left the buffer keeps the confidence it had there. 0 at masks."""
    for block in () if snapshot is None else snapshot.blocks:
        known.update(enumerate(map(float, block.confidences), block.start))
    listed = [known.get(position, 0.0) for position in range(start, start + count)]
    for position in [position for position in known if position < start]:
        del known[position]
    return listed
