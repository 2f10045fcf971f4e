# SPDX-License-Identifier: Apache-2.0
"""Requests of several replicas: admitted here, decoded there, and again where a replica was lost."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.checkpoint.detokenizer import robust_decode
from diffulex.config.sampling_params import SamplingParams, greedy_if_tiny
from diffulex.distributed.seeds import derive_request_seed
from diffulex.engine.answer_text import special_stops
from diffulex.engine.answers import RequestEnd, close
from diffulex.engine.metrics import RequestRecord
from diffulex.engine.output import StepOutput
from diffulex.errors import OutOfPagesError, SamplingParamsError
from diffulex.registry import AutoReq, AutoScheduler
from diffulex_ext import _core

if TYPE_CHECKING:
    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.config import Config
    from diffulex.distributed.router import Ticket
    from diffulex.engine.routing import StepQueue

__all__ = ["Admission", "ReplicaRequest", "plain_params"]


def plain_params(params: SamplingParams) -> SamplingParams:
    """The parameters without what a class of the program adds, which does not exist in a replica."""
    if type(params) is SamplingParams:
        return params
    names = (field.name for field in dataclasses.fields(SamplingParams))
    return SamplingParams(**{name: getattr(params, name) for name in names})


#: Requests that were lost with so many replicas are started again once more at most: any of them may be
#: what ends the processes.
_MAX_LOSSES = 2


class Admission:
    """Decides what is accepted, as the scheduler of one engine would, and gives ids and seeds.

    It is that scheduler, of which nothing is ever scheduled.

    Args:
        config: with the pages of the smallest replica.
        tokenizer: of the prompts.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        strategy = config.decoding.decoding_strategy
        self._scheduler: _core.Scheduler = AutoScheduler.create(strategy, config)

    def admit(self, token_ids: tuple[int, ...], params: SamplingParams) -> int:
        """The id of a new request; one caller at a time.

        Raises:
            OutOfPagesError: the pool of no replica could hold it.
            ValueError: a parameter does not suit the strategy.
        """
        scheduler, config = self._scheduler, self._config
        checked, _ = special_stops(self._tokenizer, params)
        request = AutoReq.create(config.decoding.decoding_strategy, token_ids, checked, config)
        try:
            req_id = scheduler.add_request(request)
        except _core.OutOfPagesError as error:
            raise OutOfPagesError(f"{error}; lower max_tokens or raise num_pages") from error
        except (IndexError, NotImplementedError, ValueError) as error:
            raise SamplingParamsError(str(error)) from error
        scheduler.release_all()
        scheduler.take_result(req_id)
        return req_id

    def seeded(self, req_id: int, params: SamplingParams) -> SamplingParams:
        """The parameters with the seed that one engine would derive from the id."""
        temperature = params.with_defaults(self._config.sampler).temperature
        if params.seed not in (None, -1) or not greedy_if_tiny(temperature):
            return params
        seed = derive_request_seed(self._config.sampler.seed, req_id)
        return dataclasses.replace(params, seed=seed)

    def record(
        self, req_id: int, token_ids: tuple[int, ...], params: SamplingParams
    ) -> RequestRecord:
        """The record of a request that is added now."""
        decode = robust_decode(self._tokenizer, params.skip_special_tokens is not False)
        return RequestRecord(
            req_id, token_ids, params.max_tokens, time.perf_counter(), decode=decode
        )


@dataclass(eq=False, slots=True)
class ReplicaRequest:
    """A request that has not ended.

    Attributes:
        options: whether its step outputs carry snapshots and text.
        chunks: of its prompt, for the router.
        queue: of its owner; None: the callers of `step`.
        ticket: of the router; None: no replica has it.
        has_begun: its replica has sent an output.
        num_losses: replicas that were lost with it.
        shown: tokens and characters that its owner has got from a replica that is lost.
    """

    token_ids: tuple[int, ...]
    params: SamplingParams
    options: dict[str, bool]
    chunks: list[int]
    queue: StepQueue | None
    record: RequestRecord
    ticket: Ticket | None = None
    has_begun: bool = False
    is_aborted: bool = False
    num_losses: int = 0
    num_chars: int = 0
    shown: _Shown | None = None

    @property
    def req_id(self) -> int:
        """Its id."""
        return self.record.req_id

    @property
    def can_begin_again(self) -> bool:
        """Whether another replica is to decode it when its own is lost."""
        return not self.is_aborted and self.num_losses < _MAX_LOSSES

    def end_of_loss(self, how: str) -> StepOutput | None:
        """Its last output, if the loss of its replica is its end."""
        if self.can_begin_again:
            return None
        if self.is_aborted:
            return self.aborted()
        return self.failed(
            f"request {self.req_id}: lost with {self.num_losses + 1} replicas, the last one: {how}"
        )

    def begin_again(self) -> None:
        """Its replica is gone: nothing of it is known any more but what its owner has seen."""
        self.num_losses += 1
        record, shown = self.record, self.shown
        if shown is not None and len(record.token_ids) < len(shown.token_ids):
            shown.rewind()
        elif record.token_ids and (self.queue is None or self.queue.is_shown):
            self.shown = _Shown([*record.token_ids], self.num_chars)
        fresh = RequestRecord(
            *(record.req_id, record.prompt_token_ids, record.max_tokens, record.added_at),
            decode=record.decode,
        )
        for item in dataclasses.fields(RequestRecord):
            setattr(record, item.name, getattr(fresh, item.name))
        self.ticket, self.has_begun, self.num_chars = None, False, 0

    def book(self, step: StepOutput, seconds: float, is_decode: bool) -> StepOutput:
        """Counts a step; what of it is new to the owner."""
        record = self.record
        record.status = "DECODING" if is_decode else "PREFILLING"
        record.add_step(seconds, is_decode, step.new_tokens, step.token_ids)
        self.num_chars += len(step.text or "")
        if step.output is not None:  # the replica knows nothing of the time before it was sent
            metrics = dataclasses.replace(step.output.metrics, queue_s=record.queue_s or 0.0)
            step = dataclasses.replace(
                step, output=dataclasses.replace(step.output, metrics=metrics)
            )
        if self.shown is None:
            return step
        rest = self.shown.rest_of(step)
        if rest is None:
            if self.is_aborted:  # before it had come as far again
                return self.aborted()
            return self.failed(
                f"request {self.req_id}: expected the {len(self.shown.token_ids)} tokens that a lost"
                " replica had delivered, got others"
            )
        return rest

    def aborted(self) -> StepOutput:
        """The last output, with what its owner has seen, or what was decided here."""
        record, shown = self.record, self.shown
        token_ids = record.token_ids
        if shown is not None and len(token_ids) < len(shown.token_ids):
            token_ids = shown.token_ids
        end = RequestEnd(tuple(token_ids), "aborted", tuple(token_ids))
        return close(record, StepOutput(self.req_id), end)

    def failed(self, text: str) -> StepOutput:
        """The last output, with an error."""
        self.record.error = text
        return close(self.record, StepOutput(self.req_id), RequestEnd((), "error", ()))


@dataclass(slots=True)
class _Shown:
    """What the owner of a request has seen; decoded again, it must be the same."""

    token_ids: list[int]
    num_chars: int
    _num_tokens: int = 0
    _num_hidden: int = 0

    def rewind(self) -> None:
        """It is decoded once more."""
        self._num_tokens = self._num_hidden = 0

    def rest_of(self, step: StepOutput) -> StepOutput | None:
        """The part of a step that is new; None: what was seen is not what is decoded now."""
        first = self._num_tokens
        count = min(len(step.token_ids), len(self.token_ids) - first)
        if [*step.token_ids[:count]] != self.token_ids[first : first + count]:
            return None
        self._num_tokens += count
        if step.is_finished and self._num_tokens < len(self.token_ids):
            return None
        changes: dict[str, Any] = {"token_ids": step.token_ids[count:]}
        changes["logprobs"] = step.logprobs[count:]
        if step.text is not None:
            hidden = min(len(step.text), self.num_chars - self._num_hidden)
            self._num_hidden += hidden
            changes["text"] = step.text[hidden:]
        return dataclasses.replace(step, **changes)
