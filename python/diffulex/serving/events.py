# SPDX-License-Identifier: Apache-2.0
"""What the serving mixin reads from a request after a step, and the events it makes of it.

A request is duck-typed. Some attributes are optional: the real engine offers `stable_ids(begin)` and
`draft_ids(begin)` instead of a copy of all tokens.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from diffulex.engine.answer_text import Piece
from diffulex.wire.finish_reasons import openai_finish_reason
from diffulex.wire.protocol import (
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingReply,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.checkpoint.detokenizer import Decode
    from diffulex.serving.state import ServingRequestState

__all__ = [
    "delta_event",
    "failure_event",
    "fresh_ids",
    "num_stable",
    "reply_event",
    "snapshot_event",
]

# Reasons that deliver no answer. The mixin forgets what it aborts, so an end of a request that it
# still knows came from elsewhere.
_NO_ANSWER = {"aborted": "aborted", "rejected": "kv_capacity", "error": "engine_error"}


def _prompt_len(state: ServingRequestState, request: Any) -> int:
    name = "prefix_len" if getattr(request, "is_multi_block", False) else "num_prompt_tokens"
    length: int | None = getattr(request, name, None)
    return state.prompt_tokens if length is None else length


def _before_mask(token_ids: Sequence[int], mask_token_id: int | None) -> list[int]:
    listed = list(token_ids)
    if mask_token_id is not None and mask_token_id in listed:
        return listed[: listed.index(mask_token_id)]
    return listed


def _stable_end(request: Any) -> int:
    end: int | None = getattr(request, "stable_end", None)
    return int(request.dllm_block_buffer.first_running_block.start) if end is None else end


def _visible_end(request: Any) -> int:
    end: int | None = getattr(request, "visible_end", None)
    return int(request.dllm_block_buffer.last_running_block.end) if end is None else end


def num_stable(state: ServingRequestState, request: Any) -> int:
    """Generated tokens that can never change."""
    if hasattr(request, "num_stable"):
        return int(request.num_stable)
    return max(0, _stable_end(request) - _prompt_len(state, request))


def fresh_ids(state: ServingRequestState, request: Any, is_finished: bool) -> list[int]:
    """Final tokens that the state has not seen, without mask ids; counts them as seen."""
    mask_token_id = getattr(request, "mask_token_id", None)
    if is_finished:
        # As positions that max_nfe left open end the answer, so does the first mask here.
        final = _before_mask(request.truncated_response, mask_token_id)[: state.max_tokens]
        fresh = final[state.num_seen :]
    elif hasattr(request, "stable_ids"):
        fresh = list(request.stable_ids(state.num_seen))
    else:
        begin = _prompt_len(state, request)
        stable = request.token_ids[begin + state.num_seen : _stable_end(request)]
        fresh = _before_mask(stable, mask_token_id)
        limit = state.max_tokens
        fresh = fresh if limit is None else fresh[: max(0, limit - state.num_seen)]
    state.num_seen += len(fresh)
    return fresh


def failure_event(state: ServingRequestState, request: Any) -> ServingError | None:
    """The error of a finished request that has no answer; None for all others."""
    reason = str(getattr(request, "completion_reason", None) or "")
    name, _, code = reason.partition(":")
    if name not in _NO_ANSWER:
        return None
    message = getattr(request, "error", None) or f"request {state.rid}: ended with {reason}"
    return ServingError(state.rid, message, code or _NO_ANSWER[name], 500)


def _decode_numbers(state: ServingRequestState) -> dict[str, Any]:
    return {
        "engine_decode_time_s": state.engine_decode_time_s,
        "engine_decode_tokens": state.engine_decode_tokens,
        "engine_decode_tps": state.engine_decode_tps,
    }


def _logprobs(
    state: ServingRequestState, request: Any, begin: int, count: int
) -> list[dict[str, Any]] | None:
    if state.params is None or state.params.logprobs is None:
        return None
    records = list(request.logprobs(begin, count))
    for index, record in enumerate(records, begin):
        # Special tokens may be left out of the text, and a character may have several tokens.
        span = state.answer.span(index)
        if span is not None:
            record["text_offset"], record["bytes"] = span[0], list(span[1].encode())
    return records


def delta_event(
    state: ServingRequestState, request: Any, piece: Piece, is_last: bool
) -> ServingDelta | None:
    """What became final; None if nothing did."""
    if not piece.token_ids and not piece.text:
        return None
    offset = state.emitted_token_count
    state.emitted_token_count += len(piece.token_ids)
    state.emitted_text_len += len(piece.text)
    return ServingDelta(
        rid=state.rid,
        token_offset=offset,
        text=piece.text,
        token_ids=list(piece.token_ids),
        nfe=int(request.nfe),
        finished=is_last,
        logprobs=_logprobs(state, request, offset, len(piece.token_ids)),
        **_decode_numbers(state),
    )


def snapshot_event(
    state: ServingRequestState, request: Any, decode: Decode | None, is_last: bool
) -> ServingBufferSnapshot | None:
    """The draft after what was reported as committed; None if it says nothing new."""
    begin = state.num_reported
    if is_last:
        committed = len(state.answer.token_ids)
        draft = state.answer.token_ids[begin:]
    else:
        # A stop text may still cut what is stable but not released.
        committed = state.num_seen if not state.answer.has_stops else state.answer.num_released
        draft = _draft_ids(state, request, begin)
    if state.last_draft == (begin, draft) or not (draft or (is_last and state.last_draft)):
        return None
    state.last_draft = (begin, draft)
    state.num_reported = max(begin, committed)
    start = _prompt_len(state, request) + begin
    blocks, confidences = None, None
    if state.denoise_detail:
        blocks = request.draft_blocks(start, start + len(draft))
        confidences = _confidences(state, request, start, len(draft))
    return ServingBufferSnapshot(
        rid=state.rid,
        token_offset=begin,
        absolute_start=start,
        absolute_end=start + len(draft),
        text=None if decode is None else decode(draft),
        token_ids=draft,
        nfe=int(request.nfe),
        finished=is_last,
        committed=committed,
        mask_token_id=getattr(request, "mask_token_id", None),
        blocks=blocks,
        confidences=confidences,
        **_decode_numbers(state),
    )


def _draft_ids(state: ServingRequestState, request: Any, begin: int) -> list[int]:
    limit = state.max_tokens
    if hasattr(request, "draft_ids"):
        draft = list(request.draft_ids(begin))
    else:
        prompt_len = _prompt_len(state, request)
        draft = list(request.token_ids[prompt_len + begin : _visible_end(request)])
    return draft if limit is None else draft[: max(0, limit - begin)]


def _confidences(state: ServingRequestState, request: Any, start: int, count: int) -> list[float]:
    """By position; what left the buffer keeps the confidence it had there."""
    known = state.confidences
    known.update(request.draft_confidences())
    listed = [known.get(position, 0.0) for position in range(start, start + count)]
    for position in [position for position in known if position < start]:
        del known[position]
    return listed


def reply_event(state: ServingRequestState, request: Any, decode: Decode | None) -> ServingReply:
    """The whole answer of a request that is finished or was stopped by a text."""
    answer = state.answer
    detail, matched = _reason(state, request)
    mask_token_id = getattr(request, "mask_token_id", None)
    generated = _generated(state, request)
    full = [token for token in generated if token != mask_token_id]
    # Tokens after a stop text are discarded; those after an end token stay in the full answer.
    full = full if len(full) >= len(answer.token_ids) else list(answer.token_ids)
    now = time.perf_counter()
    first_token_at = state.first_token_at
    seed = None if state.params is None else state.params.seed
    return ServingReply(
        rid=state.rid,
        text=answer.text,
        token_ids=list(answer.token_ids),
        nfe=int(request.nfe),
        finish_reason=detail,
        full_text=None if decode is None else decode(full),
        full_token_ids=full,
        **_decode_numbers(state),
        finish_detail=detail,
        matched_stop=matched,
        prompt_tokens=_prompt_len(state, request),
        cached_tokens=getattr(request, "num_cached_tokens", None),
        prefill_steps=state.prefill_steps,
        decode_steps=state.decode_steps,
        prefill_output_tokens=state.prefill_output_tokens,
        prefill_time_s=state.prefill_time_s,
        queue_time_s=(state.first_step_at or now) - state.added_at,
        ttft_s=None if first_token_at is None else first_token_at - state.added_at,
        e2e_time_s=now - state.added_at,
        num_masked=_num_open(state, generated, mask_token_id, detail),
        num_preemptions=getattr(request, "num_preemptions", None),
        seed=seed,
        logprobs=_logprobs(state, request, 0, len(answer.token_ids)),
    )


def _num_open(
    state: ServingRequestState, generated: Sequence[int], mask_token_id: int | None, detail: str
) -> int:
    """Undecided positions of an answer that was cut off; after a stop nothing is missing."""
    if openai_finish_reason(detail) == "stop":
        return 0
    return sum(token == mask_token_id for token in generated[: state.max_tokens])


def _generated(state: ServingRequestState, request: Any) -> list[int]:
    """Every generated position of a finished request, masks included."""
    full = getattr(request, "full_response", None)
    return list(state.answer.token_ids) if full is None else list(full)


def _reason(state: ServingRequestState, request: Any) -> tuple[str, str | int | None]:
    """(reason, stop text or id that matched)."""
    if state.answer.matched_stop is not None:
        return "stop", state.answer.matched_stop
    stop_id = getattr(request, "matched_stop_id", None)
    if stop_id in state.special_stops:
        return "stop", state.special_stops[stop_id]
    if stop_id is not None:
        return "stop", stop_id
    return str(getattr(request, "completion_reason", None) or "completed_without_reason"), None
