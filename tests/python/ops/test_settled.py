# SPDX-License-Identifier: Apache-2.0
"""The promise that weights are settled, and what ops do without it."""

from __future__ import annotations

import threading

import pytest
import torch

from diffulex import ops


def is_settled() -> bool:
    """What holds for this thread now."""
    before = bool(torch.ops.diffulex_control.settle_weights(False))
    torch.ops.diffulex_control.settle_weights(before)
    return before


def test_promise_holds_inside_and_is_taken_back() -> None:
    assert not is_settled()
    with ops.settled_weights():
        assert is_settled()
        with ops.settled_weights():
            assert is_settled()
        assert is_settled()
    assert not is_settled()
    with pytest.raises(ValueError, match="inside"), ops.settled_weights():
        raise ValueError("inside")
    assert not is_settled()


def test_promise_is_that_of_a_thread() -> None:
    seen = []
    with ops.settled_weights():
        thread = threading.Thread(target=lambda: seen.append(is_settled()))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.cuda
@pytest.mark.parametrize("width", [128, 4096, 16384])
def test_weight_computed_just_before_is_read_after_it_was(width: int) -> None:
    """A smoke test: a kernel that reads too early may still find the product ready."""
    x = torch.randn(4, width, device="cuda")
    weight = torch.randn(width, device="cuda")
    expected = ops.rms_norm(x, weight * 3, 1e-6)
    torch.cuda.synchronize()
    for _ in range(20):
        scaled = torch.zeros_like(weight)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000)
        torch.mul(weight, 3, out=scaled)
        assert torch.equal(ops.rms_norm(x, scaled, 1e-6), expected)
