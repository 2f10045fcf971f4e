# SPDX-License-Identifier: Apache-2.0
"""Random requests that come, end and are aborted at any time, on few pages: nothing is left."""

from __future__ import annotations

import random

import pytest
import torch

from diffulex import SamplingParams
from diffulex.serving.backend_worker import default_engine_factory
from diffulex.wire.protocol import (
    PromptInput,
    ServingAbort,
    ServingAck,
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingFlushCache,
    ServingGenerate,
    ServingReply,
)

MAX_MODEL_LEN, NUM_PAGES = 99, 6


@pytest.fixture(scope="module")
def engine():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = default_engine_factory(
        "demo", max_num_reqs=8, max_model_len=MAX_MODEL_LEN, num_pages=NUM_PAGES
    )
    yield engine
    engine.exit()
    torch.set_num_threads(threads)


class Client:
    """One request, and what it was told."""

    def __init__(self, rid: str, rng: random.Random) -> None:
        max_tokens = rng.choice([1, 7, 32, 64, 500])
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=rng.choice([0.0, 1.0]),
            ignore_eos=rng.random() < 0.4,
            logprobs=rng.choice([None, 0, 3]),
            stop=rng.choice([(), ("a",), ("\n", "the"), ("e",)]),
            min_tokens=rng.choice([0, min(max_tokens, 5), max_tokens]),
            max_nfe=rng.choice([None, None, 3, 9]),
            max_repetition_run=rng.choice([None, 5]),
            include_stop_str_in_output=rng.random() < 0.3,
        )
        prompt = [rng.randrange(10, 200) for _ in range(rng.randrange(1, MAX_MODEL_LEN - 1))]
        mode = rng.choice(["block_append", "denoise", "both"])
        self.command = ServingGenerate(rid, PromptInput(prompt), params, rng.random() < 0.8, mode)
        self.is_aborted = False
        self.events: list = []

    @property
    def is_over(self) -> bool:
        is_ended = self.events and isinstance(self.events[-1], (ServingReply, ServingError))
        return bool(self.is_aborted or is_ended)

    def only(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def check(self) -> None:
        """Deltas and snapshots add up to the reply, and logprobs belong to its tokens."""
        command, params = self.command, self.command.sampling_params
        (reply,) = self.only(ServingReply)
        deltas = self.only(ServingDelta)
        assert len(reply.token_ids) <= params.max_tokens
        if command.stream and command.stream_mode != "denoise":
            assert "".join(delta.text for delta in deltas) == reply.text
            assert [i for delta in deltas for i in delta.token_ids] == reply.token_ids
        draft: list[int] = []
        for snapshot in self.only(ServingBufferSnapshot):
            assert snapshot.absolute_end <= MAX_MODEL_LEN
            assert snapshot.token_offset <= len(draft)
            draft[snapshot.token_offset :] = snapshot.token_ids
        if command.stream and command.stream_mode != "block_append":
            assert draft[: len(reply.token_ids)] == reply.token_ids
        if params.logprobs is not None:
            assert [item["token_id"] for item in reply.logprobs] == reply.token_ids
            parts = [item for delta in deltas for item in delta.logprobs]
            assert not deltas or parts == reply.logprobs


@pytest.mark.slow
def test_storm(engine):
    rng = random.Random(7)
    clients: dict[str, Client] = {}
    while len(clients) < 150 or not engine.is_finished():
        commands: list = [ServingAbort("nobody")] if rng.random() < 0.1 else []
        while len(clients) < 150 and rng.random() < 0.4:
            client = Client(f"r{len(clients)}", rng)
            clients[client.command.rid] = client
            commands.append(client.command)
        for rid, client in clients.items():
            if not client.is_over and rng.random() < 0.03:
                client.is_aborted = True
                commands.append(ServingAbort(rid))
        if rng.random() < 0.02:
            commands.append(ServingFlushCache("flush"))
        for event in engine.run_serving_tick(commands):
            if not isinstance(event, ServingAck):
                assert not clients[event.rid].is_over, event
                clients[event.rid].events.append(event)
    served = [client for client in clients.values() if not client.is_aborted]
    for client in served:
        client.check()
    # The storm has met what it is for.
    replies = [client.events[-1] for client in served]
    assert len(served) < 150
    assert sum(reply.num_preemptions for reply in replies) > 0
    reasons = {reply.finish_reason for reply in replies}
    assert {"stop", "max_nfe_reached", "max_new_tokens_reached"} <= reasons

    for _ in range(3):  # aborts take effect at step boundaries
        engine.run_serving_tick([])
    engine.run_serving_tick([ServingFlushCache("flush")])
    gauges = engine.serving_stats()["gauges"]
    assert gauges["kv_pages_free"] == gauges["kv_pages"] == NUM_PAGES
    names = ["requests_running", "requests_waiting", "request_slots_used", "requests_known"]
    assert {name: gauges[name] for name in [*names, "sampler_states"]} == dict.fromkeys(
        [*names, "sampler_states"], 0
    )
