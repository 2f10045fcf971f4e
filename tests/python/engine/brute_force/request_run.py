# SPDX-License-Identifier: Apache-2.0
"""What every strategy shares: positions, stop rules and limits of one request."""

from __future__ import annotations

import math

from brute_force.settings import Outcome, RequestSettings, Settings


class RequestRun:
    """One request decoded alone. A subclass has `step` and knows which positions are settled."""

    def __init__(self, settings: Settings, prompt: list[int], request: RequestSettings) -> None:
        self.settings, self.request = settings, request
        self.prompt_len = len(prompt)
        self.limit = min(self.prompt_len + request.max_tokens, settings.max_model_len)
        self.tokens = dict(enumerate(prompt))  # position -> token; absent = mask
        self.nfe = 0
        self.decided: list[int] = []
        self.margin = math.inf

    def step(self) -> None:
        """One forward."""
        raise NotImplementedError

    def is_settled(self, position: int) -> bool:
        """Whether the token of a position can no longer change."""
        return position in self.tokens

    def outcome(self) -> Outcome:
        """Decodes to the end."""
        while True:
            self.step()
            reason = self._reason()
            if reason is not None:
                end = self._settled_end()
                if reason == "eos_token_generated":
                    stop = self.stop_position()
                    assert stop is not None
                    end = stop
                ids = [self.tokens[i] for i in range(self.prompt_len, end)]
                return Outcome(ids, reason, self.nfe, self.decided, self.margin)

    def threshold(self, name: str) -> float:
        """A threshold of the request, or of the engine where it has none."""
        own = getattr(self.request, name)
        value: float = getattr(self.settings, name) if own is None else own
        return value

    def note_margins(self, margins: list[float]) -> None:
        """Remembers how close the closest decision was."""
        self.margin = min(self.margin, *margins, math.inf)

    def stop_position(self) -> int | None:
        """First generated position with a stop id, settled or not."""
        if self.request.ignore_eos:
            return None
        stops = self.settings.stop_ids | self.request.stop_ids
        for position in range(self.prompt_len, self.limit):
            if self.tokens.get(position) in stops:
                return position
        return None

    def _settled_end(self) -> int:
        end = self.prompt_len
        while end < self.limit and self.is_settled(end):
            end += 1
        return end

    def _reason(self) -> str | None:
        request, end, stop = self.request, self._settled_end(), self.stop_position()
        if stop is not None and stop < end:
            return "eos_token_generated"
        if end == self.limit:
            is_token_limit = self.limit == self.prompt_len + request.max_tokens
            return "max_new_tokens_reached" if is_token_limit else "max_model_len_reached"
        if request.max_nfe is not None and self.nfe >= request.max_nfe:
            return "max_nfe_reached"
        if request.max_repetition_run is not None:
            run = 0
            for position in range(end - 1, self.prompt_len - 1, -1):
                if self.tokens[position] != self.tokens[end - 1]:
                    break
                run += 1
            if run >= request.max_repetition_run:
                return "max_repetition_run_reached"
        return None
