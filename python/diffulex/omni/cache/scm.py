# SPDX-License-Identifier: Apache-2.0
"""Step computation masks: which denoising steps a policy computes, for any number of them."""

from __future__ import annotations

__all__ = ["SCM_POLICIES", "scm_mask"]

#: Policy -> masks for 28 and for 8 steps, 1 for a step that is computed.
_MASKS = {
    "slow": ("1111111101110011100110010001", "11111011"),
    "medium": ("1111110110001100011000110001", "11110101"),
    "fast": ("1111110100010000100000100001", "11101001"),
    "ultra": ("1111001000001000000100000001", "11001001"),
}
SCM_POLICIES = tuple(_MASKS)
#: The same for every policy: (steps from which on it holds, mask).
_SHORT = ((6, "111001"), (4, "1101"), (0, "1"))


def scm_mask(policy: str, num_steps: int) -> tuple[int, ...]:
    """One 0 or 1 per step: the policy's nearest mask, stretched; the first and last are computed."""
    of_28, of_8 = _MASKS[policy]
    masks = ((16, of_28), (8, of_8), *_SHORT)
    base = next(mask for least, mask in masks if num_steps >= least)
    mask = [int(base[step * len(base) // num_steps]) for step in range(num_steps)]
    for edge in (0, -1):
        if mask:
            mask[edge] = 1
    return tuple(mask)
