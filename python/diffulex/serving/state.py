# SPDX-License-Identifier: Apache-2.0
"""What the serving mixin remembers about the requests it has accepted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diffulex.engine.answer_text import AnswerText

if TYPE_CHECKING:
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.wire.protocol import StreamMode

__all__ = ["ServingRequestState", "ServingState"]


@dataclass
class ServingRequestState:
    """One accepted request.

    Attributes:
        max_tokens: those of the request, as far as the model's length allows.
        emitted_token_count: answer tokens sent in deltas.
        emitted_text_len: characters of their text.
        answer: the text of the tokens that are final, with its stop texts.
        num_seen: final tokens that `answer` has got.
        num_reported: tokens reported as committed by snapshots.
        special_stops: stop texts that are one special token, by id.
        generation: of the command; all events carry it.
    """

    rid: str
    engine_req_id: int
    stream: bool = False
    stream_mode: StreamMode = "denoise"
    emitted_token_count: int = 0
    emitted_text_len: int = 0
    engine_decode_time_s: float = 0.0
    engine_decode_tokens: int = 0
    params: SamplingParams | None = None
    prompt_tokens: int = 0
    max_tokens: int | None = None
    answer: AnswerText = field(default_factory=lambda: AnswerText(None))
    num_seen: int = 0
    num_reported: int = 0
    special_stops: dict[int, str] = field(default_factory=dict)
    denoise_detail: bool = False
    queue_timeout_s: float | None = None
    generation: int = 0
    added_at: float = field(default_factory=time.perf_counter)
    first_step_at: float | None = None
    first_token_at: float | None = None
    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_time_s: float = 0.0
    prefill_output_tokens: int = 0
    last_draft: tuple[int, list[int]] | None = None
    confidences: dict[int, float] = field(default_factory=dict)

    @property
    def engine_decode_tps(self) -> float | None:
        """Decided tokens per second of decode steps; None while either is 0."""
        if self.engine_decode_tokens == 0 or self.engine_decode_time_s <= 0:
            return None
        return self.engine_decode_tokens / self.engine_decode_time_s

    @property
    def is_waiting(self) -> bool:
        """Whether no step has run it yet."""
        return self.first_step_at is None

    def add_step(self, seconds: float, new_tokens: int, *, is_prefill: bool) -> None:
        """Counts one step the request took part in."""
        if is_prefill:
            self.prefill_steps += 1
            self.prefill_time_s += seconds
            self.prefill_output_tokens += new_tokens
        else:
            self.decode_steps += 1
            self.engine_decode_time_s += seconds
            self.engine_decode_tokens += new_tokens


class ServingState:
    """Accepted requests by the engine's id, and the engine's ids by `rid`."""

    def __init__(self) -> None:
        self.requests: dict[int, ServingRequestState] = {}
        self._req_ids: dict[str, int] = {}

    def add(self, state: ServingRequestState) -> None:
        """Remembers a request."""
        self.requests[state.engine_req_id] = state
        self._req_ids[state.rid] = state.engine_req_id

    def find(self, rid: str) -> ServingRequestState | None:
        """The live request of this name."""
        req_id = self._req_ids.get(rid)
        return None if req_id is None else self.requests.get(req_id)

    def drop(self, state: ServingRequestState) -> None:
        """Forgets a request; nothing is sent about it any more."""
        self.requests.pop(state.engine_req_id, None)
        self._req_ids.pop(state.rid, None)

    def rids(self) -> list[str]:
        """Names of the live requests, oldest first."""
        return [state.rid for state in self.requests.values()]
