# SPDX-License-Identifier: Apache-2.0
"""The loop of the backend, with queues in memory and a fake engine."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_engine import BlockEngine
from diffulex import SamplingParams
from diffulex.serving.backend_worker import SyncBackendWorker
from diffulex.serving.tick import EngineDeadError
from diffulex.serving.zmq_queue import MessageDecodeError
from diffulex.wire.protocol import (
    PromptInput,
    ServingAbort,
    ServingAck,
    ServingBatch,
    ServingError,
    ServingGenerate,
    ServingReply,
    ServingShutdown,
    serving_command_from_dict,
    serving_command_to_dict,
)


class FakeQueue:
    """Either end of a queue; batches are taken apart."""

    num_dropped = 0

    def __init__(self, *items):
        self.items = deque(items)
        self.num_stops = 0
        self.num_gets = 0

    def get(self, timeout_s=None):
        self.num_gets += 1
        item = self.items.popleft()  # IndexError: the loop would wait for ever
        if isinstance(item, Exception):
            raise item
        return item

    def empty(self):
        return not self.items

    def put(self, item):
        self.items.extend(item.events if isinstance(item, ServingBatch) else [item])

    def stop(self, linger_s=0.0):
        self.num_stops += 1


def generate(rid, **params):
    return ServingGenerate(rid, PromptInput("hi"), SamplingParams(**{"max_tokens": 8, **params}))


def make(*commands, engine=None, **options):
    engine = engine or BlockEngine()
    worker = SyncBackendWorker(
        model="m",
        engine_kwargs=None,
        recv_frontend=FakeQueue(*commands),
        send_frontend=FakeQueue(),
        engine_factory=lambda model, **kwargs: engine,
        **options,
    )
    return worker, engine


def sent(worker):
    return list(worker.send_frontend.items)


def test_serves_until_shutdown():
    worker, engine = make(generate("a"), generate("b"))
    worker.init_engine()
    while {event.rid for event in sent(worker) if isinstance(event, ServingReply)} != {"a", "b"}:
        worker.normal_loop()
    worker.recv_frontend.put(ServingShutdown())
    worker.run_forever()
    assert engine.exited
    assert worker.engine is None
    assert worker.recv_frontend.num_stops == worker.send_frontend.num_stops == 1
    worker.shutdown()  # again


def test_engine_is_built_once_with_its_settings():
    calls = []

    def factory(model, **kwargs):
        calls.append((model, kwargs))
        return BlockEngine()

    ready = FakeQueue()
    kwargs = {"block_size": 4}
    worker = SyncBackendWorker("m", kwargs, FakeQueue(), FakeQueue(), factory, ready)
    kwargs["block_size"] = 8
    worker.init_engine()
    worker.init_engine()
    assert calls == [("m", {"block_size": 4})]
    assert list(ready.items) == [{"status": "ready", "info": {}}]


def test_waits_only_when_idle():
    worker, _ = make(generate("a"))
    worker.init_engine()
    worker.normal_loop()
    assert worker.recv_frontend.num_gets == 1
    worker.normal_loop()  # work is left: an empty queue must not be waited for
    assert worker.recv_frontend.num_gets == 1


def test_takes_everything_that_is_queued():
    worker, engine = make(generate("a"), generate("b"), ServingAbort("a"))
    worker.init_engine()
    worker.normal_loop()
    assert engine.num_steps == 1
    assert engine.aborted == [0]


def test_commands_before_a_shutdown_still_run():
    worker, engine = make(generate("a", max_tokens=99), generate("b", max_tokens=99))
    worker.recv_frontend.put(ServingShutdown())
    worker.run_forever()
    assert engine.num_steps == 1
    errors = [event for event in sent(worker) if isinstance(event, ServingError)]
    assert [error.rid for error in errors] == ["a", "b"]
    assert {(error.code, error.http_status) for error in errors} == {("server_shutdown", 503)}


def test_process_input_commands():
    worker, _ = make()
    commands = [ServingAbort("a"), ServingShutdown(), ServingAbort("b")]
    assert worker.process_input_commands(commands) == [ServingAbort("a"), ServingAbort("b")]
    assert worker.shutdown_requested


def test_drain_finishes_what_runs():
    worker, _ = make(generate("a"), ServingShutdown("drain"))
    worker.run_forever()
    assert isinstance(sent(worker)[-1], ServingReply)


def test_drain_has_a_deadline():
    worker, _ = make(generate("a", max_tokens=400), ServingShutdown("drain", 0.0))
    worker.run_forever()
    assert sent(worker)[-1].code == "server_shutdown"


def test_a_signal_between_two_rounds_tells_requests():
    worker, _ = make(generate("a", max_tokens=99))
    one_round = worker.normal_loop

    def interrupted_after():
        one_round()
        worker.shutdown_requested = True

    worker.normal_loop = interrupted_after
    worker.run_forever()
    assert (sent(worker)[-1].rid, sent(worker)[-1].code) == ("a", "server_shutdown")


def test_failed_step_tells_everybody():
    worker, engine = make(generate("a"), generate("b"))
    engine.failure = RuntimeError("device lost")
    with pytest.raises(EngineDeadError):
        worker.run_forever()
    assert [(e.rid, e.code, e.http_status) for e in sent(worker)] == [
        ("a", "engine_dead", 500),
        ("b", "engine_dead", 500),
    ]
    assert engine.exited


def test_an_engine_that_does_not_end_hides_nothing(caplog):
    worker, engine = make(generate("a"))
    engine.failure = RuntimeError("device lost")
    engine.exit = lambda: 1 // 0
    with pytest.raises(EngineDeadError, match="device lost"):
        worker.run_forever()
    assert "ZeroDivisionError" in caplog.text
    assert worker.recv_frontend.num_stops == worker.send_frontend.num_stops == 1


def test_long_reasons_are_cut():
    worker, _ = make(MessageDecodeError("x" * 10_000, {"rid": "a"}), generate("b"))
    worker.init_engine()
    worker.normal_loop()
    assert sent(worker)[0].message == "x" * 500


def test_unreadable_commands_are_answered():
    worker, engine = make(
        MessageDecodeError("no map"),
        MessageDecodeError("bad", {"rid": "a"}),
        MessageDecodeError("bad", {"op_id": "1"}),
        MessageDecodeError("bad", {"rid": 3}),
        generate("b"),
    )
    worker.init_engine()
    worker.normal_loop()
    events = sent(worker)[:2]
    assert events == [
        ServingError("a", "bad", "bad_command", 400),
        ServingAck("1", False, "bad"),
    ]
    assert engine.num_steps == 1


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
fields = ["type", "rid", "input", "sampling_params", "stream", "stream_mode", "queue_timeout_s"]
fields += ["deadline_s", "mode", "op_id", "profile_prefix", "created_time", "denoise_detail"]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    base=st.sampled_from(
        [
            serving_command_to_dict(item)
            for item in (generate("a"), ServingAbort("a"), ServingShutdown("drain", 1.0))
        ]
    ),
    changes=st.dictionaries(st.sampled_from(fields), values, min_size=1),
    params=st.dictionaries(st.sampled_from(["max_tokens", "stop", "seed", "top_p", "x"]), values),
)
def test_no_malformed_command_ends_the_loop(base, changes, params):
    data = {**base, **changes}
    if isinstance(data.get("sampling_params"), dict):
        data["sampling_params"] = {**data["sampling_params"], **params}
    try:
        item = serving_command_from_dict(data)
    except Exception as error:  # as the queue does
        item = MessageDecodeError(str(error), data)
    worker, engine = make(item, generate("good", max_tokens=1))
    worker.init_engine()
    worker.normal_loop()
    assert engine.num_added >= 1
