# SPDX-License-Identifier: Apache-2.0
"""The one table of finish reasons, as the engine and as the server read it."""

from __future__ import annotations

import dataclasses

import pytest

from diffulex.engine.metrics import RequestRecord
from diffulex.engine.output import RequestOutput
from diffulex.wire import protocol
from diffulex.wire.finish_reasons import FINISH_REASONS, openai_finish_reason
from diffulex_ext import _core


def make_output() -> RequestOutput:
    metrics = RequestRecord(0, (1,), 4, 0.0).metrics(2, 0, 0)
    return RequestOutput(0, (1,), (2, 3), "text", "full", "stop", metrics)


def test_every_reason_of_the_core_is_in_the_table() -> None:
    names = {
        str(reason) for name, reason in _core.FinishReason.__members__.items() if name != "NONE"
    }
    assert names <= set(FINISH_REASONS)


@pytest.mark.parametrize("reason", FINISH_REASONS)
def test_offline_and_http_say_the_same(reason: str) -> None:
    expected = FINISH_REASONS[reason]
    output = dataclasses.replace(make_output(), completion_reason=reason)
    assert output.finish_reason == protocol.openai_finish_reason(reason) == expected
    assert output.is_truncated == (expected == "length")


def test_a_repetition_is_a_limit() -> None:
    assert openai_finish_reason("max_repetition_run_reached") == "length"


def test_unknown_reasons_are_errors() -> None:
    assert openai_finish_reason(None) == openai_finish_reason("") == "stop"
    with pytest.raises(ValueError, match=r"finish reason: expected one of .*, got 'tired'"):
        openai_finish_reason("tired")
