# SPDX-License-Identifier: Apache-2.0
"""A tokenizer whose ids are bytes, with a few special tokens behind them."""

from __future__ import annotations

MASK, EOS, TURN_END, HOLE = 256, 257, 258, 259
VOCAB_SIZE = 260
_SPECIAL = {MASK: "<mask>", EOS: "<eos>", TURN_END: "<turn_end>"}


class ByteTokenizer:
    """What serving asks of a tokenizer; it is its own backend."""

    has_chat_template = False
    max_token_chars = max(map(len, _SPECIAL.values()))

    @property
    def backend(self) -> ByteTokenizer:
        return self

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens: bool = False) -> str:
        pieces: list[bytes] = []
        for token_id in token_ids:
            if token_id == HOLE:
                raise TypeError("expected a token string, got None")
            if token_id in _SPECIAL:
                pieces.append(b"" if skip_special_tokens else _SPECIAL[token_id].encode())
            else:
                pieces.append(bytes([token_id]))
        return b"".join(pieces).decode(errors="replace")

    def get_added_vocab(self) -> dict[str, int]:
        return {text: token_id for token_id, text in _SPECIAL.items()}
