# SPDX-License-Identifier: Apache-2.0
"""The text of a growing answer, released when it can no longer change, and cut at a stop text.

A character may span tokens, and a stop text may span tokens and steps. What could still become part
of either is held back:

    ids    | released          | complete, may begin a stop | end inside a character |
    text   | released          | held                       | not known yet          |
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.checkpoint.detokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.checkpoint.detokenizer import Decode
    from diffulex.config.sampling_params import SamplingParams

__all__ = ["AnswerText", "Piece", "special_stops"]


class Piece(NamedTuple):
    """Tokens and their text, released together."""

    token_ids: tuple[int, ...]
    text: str


class AnswerText:
    """Collects final tokens of one request in order.

    All pieces of `push` and `finish` together are `token_ids` and `text`.

    Args:
        decode: text of ids; None: there is no text, and no stop text can be found.
        stop: texts of which the one that is complete first ends the answer.
        include_stop: cut after it, not before it.
        min_tokens: a stop text counts only if it ends after so many tokens.
        has_spans: `span` is asked for.
    """

    def __init__(
        self,
        decode: Decode | None,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        has_spans: bool = False,
    ) -> None:
        self._decoder = None if decode is None else IncrementalDecoder(decode)
        self._stop = tuple(stop) if decode is not None else ()
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._longest = max(map(len, self._stop), default=0)
        self._is_per_token = decode is not None and (bool(stop) or has_spans)
        # Per token, for answers with stop texts or spans: length of the text that is known with it, and
        # with the token that completes its last character.
        self._known: list[int] = []
        self._ends: list[int] = []
        self._num_complete = 0
        self._num_released = 0
        self._num_released_chars = 0
        self.token_ids: list[int] = []
        self.text = ""
        #: The stop text that ended the answer.
        self.matched_stop: str | None = None

    @property
    def has_stops(self) -> bool:
        """Whether a stop text may end the answer."""
        return bool(self._stop)

    @property
    def is_including(self) -> bool:
        """Whether the stop text belongs to the answer."""
        return self._include_stop

    def span(self, index: int) -> tuple[int, str] | None:
        """Where in `text` a released token begins, and what it adds there; None: unknown.

        A character of several tokens is the first one's; a token without text adds none.
        """
        if not self._is_per_token:
            return None
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        return min(start, len(self.text)), self.text[start:end]

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Adds final tokens; returns what is released by them. Without effect after a match."""
        if self.matched_stop is not None or not token_ids:
            return Piece((), "")
        if not self._is_per_token:
            self._add(token_ids)
            return self._release(self._num_complete, len(self.text))
        for token_id in token_ids:
            num_known = len(self.text)
            self._add((token_id,))
            if self._find_stop(num_known):
                return self._release(len(self.token_ids), len(self.text))
        if not self._stop:
            return self._release(self._num_complete, len(self.text))
        num_free = len(self.text) - self._num_held()
        # A token is released with all of its text or not at all.
        count = min(self._num_complete, self._count_within(num_free))
        return self._release(count, self._ends[count - 1] if count else 0)

    def finish(self) -> Piece:
        """No token follows: releases the rest."""
        if self.matched_stop is None and self._decoder is not None:
            num_known = len(self.text)
            piece = self._decoder.flush()
            self.text += piece
            if self._is_per_token and piece:
                self._known[-1] = len(self.text)
                self._complete(len(self.token_ids))
                self._find_stop(num_known)
        return self._release(len(self.token_ids), len(self.text))

    def append(self, token_id: int, text: str) -> None:
        """Adds a token whose text the decoder would leave out; before `finish`."""
        self.text += (self._decoder.flush() if self._decoder is not None else "") + text
        self.token_ids.append(token_id)
        self._known.append(len(self.text))
        self._ends.append(len(self.text))
        self._num_complete = len(self.token_ids)

    def _complete(self, num_tokens: int) -> None:
        """The text, as far as it is known, is that of so many tokens."""
        if self._is_per_token:
            count = num_tokens - self._num_complete
            self._ends[self._num_complete : num_tokens] = [len(self.text)] * count
        self._num_complete = num_tokens

    def _add(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        if self._decoder is None:
            self._num_complete = len(self.token_ids)
            return
        self.text += self._decoder.push(token_ids)
        if self._is_per_token:
            self._known.append(len(self.text))
            self._ends.append(len(self.text))
        num_complete = len(self.token_ids) - self._decoder.num_open
        if num_complete > self._num_complete:
            self._complete(num_complete)

    def _find_stop(self, num_known: int) -> bool:
        """Cuts the answer at the stop text that is complete first, the longest of such.

        A match within the first `num_known` characters was reported, or came too early to count.
        """
        if len(self.token_ids) <= self._min_tokens:
            return False
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self.text.find(stop, max(0, num_known - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                found = candidate if found is None else min(found, candidate)
        if found is None:
            return False
        end, start, self.matched_stop = found
        kept = end if self._include_stop else start
        # The shortest run of tokens whose text covers what is kept.
        count = bisect_left(self._known, kept) + 1 if kept > 0 else 0
        self.text = self.text[:kept]
        self.token_ids = self.token_ids[:count]
        return True

    def _num_held(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        for count in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-count:]
            if any(stop.startswith(tail) for stop in self._stop):
                return count
        return 0

    def _count_within(self, num_chars: int) -> int:
        """Tokens whose text ends within the first `num_chars` characters.

        Those without text wait for one that has some: a stop text may begin there, and they are not
        of the answer then.
        """
        count = bisect_left(self._ends, num_chars + 1)
        while count and self._known[count - 1] == (self._known[count - 2] if count > 1 else 0):
            count -= 1
        return max(count, self._num_released)

    def _release(self, num_tokens: int, num_chars: int) -> Piece:
        token_ids = tuple(self.token_ids[self._num_released : num_tokens])
        text = self.text[self._num_released_chars : num_chars]
        self._num_released = max(self._num_released, num_tokens)
        self._num_released_chars = max(self._num_released_chars, num_chars)
        return Piece(token_ids, text)


def special_stops(tokenizer: Any, params: SamplingParams) -> tuple[SamplingParams, dict[int, str]]:
    """Parameters in which stop texts that are one special token are stop ids as well; texts by id.

    Special tokens may not be in the text that is searched, so the text alone would not end there.
    """
    if not params.stop or tokenizer is None:
        return params, {}
    backend = getattr(tokenizer, "backend", tokenizer)
    added: Any = getattr(backend, "get_added_vocab", dict)()
    found = {added[text]: text for text in params.stop if text in added}
    if not found:
        return params, {}
    stop_ids = dict.fromkeys((*params.stop_token_ids, *found))
    return dataclasses.replace(params, stop_token_ids=tuple(stop_ids)), found
