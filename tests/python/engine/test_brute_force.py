# SPDX-License-Identifier: Apache-2.0
"""The oracle itself, where published values exist."""

from __future__ import annotations

import numpy as np
import pytest

from brute_force import Proposal, Settings, accepted_positions, philox4x32


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(key: int, counter: tuple[int, ...], expected: str) -> None:
    assert " ".join(f"{word:08x}" for word in philox4x32(key, counter)) == expected


def test_factor_rule_counts_the_failing_last_candidate() -> None:
    # p = .99 .95 .2: (3)(.05) = .15 < 1 holds for n = 2, (4)(.8) >= 1 fails for n = 3.
    settings = Settings(4, 1, 0, 10, frozenset(), 64, rule="factor", factor=1.0)
    proposals = {i: Proposal(1, np.float32(p), p, 0.0) for i, p in enumerate((0.2, 0.99, 0.95))}
    assert accepted_positions(proposals, settings, 0.9, True, 0) == {1, 2}


def test_closed_gate_takes_away_what_is_not_confident() -> None:
    for rule in ("threshold", "static", "dynamic", "factor", "entropy_bound", "hierarchy"):
        settings = Settings(4, 2, 0, 10, frozenset(), 64, rule=rule)
        proposals = {i: Proposal(1, np.float32(p), p, 0.0) for i, p in enumerate((0.5, 0.97))}
        assert accepted_positions(proposals, settings, 0.95, False, 0) == {1}
        assert accepted_positions(proposals, settings, 0.99, False, 0) == set()
    # The one position of a sequential step is the first, which is not confident.
    settings = Settings(4, 2, 0, 10, frozenset(), 64, rule="sequential")
    assert accepted_positions(proposals, settings, 0.95, False, 0) == set()
    assert accepted_positions(proposals, settings, 0.4, False, 0) == {0}
    settings = Settings(4, 2, 0, 10, frozenset(), 64, rule="leftmost_prefix")
    assert accepted_positions(proposals, settings, 0.95, False, 0) == set()
    assert accepted_positions(proposals, settings, 0.5, False, 0) == {0, 1}
    assert accepted_positions(proposals, settings, 0.95, True, 0) == {0}
