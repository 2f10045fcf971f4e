# SPDX-License-Identifier: Apache-2.0
"""The seed of a request that names none, as the scheduler of one engine derives it.

With several replicas it is derived before a request is sent, so that it does not depend on which
replica decodes the request.
"""

from __future__ import annotations

__all__ = ["derive_request_seed"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
#: The third word of the counter, which no other draw has.
_PURPOSE = 0x73656564


def derive_request_seed(engine_seed: int, req_id: int) -> int:
    """64 bits of Philox 4x32: the key is the engine's seed, the counter the request's id."""
    words = [req_id & _MASK, req_id >> 32 & _MASK, _PURPOSE, 0]
    keys = [engine_seed & _MASK, engine_seed >> 32 & _MASK]
    for _ in range(_ROUNDS):
        low, high = (multiplier * words[2 * i] for i, multiplier in enumerate(_MULTIPLIERS))
        words = [
            (high >> 32) ^ words[1] ^ keys[0],
            high & _MASK,
            (low >> 32) ^ words[3] ^ keys[1],
            low & _MASK,
        ]
        keys = [(key + step) & _MASK for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return words[0] << 32 | words[1]
