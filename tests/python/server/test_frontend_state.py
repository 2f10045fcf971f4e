# SPDX-License-Identifier: Apache-2.0
"""Events that wait for a slow reader: fewer and larger, never less."""

from __future__ import annotations

import asyncio
import random
from collections import deque

from diffulex.serving.frontend import FrontendReqState
from diffulex.wire.protocol import ServingBufferSnapshot, ServingDelta, ServingReply


def delta(rid, offset, text):
    return ServingDelta(rid, offset, text, [ord(char) for char in text], 1)


def snapshot(offset, ids, text=None, **fields):
    start = 10 + offset
    return ServingBufferSnapshot("a", offset, start, start + len(ids), text, list(ids), 1, **fields)


def reply():
    return ServingReply("a", "x", [1], 1)


def test_the_documented_fields_come_first():
    events, event = deque([reply()]), asyncio.Event()
    state = FrontendReqState("a", events, event)
    assert (state.rid, state.events, state.event) == ("a", events, event)


class TestCoalescing:
    def state(self, *events):
        state = FrontendReqState("a")
        for event in events:
            state.append(event)
        return state

    def test_newest_snapshot_wins(self):
        state = self.state(snapshot(0, [1, 2]), snapshot(0, [3, 4, 5]))
        assert list(state.events) == [snapshot(0, [3, 4, 5])]
        assert state.num_coalesced == 1

    def test_committed_part_of_the_older_one_is_kept(self):
        old = snapshot(0, [1, 2, 9], confidences=[0.1, 0.2, 0.3], blocks=[{"id": 0}, {"id": 1}])
        new = snapshot(2, [3, 4], confidences=[0.4, 0.5], blocks=[{"id": 1, "x": 1}])
        (merged,) = self.state(old, new).events
        assert merged.token_ids == [1, 2, 3, 4]
        assert (merged.token_offset, merged.absolute_start, merged.absolute_end) == (0, 10, 14)
        assert merged.confidences == [0.1, 0.2, 0.4, 0.5]
        assert merged.blocks == [{"id": 0}, {"id": 1, "x": 1}]

    def test_any_merge_draws_the_same_picture(self):
        rng = random.Random(0)
        for _ in range(200):
            events, offset, known = [], 0, 0
            for _ in range(rng.randint(2, 8)):
                offset = rng.randint(offset, known)
                ids = [rng.randint(1, 99) for _ in range(rng.randint(1, 6))]
                known = offset + len(ids)
                events.append(snapshot(offset, ids))
            drafts = []
            for sequence in (events, list(self.state(*events).events)):
                draft: list[int] = []
                for event in sequence:
                    draft[event.token_offset :] = event.token_ids
                drafts.append(draft)
            assert drafts[0] == drafts[1]

    def test_texts_that_cannot_be_joined_stay_apart(self):
        assert len(self.state(snapshot(0, [1], "a"), snapshot(1, [2], "b")).events) == 2
        assert len(self.state(snapshot(0, [1], "a"), snapshot(0, [2], "b")).events) == 1

    def test_many_deltas_become_one(self):
        deltas = [delta("a", i, chr(97 + i % 26)) for i in range(200)]
        state = self.state(*deltas, reply())
        events = list(state.events)
        assert len(events) < 70
        assert isinstance(events[-1], ServingReply)
        assert "".join(e.text for e in events[:-1]) == "".join(e.text for e in deltas)
        assert [i for e in events[:-1] for i in e.token_ids] == [
            i for e in deltas for i in e.token_ids
        ]

    def test_both_kinds_together_stay_bounded(self):
        state = FrontendReqState("a")
        for i in range(500):
            state.append(delta("a", i, "x"))
            state.append(snapshot(i, [1, 2]))
        state.append(reply())
        events = list(state.events)
        assert len(events) < 70
        assert "".join(e.text for e in events if isinstance(e, ServingDelta)) == "x" * 500

    def test_nothing_follows_the_end(self):
        state = self.state(reply(), delta("a", 0, "late"))
        assert list(state.events) == [reply()]
