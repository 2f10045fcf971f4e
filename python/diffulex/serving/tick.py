# SPDX-License-Identifier: Apache-2.0
"""One tick of an engine that serves: commands in, one step, events out.

The mixin's engine and the requests that a step returns are duck-typed and have few attributes, so that
tests can pass a small fake. The real engine is in serving/engine.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from diffulex.checkpoint.detokenizer import robust_decode
from diffulex.engine.answer_text import AnswerText, Piece
from diffulex.engine.stop_tokens import special_stops
from diffulex.errors import PromptError
from diffulex.log import get_logger
from diffulex.serving.admission import AdmissionError, AdmissionLimits
from diffulex.serving.events import (
    delta_event,
    failure_event,
    fresh_ids,
    num_stable,
    reply_event,
    snapshot_event,
)
from diffulex.serving.state import ServingRequestState, ServingState
from diffulex.wire.protocol import (
    STREAM_MODES,
    ChatInput,
    PromptInput,
    ServingAbort,
    ServingAck,
    ServingCommand,
    ServingError,
    ServingEvent,
    ServingFlushCache,
    ServingGenerate,
    ServingInput,
    ServingProfileStart,
    ServingProfileStop,
)

if TYPE_CHECKING:
    from diffulex.checkpoint.detokenizer import Decode

__all__ = [
    "SUPPORTED_STREAM_MODES",
    "DiffulexAsyncEngineMixin",
    "EngineDeadError",
    "ServingRequestState",
    "ServingState",
]

logger = get_logger(__name__)

_Event = TypeVar("_Event", bound=ServingEvent)

SUPPORTED_STREAM_MODES = frozenset(STREAM_MODES)


class EngineDeadError(RuntimeError):
    """A step failed: the engine's state cannot be trusted. `rids` are the requests it had."""

    def __init__(self, message: str, rids: Sequence[str]) -> None:
        super().__init__(message)
        self.rids = list(rids)


class DiffulexAsyncEngineMixin:
    """Adds `run_serving_tick` to an engine. Everything belongs to the thread that steps.

    The engine has `tokenizer`, `add_request`, `step`, `is_finished`, `abort_request`,
    `start_profile`, `stop_profile`, `exit`, and may have `serving_limits` and `flush_cache`.
    """

    tokenizer: Any
    #: False: snapshots have no text, the frontend makes it.
    detokenize_snapshots: bool = True
    _serving_state: ServingState

    def init_serving_state(self) -> ServingState:
        """The state, made at the first call."""
        state: ServingState | None = self.__dict__.get("_serving_state")
        if state is None:
            state = self._serving_state = ServingState()
        return state

    # What a fake may leave out.

    def serving_limits(self) -> AdmissionLimits | None:
        """Limits requests are checked against before the scheduler hears of them; None: none."""
        return None

    # The tick.

    def run_serving_tick(
        self, commands: Sequence[ServingCommand]
    ) -> list[ServingEvent | ServingAck]:
        """Applies the commands in order, runs at most one step, and returns what happened.

        Raises:
            EngineDeadError: the step failed.
            TypeError: a command that is none of an engine's, such as a shutdown.
        """
        state = self.init_serving_state()
        events: list[ServingEvent | ServingAck] = []
        for command in commands:
            event = self._apply(command)
            if event is not None:
                events.append(event)
        events.extend(self._expired())
        if not self._engine.is_finished():
            events.extend(self._run_step(state))
        return events

    @property
    def _engine(self) -> Any:
        """The methods of the class this is mixed into."""
        return self

    def _apply(self, command: ServingCommand) -> ServingEvent | ServingAck | None:
        if isinstance(command, ServingGenerate):
            refusal = self._accept(command)
            return None if refusal is None else _of(command, refusal)
        if isinstance(command, ServingAbort):
            self._abort(command.rid)
            return None
        if isinstance(command, ServingProfileStart):
            return self._operate(command.op_id, "start_profile", command.profile_prefix)
        if isinstance(command, ServingProfileStop):
            return self._operate(command.op_id, "stop_profile")
        if isinstance(command, ServingFlushCache):
            return self._operate(command.op_id, "flush_cache")
        raise TypeError(
            f"run_serving_tick: expected a command of an engine, got {type(command).__name__}"
        )

    def _operate(self, op_id: str | None, name: str, *arguments: Any) -> ServingAck | None:
        """Calls a method of the engine; its failure is an answer."""
        try:
            data = getattr(self._engine, name)(*arguments)
        except Exception as error:
            logger.warning("%s: %s", name, error)
            return None if op_id is None else ServingAck(op_id, False, str(error))
        shown = dict(data) if isinstance(data, Mapping) else None
        return None if op_id is None else ServingAck(op_id, True, "", shown)

    # Requests.

    def _accept(self, command: ServingGenerate) -> ServingError | None:
        try:
            self._add(command)
        except AdmissionError as error:
            return _refusal(command.rid, str(error), error.code, error.param)
        except ValueError as error:  # prompts and parameters
            is_prompt = isinstance(error, PromptError)
            return _refusal(
                command.rid, str(error), "invalid_request", "prompt" if is_prompt else None
            )
        except Exception as error:
            if type(error).__name__ == "OutOfPagesError":
                return _refusal(command.rid, str(error), "kv_capacity", "prompt")
            logger.exception("request %s: cannot be added", command.rid)
            return ServingError(command.rid, str(error) or type(error).__name__)
        return None

    def _add(self, command: ServingGenerate) -> None:
        serving = self.init_serving_state()
        if command.stream_mode not in SUPPORTED_STREAM_MODES:
            raise AdmissionError(
                f"stream_mode: expected one of {', '.join(STREAM_MODES)},"
                f" got {command.stream_mode!r}",
                param="stream_mode",
            )
        if serving.find(command.rid) is not None:
            raise AdmissionError(f"rid: expected a new one, got {command.rid!r} again")
        prompt = self.encode_input(command.input)
        params = command.sampling_params
        limits, max_tokens = self.serving_limits(), params.max_tokens
        if limits is not None:
            max_tokens = min(max_tokens, limits.max_model_len - len(prompt))
            limits.check(prompt, params, is_strict=command.strict_max_tokens)
        elif not prompt:
            raise AdmissionError("prompt: expected at least one token, got none", param="prompt")
        params, found = special_stops(self.tokenizer, params)
        req_id = self._engine.add_request(prompt, params)
        if command.stream and command.stream_mode != "block_append":
            getattr(self._engine, "report_buffer", lambda req_id: None)(req_id)
        skip = bool(params.skip_special_tokens)
        serving.add(
            ServingRequestState(
                rid=command.rid,
                engine_req_id=req_id,
                stream=command.stream,
                stream_mode=command.stream_mode,
                params=params,
                prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                answer=AnswerText(
                    self._decoder(skip),
                    params.stop,
                    params.include_stop_str_in_output,
                    params.min_tokens,
                    has_spans=params.logprobs is not None,
                ),
                special_stops=found,
                denoise_detail=command.denoise_detail,
                queue_timeout_s=command.queue_timeout_s,
                generation=command.generation,
            )
        )

    def encode_input(self, value: ServingInput) -> list[int]:
        """Token ids of an input: ids as they are, texts tokenised, chats rendered first."""
        if isinstance(value, ChatInput):
            text = self.render_chat_prompt_for_serving(value.messages)
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        if isinstance(value, PromptInput) and isinstance(value.prompt, str):
            if self.tokenizer is None:
                raise AdmissionError("prompt: expected token ids, got a text", param="prompt")
            return list(
                self.tokenizer.encode(value.prompt, add_special_tokens=value.add_special_tokens)
            )
        return list(value.prompt)

    def render_chat_prompt_for_serving(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation, up to where the answer starts.

        Without a template in the tokenizer: one `role: content` line per message.

        Raises:
            ValueError: the template rejects the messages.
        """
        tokenizer = self.tokenizer
        render = getattr(tokenizer, "render_chat", None)
        if render is not None and tokenizer.has_chat_template:
            return str(render(messages))
        apply = getattr(tokenizer, "apply_chat_template", None)
        if render is None and apply is not None:
            return str(apply(list(messages), tokenize=False, add_generation_prompt=True))
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, "assistant:"])

    def _abort(self, rid: str) -> None:
        state = self.init_serving_state().find(rid)
        if state is not None:
            self.init_serving_state().drop(state)
            self._engine.abort_request(state.engine_req_id)

    def _expired(self) -> list[ServingEvent]:
        """Ends the requests that waited too long for their first step."""
        now = time.perf_counter()
        late = [
            state
            for state in self.init_serving_state().requests.values()
            if state.queue_timeout_s is not None
            and state.is_waiting
            and now - state.added_at > state.queue_timeout_s
        ]
        events: list[ServingEvent] = []
        for state in late:
            self._abort(state.rid)
            text = f"request {state.rid}: not scheduled within {state.queue_timeout_s} s"
            error = ServingError(state.rid, text, "queue_timeout", 503, retryable=True)
            events.append(_of(state, error))
        return events

    def fail_requests(self, message: str, code: str, http_status: int) -> list[ServingEvent]:
        """Ends every live request with an error, for a shutdown."""
        serving = self.init_serving_state()
        events: list[ServingEvent] = []
        for state in list(serving.requests.values()):
            serving.drop(state)
            self._engine.abort_request(state.engine_req_id)
            error = ServingError(state.rid, message, code, http_status, retryable=True)
            events.append(_of(state, error))
        return events

    # Steps.

    def _run_step(self, serving: ServingState) -> list[ServingEvent]:
        start = time.perf_counter()
        try:
            requests, is_prefill = self._engine.step()
        except Exception as error:
            logger.exception("a step failed")
            raise EngineDeadError(
                f"engine step failed: {error or type(error).__name__}", serving.rids()
            ) from error
        now = time.perf_counter()
        events: list[ServingEvent] = []
        for request in requests:
            state = serving.requests.get(request.req_id)
            if state is None:
                continue
            self._count(state, request, is_prefill, start, now)
            try:
                made = self._events(serving, state, request)
            except Exception as error:  # such as a tokenizer that fails on its ids
                logger.exception("request %s: its events cannot be made", state.rid)
                serving.drop(state)
                self._engine.abort_request(state.engine_req_id)
                made = [ServingError(state.rid, f"{type(error).__name__}: {error}")]
            events.extend(_of(state, event) for event in made)
        return events

    def _count(
        self,
        state: ServingRequestState,
        request: Any,
        is_prefill: bool,
        start: float,
        now: float,
    ) -> None:
        if state.first_step_at is None:
            state.first_step_at = start
        was_prefill = getattr(request, "_last_execution_is_prefill", None)
        new_tokens = max(0, int(getattr(request, "new_tokens", 0) or 0))
        state.add_step(
            now - start,
            new_tokens,
            is_prefill=bool(is_prefill if was_prefill is None else was_prefill),
        )

    def _events(
        self, serving: ServingState, state: ServingRequestState, request: Any
    ) -> list[ServingEvent]:
        is_finished = bool(request.is_finished)
        failure = failure_event(state, request) if is_finished else None
        if failure is not None:
            serving.drop(state)
            return [failure]
        if state.first_token_at is None and num_stable(state, request) > 0:
            state.first_token_at = time.perf_counter()
        if not (is_finished or state.stream or state.answer.has_stops):
            return []  # the text is not read before the end
        piece = state.answer.push(fresh_ids(state, request, is_finished))
        is_last = is_finished or state.answer.matched_stop is not None
        if is_last:
            rest = self._close(state, request)
            piece = Piece(piece.token_ids + rest.token_ids, piece.text + rest.text)
        events: list[ServingEvent] = []
        if state.stream and state.stream_mode != "denoise":
            delta = delta_event(state, request, piece, is_last)
            if delta is not None:
                events.append(delta)
        if state.stream and state.stream_mode != "block_append":
            decode = self._decoder(False) if self.detokenize_snapshots else None
            snapshot = snapshot_event(state, request, decode, is_last)
            if snapshot is not None:
                events.append(snapshot)
        if is_last:
            serving.drop(state)
            if not is_finished:
                self._engine.abort_request(state.engine_req_id)
            skip = state.params is not None and bool(state.params.skip_special_tokens)
            events.append(reply_event(state, request, self._decoder(skip)))
        return events

    def _close(self, state: ServingRequestState, request: Any) -> Piece:
        """Ends the answer; a stop text that was one special token is put back if wanted."""
        stop_id: int | None = getattr(request, "matched_stop_id", None)
        text = None if stop_id is None else state.special_stops.get(stop_id)
        is_wanted = state.answer.is_including and state.answer.matched_stop is None
        if stop_id is not None and text is not None and is_wanted:
            state.answer.append(stop_id, text)
        return state.answer.finish()

    def _decoder(self, skip_special_tokens: bool) -> Decode | None:
        if self.tokenizer is None:
            return None
        decoders: dict[bool, Decode] = self.__dict__.setdefault("_serving_decoders", {})
        if skip_special_tokens not in decoders:
            decoders[skip_special_tokens] = robust_decode(self.tokenizer, skip_special_tokens)
        return decoders[skip_special_tokens]


def _of(source: ServingGenerate | ServingRequestState, event: _Event) -> _Event:
    """The event, marked as one of this admission."""
    event.generation = source.generation
    return event


def _refusal(rid: str, message: str, code: str, param: str | None) -> ServingError:
    return ServingError(rid, message, code, 400, param=param)
