# SPDX-License-Identifier: Apache-2.0
"""The router alone: what it chooses, what it remembers, and that prefixes find their replica."""

from __future__ import annotations

import random
from collections import deque

import pytest

from diffulex.distributed.router import (
    CHUNK_TOKENS,
    POLICIES,
    NoReplicaError,
    ReplicaState,
    Router,
    Ticket,
    text_chunks,
    token_chunks,
)


def test_chunks_are_whole_and_chained() -> None:
    ids = list(range(3 * CHUNK_TOKENS + 5))
    chunks = token_chunks(ids)
    assert len(chunks) == 3
    assert all(0 <= chunk < 2**64 for chunk in chunks)
    assert token_chunks(ids[: 2 * CHUNK_TOKENS]) == chunks[:2]
    assert token_chunks(ids, "adapter")[0] != chunks[0]
    # A chunk stands for everything before it as well.
    changed = token_chunks([7, *ids[1:]])
    assert not set(changed) & set(chunks)


def test_chunks_of_texts() -> None:
    text = "ab" * 300
    assert len(text_chunks(text)) == 2
    assert text_chunks(text)[:1] == text_chunks(text[:300])
    assert text_chunks("short") == []
    assert len(text_chunks("\ud800" * 256)) == 1  # a lone surrogate


def test_least_cost_then_fewest_requests_then_in_turn() -> None:
    router = Router(3, 10_000)
    picks = []
    for _ in range(3):
        index = router.choose((), 10)
        picks.append(index)
        router.sent(index, (), 10)
    assert sorted(picks) == [0, 1, 2]
    # Equal cost: 128 tokens that wait are worth a request in flight.
    router = Router(2, 10_000)
    router.started(router.sent(0, (), 0))
    router.started(router.sent(0, (), 0))
    router.sent(1, (), 128)
    assert router.choose((), 1) == 1
    router.sent(1, (), 1)
    assert router.choose((), 1) == 0


def test_a_cached_prefix_attracts_until_the_load_outweighs_it() -> None:
    router = Router(2, 100_000)
    chunks = token_chunks(range(640))
    first = router.choose(chunks, 640)
    router.started(router.sent(first, chunks, 640))
    load = 0
    while router.choose(chunks, 640) == first:
        ticket = router.started(router.sent(first, chunks, 640))
        assert (ticket.num_hit, ticket.num_uncached) == (640, 0)
        load += 1
    assert load == 4  # with the first one 5 * 128 tokens
    assert router.num_hit_tokens(first) == 4 * 640


def test_prefill_counts_until_it_is_over() -> None:
    router = Router(2, 0)
    ticket = router.sent(0, (), 5_000)
    assert router.choose((), 10) == 1
    router.sent(1, (), 10)
    router.sent(1, (), 10)
    assert router.choose((), 10) == 1
    router.finished(router.started(ticket))
    assert router.choose((), 10) == 0
    assert [router.num_inflight(index) for index in range(2)] == [0, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_random_histories(policy: str) -> None:
    """Only ready replicas are chosen, memory is bounded, and nothing is left when all have ended."""
    rng = random.Random(1)
    router = Router(4, 50 * CHUNK_TOKENS, policy)
    prompts = [token_chunks([rng.randrange(99)] * rng.randrange(3_000)) for _ in range(20)]
    open_tickets: list[Ticket] = []
    for _ in range(3_000):
        action = rng.random()
        if action < 0.5:
            chunks = rng.choice(prompts)
            ready = [i for i in range(4) if router.state(i) is ReplicaState.READY]
            if not ready:
                with pytest.raises(NoReplicaError, match=r"expected a replica that is ready"):
                    router.choose(chunks, 100)
                continue
            index = router.choose(chunks, len(chunks) * CHUNK_TOKENS)
            assert index in ready
            open_tickets.append(router.sent(index, chunks, len(chunks) * CHUNK_TOKENS))
        elif action < 0.9 and open_tickets:
            ticket = open_tickets.pop(rng.randrange(len(open_tickets)))
            router.finished(router.started(ticket) if rng.random() < 0.7 else ticket)
        else:
            router.set_state(rng.randrange(4), rng.choice(list(ReplicaState)))
        assert all(len(replica.chunks) <= 50 for replica in router._replicas)
    assert sum(router.num_inflight(i) for i in range(4)) == len(open_tickets)
    for ticket in open_tickets:
        router.finished(ticket)
    for replica in router._replicas:
        assert (replica.num_requests, replica.num_waiting_tokens) == (0, 0)


def test_round_robin_passes_over_those_that_are_not_ready() -> None:
    router = Router(3, 0, "round_robin")
    router.set_state(1, ReplicaState.DRAINING)
    picks = []
    for _ in range(4):
        picks.append(router.choose((), 1))
        router.sent(picks[-1], (), 1)
    assert picks == [0, 2, 0, 2]
    assert router.choose((), 1, among=[2]) == 2
    with pytest.raises(NoReplicaError):
        router.choose((), 1, among=[1])


def test_what_a_lost_replica_had_cached_is_forgotten() -> None:
    router = Router(2, 10_000)
    chunks = token_chunks(range(640))
    router.finished(router.sent(0, chunks, 640))
    router.set_state(0, ReplicaState.DRAINING)
    router.set_state(0, ReplicaState.READY)
    assert router.sent(0, chunks, 640).num_hit == 640
    router.set_state(0, ReplicaState.LOST)
    router.set_state(0, ReplicaState.READY)
    assert router.sent(0, chunks, 640).num_hit == 0
    router.forget()
    assert router.sent(0, chunks, 640).num_hit == 0


def test_the_end_of_a_chain_is_forgotten_before_its_beginning() -> None:
    router = Router(1, 4 * CHUNK_TOKENS)
    chunks = token_chunks(range(6 * CHUNK_TOKENS))
    router.sent(0, chunks, 6 * CHUNK_TOKENS)
    assert router.sent(0, chunks, 6 * CHUNK_TOKENS).num_hit == 4 * CHUNK_TOKENS
    router.resize(2 * CHUNK_TOKENS)
    assert router.sent(0, chunks, 6 * CHUNK_TOKENS).num_hit == 2 * CHUNK_TOKENS


def test_a_replica_is_added() -> None:
    router = Router(1, 10_000)
    chunks = token_chunks([3] * 640)
    router.started(router.sent(0, chunks, 640))
    assert router.add() == 1 == len(router) - 1
    assert router.choose((), 10_000) == 0  # it has not started yet
    router.set_state(1, ReplicaState.READY)
    assert router.choose((), 10) == 1
    assert router.choose(chunks, 640) == 0


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"policy: expected one of prefix, .*, got 'random'"):
        Router(2, 0, "random")
    with pytest.raises(ValueError, match="num_replicas: expected >= 1, got 0"):
        Router(0, 0)


def _conversations(policy: str) -> tuple[float, list[int]]:
    """Share of prompt tokens that are cached where they go, and requests of each replica, for chats
    of eight turns on four replicas, 24 requests at a time."""
    rng = random.Random(3)
    router, num_tokens, num_hit = Router(4, 60_000, policy), 0, 0
    chats = [[chat] * rng.randrange(100, 600) for chat in range(300)]
    turns = [chat for chat in range(300) for _ in range(8)]
    rng.shuffle(turns)
    in_flight: deque[Ticket] = deque()
    for chat in turns:
        prompt = chats[chat]
        prompt.extend(rng.randrange(1_000, 9_000) for _ in range(rng.randrange(50, 250)))
        chunks = token_chunks(prompt)
        ticket = router.sent(router.choose(chunks, len(prompt)), chunks, len(prompt))
        num_tokens, num_hit = num_tokens + len(prompt), num_hit + ticket.num_hit
        in_flight.append(router.started(ticket))
        if len(in_flight) > 24:
            router.finished(in_flight.popleft())
    return num_hit / num_tokens, [router.num_sent(index) for index in range(4)]


@pytest.mark.slow
def test_conversations_stay_where_their_prefix_is() -> None:
    hits, sent = _conversations("prefix")
    without, _ = _conversations("least_loaded")
    assert hits > 1.7 * without
    assert min(sent) > 0.2 * sum(sent)
