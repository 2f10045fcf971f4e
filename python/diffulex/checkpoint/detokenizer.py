# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, whole or as they come, and robust against ids without a text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

__all__ = ["Decode", "IncrementalDecoder", "robust_decode"]

#: Text of a list of ids.
Decode: TypeAlias = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
# Bytes of the longest character, but for its last.
_MAX_OPEN = 3


def robust_decode(tokenizer: Any, skip_special_tokens: bool = True) -> Decode:
    """The tokenizer's `decode` with the flag fixed; ids without a string count as empty."""
    options: dict[str, bool] = {}
    if _takes_flag(tokenizer.decode):
        options["skip_special_tokens"] = skip_special_tokens

    def decode(token_ids: Sequence[int]) -> str:
        try:
            return str(tokenizer.decode(list(token_ids), **options))
        except TypeError:
            # Ids inside holes of the vocabulary have no token string.
            return "".join(decode_one(token_id) for token_id in token_ids)

    def decode_one(token_id: int) -> str:
        try:
            return str(tokenizer.decode([token_id], **options))
        except TypeError:
            return ""

    return decode


def _takes_flag(function: Callable[..., object]) -> bool:
    parameters = inspect.signature(function).parameters
    is_open = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
    return is_open or "skip_special_tokens" in parameters


class IncrementalDecoder:
    """Turns a growing id sequence into text that is only ever appended to.

    The pieces of all `push` calls and the final `flush` together equal the text of the whole
    sequence. Only a window of recent ids is decoded again, so the cost does not grow with the
    length of the text:

        ids:  ... forgotten ... | context      | since then           |  <- window
        text: ... returned ...  | returned (num_returned chars) | new |
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        #: Leading ids of the window whose text is complete; the window starts at such a point too.
        self._num_context = 0
        self._num_returned = 0

    @property
    def num_open(self) -> int:
        """Ids at the end whose text is not complete."""
        return len(self._window) - self._num_context

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that becomes final with these ids; may be empty."""
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        # Bytes at the end that form no character yet appear as replacement characters, in some
        # decoders together with the whole run of byte tokens before them: only where the
        # text up to a point does not end in one is that point a boundary.
        for num_open in range(min(_MAX_OPEN, self.num_open - 1) + 1):
            end = len(self._window) - num_open
            text = self._decode(self._window[:end])
            if not text.endswith(_REPLACEMENT):
                break
        else:
            return ""
        piece = text[self._num_returned :]
        # The newest ids stay as context: some decoders treat the first id of a text specially.
        self._window, self._num_context = self._window[self._num_context :], end - self._num_context
        self._num_returned = len(self._decode(self._window[: self._num_context]))
        return piece

    def flush(self) -> str:
        """Text still held back; bytes that were never completed give U+FFFD."""
        piece = self._decode(self._window)[self._num_returned :]
        self._num_returned += len(piece)
        return piece
