# SPDX-License-Identifier: Apache-2.0
"""The answer of one request, from its first final token to its end.

    open_record ──> deliver (each step) ──> close ──> RequestOutput

The scheduler says which tokens became final and why a request ended; what that is as ids and text is
decided here, without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from diffulex.engine.answer_text import AnswerText
from diffulex.engine.metrics import RequestRecord
from diffulex.engine.output import DenoiseSnapshot, RequestOutput, StepOutput
from diffulex.log import get_logger

if TYPE_CHECKING:
    from diffulex.checkpoint.detokenizer import Decode
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.distributed.executor import TokenLogprob

__all__ = ["RequestEnd", "close", "deliver", "open_record"]

logger = get_logger(__name__)

#: Log-probabilities of so many tokens of the answer: (begin, count) -> records.
LogprobsOf: TypeAlias = "Callable[[int, int], tuple[TokenLogprob, ...]]"


def _no_logprobs(begin: int, count: int) -> tuple[TokenLogprob, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended.

    Attributes:
        token_ids: the answer without its end token.
        reason: one of wire.finish_reasons.
        generated_ids: every position of its blocks, also after the end; mask ids where open.
        error: what went wrong, for the reason `error`.
    """

    token_ids: tuple[int, ...]
    reason: str
    generated_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    is_auto_max_nfe: bool = False
    error: str | None = None


def open_record(
    req_id: int,
    token_ids: tuple[int, ...],
    params: SamplingParams,
    decode: Decode | None,
    special_stops: Mapping[int, str],
    *,
    has_text: bool,
    added_at: float,
) -> RequestRecord:
    """The record of a new request.

    Args:
        token_ids: its prompt.
        params: what it was asked for.
        decode: text of ids; None without a tokenizer.
        special_stops: stop texts that are stop ids of the request as well, by id.
        has_text: step outputs carry text; they do for requests with stop texts in any case.
        added_at: reading of time.perf_counter.
    """
    record = RequestRecord(req_id, token_ids, params.max_tokens, added_at)
    record.stop_token_ids = frozenset(params.stop_token_ids)
    record.special_stops = special_stops
    record.decode = decode
    if params.stop or has_text:
        record.answer = AnswerText(
            decode,
            params.stop,
            params.include_stop_str_in_output,
            params.min_tokens,
            has_spans=params.logprobs is not None,
        )
    return record


def deliver(
    record: RequestRecord,
    appended: Sequence[int],
    new_tokens: int,
    snapshot: DenoiseSnapshot | None = None,
    logprobs_of: LogprobsOf = _no_logprobs,
) -> StepOutput:
    """The output of a step that made the tokens final.

    If `record.is_over` afterwards, a stop text or a text that cannot be made ended the answer: the
    request is to be closed, and its further tokens do not count.
    """
    token_ids, text = tuple(appended), None
    if record.answer is not None:
        try:
            token_ids, text = record.answer.push(token_ids)
        except Exception as error:  # such as a tokenizer that fails on its ids
            record.error = _described(record, error)
            token_ids, text = (), ""
    logprobs = logprobs_of(record.num_delivered, len(token_ids))
    record.num_delivered += len(token_ids)
    return StepOutput(
        record.req_id, token_ids, new_tokens, snapshot=snapshot, text=text, logprobs=logprobs
    )


def close(
    record: RequestRecord,
    step: StepOutput,
    end: RequestEnd,
    logprobs_of: LogprobsOf = _no_logprobs,
) -> StepOutput:
    """The last output of a request: that of its last step, with the result.

    Args:
        step: what `deliver` made of the step; an empty one for a request that took no part.
    """
    if record.error is None:
        try:
            step, end, matched, texts = _ended(record, step, end)
        except Exception as error:  # such as a tokenizer that fails on its ids
            record.error = _described(record, error)
        else:
            return _closed(record, step, end, matched, texts, logprobs_of)
    failed = dataclasses.replace(end, token_ids=(), reason="error", error=record.error)
    output = _output(record, failed, "", "")
    return dataclasses.replace(step, token_ids=(), is_finished=True, output=output, logprobs=())


def _ended(
    record: RequestRecord, step: StepOutput, end: RequestEnd
) -> tuple[StepOutput, RequestEnd, str | int | None, tuple[str, str]]:
    """The step and the end with the last text; the stop that matched; answer and prompt with answer
    as texts. Everything that the tokenizer is asked for."""
    answer, text, matched = record.answer, step.text, _matched_stop(record, end)
    if answer is not None:
        if isinstance(matched, str) and answer.is_including and answer.matched_stop is None:
            answer.append(end.generated_ids[len(end.token_ids)], matched)
        rest = answer.finish()
        step = dataclasses.replace(step, token_ids=step.token_ids + rest.token_ids)
        end = dataclasses.replace(end, token_ids=tuple(answer.token_ids))
        text = (text or "") + rest.text
        matched = answer.matched_stop or matched
    if isinstance(matched, str):
        end = dataclasses.replace(end, reason="stop")
    shown = _decoded(record, end.token_ids) if answer is None else answer.text
    whole = _decoded(record, record.prompt_token_ids + end.token_ids)
    return dataclasses.replace(step, text=text), end, matched, (shown, whole)


def _closed(
    record: RequestRecord,
    step: StepOutput,
    end: RequestEnd,
    matched: str | int | None,
    texts: tuple[str, str],
    logprobs_of: LogprobsOf,
) -> StepOutput:
    count = len(end.token_ids)
    logprobs = logprobs_of(0, count)
    output = dataclasses.replace(
        _output(record, end, *texts), matched_stop=matched, logprobs=logprobs or None
    )
    return dataclasses.replace(
        step, is_finished=True, output=output, logprobs=logprobs[count - len(step.token_ids) :]
    )


def _output(record: RequestRecord, end: RequestEnd, text: str, full_text: str) -> RequestOutput:
    trajectory = None
    if record.trace is not None:
        trajectory = record.trace.finish(end.generated_ids, end.token_ids)
    return RequestOutput(
        req_id=record.req_id,
        prompt_token_ids=record.prompt_token_ids,
        token_ids=end.token_ids,
        text=text,
        full_text=full_text,
        completion_reason=end.reason,
        metrics=record.metrics(len(end.token_ids), end.num_cached_tokens, end.num_preemptions),
        is_auto_max_nfe=end.is_auto_max_nfe,
        error=end.error,
        generated_ids=end.generated_ids,
        trajectory=trajectory,
    )


def _matched_stop(record: RequestRecord, end: RequestEnd) -> str | int | None:
    """The request's own stop that ended it; None for one of the model alone."""
    count = len(end.token_ids)
    if end.reason != "eos_token_generated" or len(end.generated_ids) <= count:
        return None
    stop_id = end.generated_ids[count]
    if stop_id in record.special_stops:
        return record.special_stops[stop_id]
    return stop_id if stop_id in record.stop_token_ids else None


def _decoded(record: RequestRecord, token_ids: Sequence[int]) -> str:
    return "" if record.decode is None else record.decode(token_ids)


def _described(record: RequestRecord, error: Exception) -> str:
    logger.exception("request %d: its text cannot be made", record.req_id)
    return f"{type(error).__name__}: {error}"
