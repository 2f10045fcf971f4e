# SPDX-License-Identifier: Apache-2.0
"""What a frontend asks of its backend besides requests."""

from __future__ import annotations

import asyncio

import pytest

from diffulex.serving.frontend import BackendUnavailable, OperationFailed
from diffulex.wire.protocol import ServingAck, ServingFlushCache, ServingProfileStart
from scripted_backend import run, until


def test_no_answer_in_time():
    async def scenario(frontend, backend):
        with pytest.raises(BackendUnavailable, match="no answer to an operation"):
            await frontend.flush_cache()
        assert frontend.num_operations == 0

    run(scenario, operation_timeout_s=0.01)


def test_a_stop_ends_them_at_once():
    async def scenario(frontend, backend):
        operation = asyncio.ensure_future(frontend.flush_cache())
        await until(lambda: backend.commands)
        assert frontend.num_operations == 1
        await frontend.stop()
        with pytest.raises(BackendUnavailable, match="the server is shutting down"):
            await operation
        with pytest.raises(BackendUnavailable, match="expected one that is ready, got stopped"):
            await frontend.operate(ServingFlushCache("1"))

    run(scenario)


def test_answers():
    def answer(command):
        if isinstance(command, ServingFlushCache):
            return [ServingAck("other", True), ServingAck(command.op_id, True, "", {"n": 1})]
        if isinstance(command, ServingProfileStart):
            return [ServingAck(command.op_id, False, "profiling is off")]
        return ()

    async def scenario(frontend, backend):
        assert await frontend.flush_cache() == {"n": 1}
        with pytest.raises(OperationFailed, match="profiling is off"):
            await frontend.start_profile("p")
        assert backend.commands[1].profile_prefix == "p"

    run(scenario, answer)
