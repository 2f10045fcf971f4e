# SPDX-License-Identifier: Apache-2.0
"""A frontend over two queues of a backend that answers from a script."""

from __future__ import annotations

import asyncio

from diffulex.serving.frontend import FrontendManager
from diffulex.wire.protocol import ServingAbort

#: Generous: the host may be busy. Nothing is measured.
TIMEOUT_S = 60.0


class FakeBackend:
    """Both queues. `answer` is called with each command; what it returns is sent back."""

    def __init__(self, answer=lambda command: ()):
        self.answer = answer
        self.commands = []
        self.events: asyncio.Queue = asyncio.Queue()
        self.num_stops = 0

    async def put(self, command):
        self.commands.append(command)
        for event in self.answer(command):
            self.events.put_nowait(event)

    async def get(self):
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def stop(self):
        self.num_stops += 1

    def aborts(self):
        return [item.rid for item in self.commands if isinstance(item, ServingAbort)]


def run(scenario, answer=lambda command: (), **options):
    """Runs `scenario(frontend, backend)`; nothing may be left of any request."""

    async def main():
        backend = FakeBackend(answer)
        frontend = FrontendManager(
            model_id="m",
            send_backend=backend,
            recv_backend=backend,
            request_state_wait_timeout_s=0.02,
            **options,
        )
        try:
            return await asyncio.wait_for(scenario(frontend, backend), TIMEOUT_S)
        finally:
            assert not frontend.rid_to_state
            await frontend.stop()
            await frontend.stop()

    return asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)
