# SPDX-License-Identifier: Apache-2.0
"""A tokenizer whose ids are bytes, with a few special tokens behind them."""

from __future__ import annotations

MASK, EOS, TURN_END, HOLE = 256, 257, 258, 259
VOCAB_SIZE = 260
_SPECIAL = {MASK: "<mask>", EOS: "<eos>", TURN_END: "<turn_end>"}


class ByteTokenizer:
    """Only what the serving mixin asks of a tokenizer."""

    has_chat_template = False

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
