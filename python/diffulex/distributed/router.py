# SPDX-License-Identifier: Apache-2.0
"""Which of several equal replicas serves a request: least work, cached prefixes counted.

    cost(i) = tokens of the prompt that replica i has not cached
            + tokens of prompts that wait there for their prefill
            + 128 for each request in flight there

A prompt is known by a chain of hashes, one for each 64 of its tokens, so that equal hashes mean equal
beginnings. The router keeps, for each replica, the chunks that its prefix cache should still hold. It
does no input or output and knows no engine: whoever sends requests tells it what happens to them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

__all__ = [
    "CHUNK_TOKENS",
    "POLICIES",
    "NoReplicaError",
    "ReplicaState",
    "Router",
    "Ticket",
    "text_chunks",
    "token_chunks",
]

POLICIES = ("prefix", "least_loaded", "round_robin")
#: Tokens of a chunk.
CHUNK_TOKENS = 64
#: Characters of a chunk of a text that is not tokenised: about as many tokens.
_CHUNK_CHARS = 256
#: What a request in flight counts, in tokens. 64 to 256 route alike; 1,024 loses cache hits.
_REQUEST_COST = 128


class ReplicaState(str, Enum):
    """What a replica is doing; only a ready one is chosen."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    STARTING = "starting"


class NoReplicaError(RuntimeError):
    """There is no replica to choose."""


class Ticket(NamedTuple):
    """A request that was sent.

    Attributes:
        replica: where to.
        num_uncached: tokens of its prompt that were not cached there.
        num_hit: tokens that were.
    """

    replica: int
    num_uncached: int
    num_hit: int


def _chain(parts: Iterable[bytes], name: str) -> list[int]:
    chunks, before = [], name.encode(errors="replace")
    for part in parts:
        before = hashlib.blake2b(before + b"\0" + part, digest_size=8).digest()
        chunks.append(int.from_bytes(before, "little"))
    return chunks


def token_chunks(token_ids: Sequence[int], name: str = "") -> list[int]:
    """64-bit hashes of the whole chunks of a prompt.

    Args:
        token_ids: the prompt.
        name: of the model or adapter; prompts of different ones share nothing.
    """
    packed = array("q", token_ids)
    ends = range(CHUNK_TOKENS, len(packed) + 1, CHUNK_TOKENS)
    return _chain((packed[end - CHUNK_TOKENS : end].tobytes() for end in ends), name)


def text_chunks(text: str, name: str = "") -> list[int]:
    """As `token_chunks`, of a text or of rendered messages."""
    ends = range(_CHUNK_CHARS, len(text) + 1, _CHUNK_CHARS)
    parts = (text[end - _CHUNK_CHARS : end].encode(errors="replace") for end in ends)
    return _chain(parts, f"text {name}")


@dataclass
class _Replica:
    state: ReplicaState = ReplicaState.READY
    #: Chunks of its prefix cache, the least recently used first.
    chunks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    num_requests: int = 0
    num_waiting_tokens: int = 0
    num_sent: int = 0
    num_hit_tokens: int = 0


class Router:
    """Chooses replicas. Belongs to one thread.

    Args:
        num_replicas: all of them are ready at first.
        capacity_tokens: what the prefix cache of one replica holds; bounds what is remembered.
        policy: `prefix` as above; `least_loaded` without the cache; `round_robin` in turn.

    Raises:
        ValueError: the policy is unknown, or there is no replica.
    """

    def __init__(self, num_replicas: int, capacity_tokens: int, policy: str = "prefix") -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
        if num_replicas < 1:
            raise ValueError(f"num_replicas: expected >= 1, got {num_replicas}")
        self.policy = policy
        self._replicas = [_Replica() for _ in range(num_replicas)]
        self._max_chunks = 0
        self.resize(capacity_tokens)
        self._last = num_replicas - 1

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self) -> int:
        """Counts one more replica, which starts; its number."""
        self._replicas.append(_Replica(ReplicaState.STARTING))
        return len(self._replicas) - 1

    def resize(self, capacity_tokens: int) -> None:
        """Changes what the prefix cache of one replica holds."""
        self._max_chunks = max(0, capacity_tokens) // CHUNK_TOKENS
        for replica in self._replicas:
            self._forget_oldest(replica)

    def choose(
        self, key_chunks: Sequence[int], num_tokens: int, among: Collection[int] | None = None
    ) -> int:
        """The ready replica that costs least, then has the fewest requests, then is next in turn.

        Args:
            key_chunks: of the prompt, by `token_chunks` or `text_chunks`.
            num_tokens: of the prompt.
            among: replicas that come into question; None: all of them.

        Raises:
            NoReplicaError: none of them is ready.
        """
        count = len(self._replicas)
        turn = [(self._last + 1 + step) % count for step in range(count)]
        ready = [
            index
            for index in turn
            if self._replicas[index].state is ReplicaState.READY
            and (among is None or index in among)
        ]
        if not ready:
            raise NoReplicaError("router: expected a replica that is ready, got none")
        if self.policy == "round_robin":
            return ready[0]
        return min(ready, key=lambda index: self._cost(index, key_chunks, num_tokens))

    def _cost(self, index: int, key_chunks: Sequence[int], num_tokens: int) -> tuple[int, int]:
        replica = self._replicas[index]
        uncached = num_tokens
        if self.policy == "prefix":
            uncached -= self._num_hit(replica, key_chunks, num_tokens)
        load = replica.num_waiting_tokens + _REQUEST_COST * replica.num_requests
        return uncached + load, replica.num_requests

    @staticmethod
    def _num_hit(replica: _Replica, key_chunks: Sequence[int], num_tokens: int) -> int:
        num_chunks = 0
        for chunk in key_chunks:
            if chunk not in replica.chunks:
                break
            num_chunks += 1
        return min(num_tokens, num_chunks * CHUNK_TOKENS)

    def sent(self, index: int, key_chunks: Sequence[int], num_tokens: int) -> Ticket:
        """A request went to a replica, whose cache has its prompt from now on."""
        replica = self._replicas[index]
        num_hit = self._num_hit(replica, key_chunks, num_tokens)
        self._last = index
        replica.num_sent += 1
        replica.num_requests += 1
        replica.num_hit_tokens += num_hit
        ticket = Ticket(index, num_tokens - num_hit, num_hit)
        replica.num_waiting_tokens += ticket.num_uncached
        # The last chunks of a chain are forgotten first: without its beginning no chunk is of use.
        for chunk in reversed(key_chunks):
            replica.chunks[chunk] = None
            replica.chunks.move_to_end(chunk)
        self._forget_oldest(replica)
        return ticket

    def _forget_oldest(self, replica: _Replica) -> None:
        while len(replica.chunks) > self._max_chunks:
            replica.chunks.popitem(last=False)

    def started(self, ticket: Ticket) -> Ticket:
        """The prefill of a request is over; returns what `finished` is to be called with."""
        self._replicas[ticket.replica].num_waiting_tokens -= ticket.num_uncached
        return ticket._replace(num_uncached=0)

    def finished(self, ticket: Ticket) -> None:
        """A request ended, in whatever way; once for each that was sent."""
        replica = self._replicas[ticket.replica]
        replica.num_requests -= 1
        replica.num_waiting_tokens -= ticket.num_uncached

    def set_state(self, index: int, state: ReplicaState) -> None:
        """Changes the state of a replica; one that is lost or starts has nothing cached."""
        replica = self._replicas[index]
        replica.state = state
        if state in (ReplicaState.LOST, ReplicaState.STARTING):
            replica.chunks.clear()

    def forget(self) -> None:
        """The prefix caches were emptied."""
        for replica in self._replicas:
            replica.chunks.clear()

    def state(self, index: int) -> ReplicaState:
        """The state of a replica."""
        return self._replicas[index].state

    def num_inflight(self, index: int) -> int:
        """Requests that were sent to a replica and have not ended."""
        return self._replicas[index].num_requests

    def num_sent(self, index: int) -> int:
        """Requests that were ever sent to a replica."""
        return self._replicas[index].num_sent

    def num_hit_tokens(self, index: int) -> int:
        """Tokens of their prompts that were taken to be cached there."""
        return self._replicas[index].num_hit_tokens
