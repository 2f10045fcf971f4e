# SPDX-License-Identifier: Apache-2.0
"""Serving of texts: generation commands become requests of an engine, its step outputs become events.

The real engine is in serving/engine.py; tests have a fake one of the same interface.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffulex.serving.admission import AdmissionError, AdmissionLimits
from diffulex.serving.events import EventMaker, ServingRequestState
from diffulex.serving.job_tick import EngineDeadError, JobEngine, ServingState
from diffulex.wire.protocol import (
    STREAM_MODES,
    ChatInput,
    JobEvent,
    PromptInput,
    ServingGenerate,
    ServingInput,
)

if TYPE_CHECKING:
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.engine.metrics import RequestRecord
    from diffulex.engine.output import StepOutput

__all__ = [
    "SUPPORTED_STREAM_MODES",
    "DiffulexAsyncEngineMixin",
    "EngineDeadError",
    "ServingRequestState",
    "ServingState",
]

SUPPORTED_STREAM_MODES = frozenset(STREAM_MODES)


class DiffulexAsyncEngineMixin(JobEngine[ServingRequestState]):
    """Adds `run_serving_tick` to an engine that makes texts.

    Attributes:
        tokenizer: of the model; None: prompts are token ids.
        mask_token_id: None for a canvas, which has no masks.
        detokenize_snapshots: False: snapshots have no text, the frontend makes it.
    """

    tokenizer: Any
    mask_token_id: int | None
    detokenize_snapshots: bool = True
    _event_maker: EventMaker | None = None

    @abstractmethod
    def add_request(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        has_text: bool = False,
        has_snapshots: bool = False,
    ) -> int:
        """Enqueues a prompt; as `Diffulex.add_request`."""

    @abstractmethod
    def record(self, req_id: int) -> RequestRecord:
        """The record of a request that is not finished, which goes on being written."""

    @abstractmethod
    def step(self) -> Sequence[StepOutput]:
        """One step; what it did to each request it touched."""

    def serving_limits(self) -> AdmissionLimits | None:
        """Limits that requests are checked against before they are enqueued; None: none."""
        return None

    def admit(self, command: ServingGenerate) -> ServingRequestState:
        """Enqueues a generation."""
        if command.stream_mode not in SUPPORTED_STREAM_MODES:
            raise AdmissionError(
                f"stream_mode: expected one of {', '.join(STREAM_MODES)},"
                f" got {command.stream_mode!r}",
                param="stream_mode",
            )
        prompt = self.encode_input(command.input)
        params = command.sampling_params
        limits, max_tokens = self.serving_limits(), params.max_tokens
        if limits is not None:
            limits.check(prompt, params, is_strict=command.strict_max_tokens)
            _, max_tokens = limits.lengths(prompt, params)
        elif not prompt:
            raise AdmissionError("prompt: expected at least one token, got none", param="prompt")
        req_id = self.add_request(
            prompt,
            # Clients that say nothing about special tokens see them.
            dataclasses.replace(params, skip_special_tokens=bool(params.skip_special_tokens)),
            # Log-probabilities say where their tokens lie in the text.
            has_text=command.stream or params.logprobs is not None,
            has_snapshots=command.stream and command.stream_mode != "block_append",
        )
        return ServingRequestState(command, req_id, self.record(req_id), max_tokens)

    def events_of(self, job: ServingRequestState, output: StepOutput) -> list[JobEvent]:
        """Deltas, snapshots, the reply or an error."""
        if self._event_maker is None:
            self._event_maker = EventMaker(self.tokenizer, self.mask_token_id)
        self._event_maker.has_draft_text = self.detokenize_snapshots
        return self._event_maker.events(job, output)

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
        if self.tokenizer.has_chat_template:
            return str(self.tokenizer.render_chat(messages))
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, "assistant:"])
