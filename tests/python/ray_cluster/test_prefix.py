# SPDX-License-Identifier: Apache-2.0
"""Prefixes of prompts in Ray Serve: the door, its router, and an application of two replicas."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.extras import need_extra

need_extra("ray", "ray", "fastapi", "zmq")

sys.path.append(str(Path(__file__).parents[1] / "server"))  # whose engines import each other

from ray.exceptions import ActorUnavailableError  # noqa: E402

import slow_engine  # noqa: E402
from diffulex.distributed.router import text_chunks, token_chunks  # noqa: E402
from diffulex.errors import ConfigError  # noqa: E402
from diffulex.ray import prefix  # noqa: E402
from diffulex.ray.serve import _ReplicaBehindDoor, build_openai_app, openai_app  # noqa: E402
from ray_cluster.conftest import is_running, kill, until  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

URL = "http://127.0.0.1:8124"
SCOPE = {"type": "http", "path": "/generate", "headers": [(b"a", b"b")], "state": object()}


def request_of(**body: Any) -> prefix.HttpRequest:
    return prefix.read_request(SCOPE, json.dumps(body).encode())


def test_what_a_router_knows_of_a_request() -> None:
    ids, text = list(range(200)), "word " * 200
    own = request_of(prompt=ids, model="m")
    assert own.scope == {key: SCOPE[key] for key in ("type", "path", "headers")}
    assert (own.chunks, own.num_tokens) == (token_chunks(ids, "m"), 200)
    own = request_of(prompt=text)
    assert (own.chunks, own.num_tokens) == (text_chunks(text), 250)
    first = {"role": "user", "content": text}
    short = request_of(messages=[first]).chunks
    # A conversation that goes on begins as it did; the last chunk has the end of the list.
    assert len(short) == 4
    assert request_of(messages=[first, first]).chunks[:3] == short[:3]
    assert request_of(input=[first]).chunks == short
    assert request_of(messages=[first], model="other").chunks != short
    nothing = (b"", b"[1]", b"{", b"\xff", b'{"prompt": 3}', b'{"prompt": [1, true]}')
    strange = (b'{"prompt": ' + b"[" * 100_000, b'{"model": "\\ud800"}')
    for body in (*nothing, *strange):
        own = prefix.read_request(SCOPE, body)
        assert not own.chunks
        assert own.body == body
    assert len(request_of(prompt=[2**70] * 64).chunks) == 1
    assert len(request_of(prompt=text, model="\ud800").chunks) == 3


def test_what_holds_up_a_door_is_not_read() -> None:
    size = 1 << 20
    ids, text = request_of(prompt=[1] * 70_000), request_of(prompt="x" * 280_000)
    for own in (ids, text):  # known by their first 65,536 tokens
        assert (len(own.chunks), own.num_tokens) == (1024, 70_000)
    assert ids.chunks == request_of(prompt=[1] * (1 << 16)).chunks
    frame = len(json.dumps({"prompt": ""}))
    assert len(request_of(prompt="x" * (size - frame)).chunks) == 1024
    own = request_of(prompt="x" * (size - frame + 1))
    assert (own.chunks, own.num_tokens, len(own.body)) == ((), size // 4, size + 1)


def pending(*args: Any) -> Any:
    """A request that is to be routed; in a running loop."""
    context = SimpleNamespace()
    return SimpleNamespace(args=args, future=asyncio.Future(), routing_context=context)


class Routing(prefix.PrefixRouter):
    """A router without a deployment; tests call it as Serve does."""

    def __init__(self, *names: str) -> None:
        self._use_replica_queue_len_cache = False
        self.initialize_state()
        self._router.resize(10_000)
        self._place(set(names))

    async def order(self, request: Any) -> list[str]:
        """Names of the replicas, the best one first."""
        names = [SimpleNamespace(replica_id=name) for name in [*sorted(self._places), "?"]]
        ranks = await self.choose_replicas(names, request)
        assert all(len(rank) == 1 for rank in ranks)
        return [rank[0].replica_id for rank in ranks]

    async def send(self, request: Any, name: str) -> None:
        """As far as Serve goes before it waits for the replica."""
        await self.order(request)
        request.future.set_result(name)
        await asyncio.sleep(0)
        self.on_send_request(name)

    def counts(self) -> list[int]:
        """Requests in flight by replica."""
        return [self._router.num_inflight(self._places[name]) for name in sorted(self._places)]


def test_replicas_come_and_go() -> None:
    async def run() -> None:
        router = Routing("a", "b", "c")
        assert sorted(await router.order(None)) == ["a", "b", "c"]
        request = pending(request_of(prompt=[5] * 640))
        assert sorted(await router.order(request)) == ["a", "b", "c"]
        assert request.routing_context.should_backoff
        await router.send(request, "b")
        router.on_request_routed(request, "b", None)
        assert router.counts() == [0, 1, 0]
        again = pending(*request.args)
        assert (await router.order(again))[0] == "b"  # 128 in flight are less than 640
        again.future.cancel()
        await asyncio.sleep(0)
        assert (await router.order(None))[-1] == "b"
        router.on_request_completed("b", "1")
        router._place({"a", "c", "d"})  # where b was, with nothing cached
        assert len(router._router) == 3
        prompt = prefix._prompt_of(request)
        router.on_send_request("b")  # gone meanwhile
        router.on_request_routed(request, "b", None)
        router.on_request_completed("b", "2")
        assert router.counts() == [0, 0, 0]
        assert [router._router.sent(index, *prompt).num_hit for index in range(3)] == [0, 0, 0]

    asyncio.run(run())


def test_a_request_counts_until_it_is_completed() -> None:
    async def run() -> None:
        router = Routing("a", "b")
        # The answer is over before Serve says that the request was routed.
        request = pending(request_of(prompt=[5] * 640))
        await router.send(request, "a")
        router.on_request_completed("a", "1")
        router.on_request_routed(request, "a", None)
        assert router.counts() == [0, 0]
        assert (await router.order(pending(*request.args)))[0] == "a"
        assert (await router.order(pending(*request.args)))[0] == "a"  # 640 are more than 128
        # One is refused by a, which completes it when b has taken it.
        router = Routing("a", "b")
        await router.send(request := pending(request_of(prompt=[5] * 640)), "a")
        request.future = asyncio.Future()
        await router.send(request, "b")
        router.on_request_routed(request, "b", None)
        assert router.counts() == [1, 1]
        router.on_request_completed("a", "1")
        assert router.counts() == [0, 1]
        router.on_request_completed("b", "1")
        assert router.counts() == [0, 0]
        assert not router._tickets
        assert not router._expected

    asyncio.run(run())


def test_requests_count_before_they_are_sent() -> None:
    async def run() -> None:
        router = Routing("a", "b", "c", "d")
        requests = [pending(request_of(prompt=[number] * 64)) for number in range(12)]
        for request in requests:
            await router.order(request)
        assert router.counts() == [3, 3, 3, 3]
        for request in requests:  # Serve asks again while replicas are full
            await router.order(request)
        assert router.counts() == [3, 3, 3, 3]
        for request in requests[:6]:
            request.future.set_result("a")
        for request in requests[6:]:
            request.future.cancel()
        await asyncio.sleep(0)
        assert router.counts() == [0, 0, 0, 0]
        assert not router._expected

    asyncio.run(run())


class Relay:
    """Stands for the handle: each call sends what it is told, or fails."""

    def __init__(self, *calls: list[Any]) -> None:
        self.calls, self.asked, self.num_cancelled = list(calls), [], 0
        self.relay = SimpleNamespace(remote=self._remote)

    def options(self, *, stream: bool) -> Relay:
        assert stream
        return self

    def _remote(self, request: prefix.HttpRequest) -> Any:
        self.asked.append(request)
        return _Answer(self, self.calls.pop(0))


class _Answer:
    def __init__(self, relay: Relay, messages: list[Any]) -> None:
        self._relay, self._messages = relay, messages

    async def __aiter__(self) -> Any:
        for message in self._messages:
            if isinstance(message, Exception):
                raise message
            yield message

    def cancel(self) -> None:
        self._relay.num_cancelled += 1


def ask(relay: Relay, *body: bytes, most: int = 100) -> list[Any]:
    """What a door sends for a body in pieces."""
    door, sent = prefix.Door(relay, most), []
    pieces = [{"type": "http.request", "body": piece, "more_body": True} for piece in body]
    pieces[-1]["more_body"] = False

    async def receive() -> Any:
        return pieces.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(door._answer(SCOPE, receive, send))
    return sent


def test_a_door(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = logging.getLogger("ray.serve")
    monkeypatch.setattr(log, "warning", lambda text, *values: lines.append(text % values))
    lost = ActorUnavailableError("lost", b"0" * 16)
    answer = [{"type": "http.response.start"}, {"type": "http.response.body"}]
    relay = Relay(answer)
    assert ask(relay, b'{"prompt"', b": 3}") == answer
    assert (relay.asked[0].body, relay.num_cancelled) == (b'{"prompt": 3}', 1)
    # What is too much is refused by the replica, which needs no more of it for that.
    relay = Relay(answer)
    assert ask(relay, bytes(60), bytes(60), bytes(60)) == answer
    assert len(relay.asked[0].body) == 120
    relay = Relay([lost], [lost], answer)
    assert ask(relay, b"") == answer
    assert relay.num_cancelled == 3
    assert [line.partition(":")[0] for line in lines] == [
        "replica lost, try 1 of 3",
        "replica lost, try 2 of 3",
    ]
    start, body = ask(Relay([lost], [lost], [lost]), b"")
    assert start["status"] == 503
    assert json.loads(body["body"])["error"]["code"] == "replica_lost"
    relay = Relay([answer[0], lost], answer)
    with pytest.raises(ActorUnavailableError):  # its client has seen a part
        ask(relay, b"")
    assert len(relay.asked) == 1


def test_an_application_learns_that_its_client_has_gone() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], (await receive())["body"]))
        await send({"type": "http.response.start"})
        seen.append((await receive())["type"])

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("of the application")

    async def take(app: Any, count: int) -> None:
        answer = prefix.answer_of(app, request_of(prompt="x"))
        for _ in range(count):
            await anext(answer)
        await answer.aclose()  # type: ignore[attr-defined]

    async def cancel_twice() -> None:
        async def stays(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start"})
            await asyncio.Event().wait()

        async def read() -> None:
            async for _ in prefix.answer_of(stays, request_of(prompt="x")):
                is_begun.set()

        is_begun, before = asyncio.Event(), asyncio.all_tasks()
        reader = asyncio.create_task(read())
        await is_begun.wait()
        (running,) = asyncio.all_tasks() - before - {reader}
        for _ in range(2):
            reader.cancel()
            await asyncio.sleep(0.05)
        assert reader.cancelled()
        assert running.cancelled()

    asyncio.run(cancel_twice())
    asyncio.run(take(app, 1))
    assert seen == [("/generate", b'{"prompt": "x"}'), "http.disconnect"]
    with pytest.raises(ValueError, match="of the application"):
        asyncio.run(take(fails, 1))


def test_a_door_has_the_environment_of_the_replicas() -> None:
    environment = {"env_vars": {"NAME": "value"}}
    for given in ({}, {"runtime_env": environment}):
        config = {"ray_actor_options": {"num_cpus": 3, **given}}
        door = build_openai_app(
            {"model": "demo", "deployment_config": config, "request_router": "prefix"}
        )._bound_deployment
        assert door.name == "door"
        assert door.ray_actor_options == {"num_cpus": 1, **given}


def test_a_replica_ends_though_its_application_does_not_stop() -> None:
    class Lifespan:
        async def __aexit__(self, *error: Any) -> None:
            raise ValueError("of the application")

    class Supervisor:
        async def stop(self) -> None:
            calls.append("stop")

        def stop_backend(self, timeout_s: float) -> None:
            calls.append("stop_backend")

    class Replica(_ReplicaBehindDoor):
        def __del__(self) -> None:  # type: ignore[override]
            """Nothing waits for the real one when the object goes."""

    calls: list[str] = []
    replica = Replica.__new__(Replica)
    replica._lifespan, replica._supervisor = Lifespan(), Supervisor()
    with pytest.raises(ValueError, match="of the application"):
        asyncio.run(_ReplicaBehindDoor.__del__(replica))
    assert calls == ["stop", "stop_backend"]


def test_other_routers_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        build_openai_app({"model": "demo", "request_router": "random"})
    assert str(error.value) == "request_router: expected prefix, or none, got 'random'"


def post(prompt_id: int, **body: Any) -> Any:
    body = {"prompt": [prompt_id] * 640, "max_tokens": 4, **body}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/generate", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=120)


@pytest.fixture
def served(cluster: Any, tmp_path: Path) -> Iterator[Path]:
    """Two replicas behind a door; the log of their engines."""
    from ray import serve

    node = cluster.add_node(num_cpus=4)
    log = tmp_path / "engines.log"
    actor = {"num_cpus": 1, "runtime_env": {"env_vars": {"DIFFULEX_TEST_LOG": str(log)}}}
    app = openai_app(
        {"model": "demo", "device": "cpu", "max_num_reqs": 8},
        {"num_replicas": 2, "health_check_period_s": 1.0, "ray_actor_options": actor},
        request_router="prefix",
        engine_factory=slow_engine.make_paged,
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": 8124})
    serve.run(app, route_prefix="/")
    yield log
    serve.shutdown()
    cluster.remove_node(node)


def places(log: Path) -> dict[int, list[int]]:
    """Engines by the prompts that came to them, in their order."""
    found: dict[int, list[int]] = {}
    for line in log.read_text().splitlines():
        if line.startswith("prompt"):
            _, pid, prompt = map(int, line.replace("prompt", "0").split())
            found.setdefault(prompt, []).append(pid)
    return found


def test_prompts_stay_where_they_are_cached(served: Path) -> None:
    prompts = range(3, 8)  # taken in turns, they would not stay

    def ask_all() -> bool:
        try:
            for prompt in prompts:
                post(prompt).close()
        except OSError:  # the proxy hears of the application later than `run` returns
            return False
        return all(len(pids) > 1 and pids[-1] == pids[-2] for pids in places(served).values())

    until(ask_all)  # replicas tell of their caches once in a second
    for _ in range(4):
        assert ask_all()
    last = {prompt: pids[-5:] for prompt, pids in places(served).items()}
    assert all(len(set(pids)) == 1 for pids in last.values())
    assert len({pids[0] for pids in last.values()}) == 2

    # A client that leaves ends its request.
    stream = post(3, max_tokens=2000, stream=True)
    assert stream.readline()
    stream.close()
    until(lambda: "abort" in served.read_text())

    # A replica that is killed before the answer begins: another one decodes the request.
    engine = last[3][0]
    actor = int(Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1])
    count = len(places(served)[3])
    with ThreadPoolExecutor(1) as pool:
        # Far longer than it takes to see that it has begun.
        answer = pool.submit(lambda: json.load(post(3, max_tokens=2000)))
        until(lambda: len(places(served)[3]) > count)
        kill(actor)
        assert len(answer.result()["token_ids"]) == 2000
    assert places(served)[3][-1] != engine
    until(lambda: not is_running(engine))
