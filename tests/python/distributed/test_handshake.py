# SPDX-License-Identifier: Apache-2.0
"""What the first rank and a worker say to each other before the first step, and what is refused."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from diffulex import ConfigError
from diffulex.config.config import Config, read_model_facts
from diffulex.distributed.group import WorkerGroup
from diffulex.distributed.layout import LOOPBACK
from diffulex.distributed.store import PeerError, join_store, make_store, meet, place_of
from diffulex.engine.ranks import executor, worker
from diffulex.engine.ranks.executor import ProcessFollowers
from diffulex.errors import EngineDeadError
from fixtures.processes import is_there, until

OWN = worker.versions()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProcessFollowers]]:
    """Followers whose workers reply the same, whatever they are told."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(executor, "_TARGET", "children:answers")
    made: list[ProcessFollowers] = []
    limits = {"device": "cpu", "tensor_parallel_size": 2, "distributed_timeout_seconds": 1}
    facts = read_model_facts("demo", limits)

    def followers(*answers: str, **settings: Any) -> ProcessFollowers:
        config = Config.resolve("demo", facts, {**limits, **settings})
        monkeypatch.setenv("ANSWERS", json.dumps(answers))
        made.append(ProcessFollowers(config, facts.model_name))
        return made[-1]

    yield followers
    for each in made:
        each.close()


def measured(followers: ProcessFollowers) -> None:
    followers.measure()
    followers.num_pages()


@pytest.mark.parametrize(
    ("answers", "call", "text"),
    [
        ([], ProcessFollowers.connect, "start within 0.1 s"),
        ([OWN], ProcessFollowers.connect, "load its weights within 1 s"),
        ([], measured, "measure its memory within 1 s"),
        ([], ProcessFollowers.started, "prepare its steps within 1 s"),
    ],
)
def test_a_worker_that_takes_too_long_is_named_with_its_stage(
    make: Any, monkeypatch: pytest.MonkeyPatch, answers: list[str], call: Any, text: str
) -> None:
    monkeypatch.setattr(executor, "_HELLO_S", 120.0 if answers else 0.1)
    followers = make(*answers)
    (pid,) = [child.pid for child in followers._group._pipes.children]
    with pytest.raises(EngineDeadError) as late:
        call(followers)
    limit = "" if "start" in text else " (distributed_timeout_seconds)"
    assert str(late.value) == f"rank 1 (pid {pid}, cpu) did not {text}{limit}"
    until(lambda: not is_there(pid))


def test_other_versions_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError) as other:
        make("diffulex_ext 0.0.1 and torch 1.0").connect()
    text = f"rank 1: expected {OWN} as rank 0 has, got diffulex_ext 0.0.1 and torch 1.0"
    assert str(other.value) == text


def test_another_checkpoint_is_refused(make: Any) -> None:
    own = worker.checkpoint_digest(read_model_facts("demo", {}).model_dir)
    followers = make(OWN, "cafe0123")
    followers._timeout_s = 120.0
    with pytest.raises(ConfigError) as other:
        followers.connect()
    text = f"rank 1: expected the checkpoint of rank 0 (sha256 {own}), got cafe0123"
    assert str(other.value) == text


def test_checkpoints_differ_by_their_description_or_their_index(tmp_path: Path) -> None:
    digests = {worker.checkpoint_digest(tmp_path)}
    for name in ("config.json", "model.safetensors.index.json", "config.json"):
        with (tmp_path / name).open("a") as file:
            file.write("{}")
        digests.add(worker.checkpoint_digest(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    digests.add(worker.checkpoint_digest(tmp_path))
    assert len(digests) == 4


@pytest.mark.slow
def test_a_message_out_of_order_is_the_end_of_the_group() -> None:
    group = WorkerGroup("diffulex.engine.ranks.worker:run_worker", 2, ["cpu"], {})
    (pid,) = [child.pid for child in group._pipes.children]
    group.send((1, None))
    group.send(("connect", 0))
    until(lambda: group.death is not None)
    text = f"rank 1 (pid {pid}, cpu) could not start: ValueError: worker: expected the message load, got"
    assert str(group.death) == f"{text} 'connect'"
    group.close(("exit",))
    assert not is_there(pid)


def test_a_message_that_nobody_knows_is_refused() -> None:
    inbox = queue.SimpleQueue[Any]()
    inbox.put(("capture", 1))
    process: Any = worker._Worker(None, inbox)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^worker: expected a known message, got 'capture'$"):
        process._serve(None)


def free_port() -> int:
    """One that no program gets by asking for any."""
    ports = random.Random(os.getpid())
    while True:
        port = ports.randrange(20000, 30000)
        try:
            socket.create_server((LOOPBACK, port)).close()
        except OSError:
            continue
        return port


def connecting() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "diffulex-connect"}


def test_the_port_is_free_again_when_a_rank_has_died_while_others_connect(make: Any) -> None:
    """Another attempt gets it, and the ranks of the first one wait there no longer."""
    digest = worker.checkpoint_digest(read_model_facts("demo", {}).model_dir)
    settings = {"master_port": free_port(), "distributed_timeout_seconds": 600}

    def fail_to_connect() -> None:
        followers = make(OWN, digest, **settings)
        (pid,) = [child.pid for child in followers._group._pipes.children]
        others = connecting()  # of earlier attempts, which may end meanwhile
        with ThreadPoolExecutor(1) as pool:
            connected = pool.submit(followers.connect)
            until(lambda: connecting() - others or connected.done())
            assert not connected.done()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match=rf"^rank 1 \(pid {pid}, cpu\) was killed by"):
                connected.result()
        followers.close()

    fail_to_connect()
    fail_to_connect()
    socket.create_server((LOOPBACK, settings["master_port"])).close()
    until(lambda: not connecting())


def test_ranks_of_an_attempt_that_failed_do_not_meet_those_of_the_next() -> None:
    """They may still look for its port, where the store of the next one is by then."""
    store = make_store(2)
    first, second = (place_of(store) for _ in range(2))
    assert first[:2] == second[:2]
    old, new = (join_store(place, 2, 60.0) for place in (first, second))
    old.set("rank 1", "")
    with pytest.raises(PeerError, match=r"^rank 0 waited 0.05 s for rank 1 to connect"):
        meet(new, 0, 2, 0.05)
    join_store(second, 2, 60.0).set("rank 1", "")
    meet(new, 0, 2, 60.0)
