# SPDX-License-Identifier: Apache-2.0
"""Counter-based randomness, written from the paper."""

from __future__ import annotations

from collections.abc import Sequence

TOKEN_STREAM, INIT_STREAM, RENOISE_STREAM = 0, 1, 2


def philox4x32(key: int, counter: Sequence[int]) -> list[int]:
    """Philox4x32-10 of Salmon et al., SC 2011."""
    mask = 0xFFFFFFFF
    words = list(counter)
    low_key, high_key = key & mask, key >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            (second >> 32) ^ words[1] ^ low_key,
            second & mask,
            (first >> 32) ^ words[3] ^ high_key,
            first & mask,
        ]
        low_key, high_key = (low_key + 0x9E3779B9) & mask, (high_key + 0xBB67AE85) & mask
    return words


def uniform(seed: int, position: int, step: int, stream: int = TOKEN_STREAM) -> float:
    """The draw of a position in a sampler step of its block."""
    words = philox4x32(seed, (position, step, stream, 0))
    top = ((words[0] << 32) | words[1]) >> 12
    return (top + 0.5) * 2.0**-52
