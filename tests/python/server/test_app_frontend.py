# SPDX-License-Identifier: Apache-2.0
"""Which members of a frontend the application uses, and that it asks for no others."""

from __future__ import annotations

import ast
from enum import Enum
from pathlib import Path

import pytest

import diffulex.server
import diffulex.serving
from diffulex.server.http.api_server import create_app
from diffulex.server.http.app_frontend import AppFrontend, completed
from diffulex.serving.frontend import FrontendManager, ServerState
from diffulex.wire.protocol import ServingError
from fake_frontend import FakeFrontend, MinimalFake
from http_client import AppClient, check_error

#: Where a member is looked up that may be absent, and why it may.
PROBES = {
    ("server/http/api_errors.py", "getattr(error, 'error', "): (
        "frontends of other programs raise errors of their own"
    ),
    ("server/http/app_frontend.py", "getattr(self._given, name, "): (
        "frontends of other programs may have less"
    ),
    ("server/http/app_frontend.py", "hasattr(self._given, 'on_abort')"): (
        "frontends of other programs may not call it, and have no place for it"
    ),
    ("server/openai/tokenizer_routes.py", "getattr(backend, "): (
        "tokenizers of transformers have different attributes"
    ),
}


def _probes() -> list[tuple[str, str]]:
    """Every `getattr` with a default and every `hasattr`: file and source."""
    found = []
    for package in (diffulex.server, diffulex.serving):
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                name, num = node.func.id, len(node.args)
                if (name, num) == ("getattr", 3) or name == "hasattr":
                    found.append((path.relative_to(root.parent).as_posix(), ast.unparse(node)))
    return found


def test_members_are_not_probed_for():
    """A fake has what the real one has; what may be absent is in the table, with the reason."""
    found = {
        next(
            (key for key in PROBES if key[0] == file and source.startswith(key[1])), (file, source)
        )
        for file, source in _probes()
    }
    assert found == set(PROBES)


class Queue:
    """Both ends of nothing."""

    def stop(self) -> None:
        """Nothing is to be closed."""


def test_the_real_frontend_and_the_fake_one_have_everything():
    for frontend in (
        FakeFrontend(),
        FrontendManager(model_id="m", send_backend=Queue(), recv_backend=Queue()),
    ):
        assert isinstance(frontend, AppFrontend)
        assert isinstance(completed(frontend), AppFrontend)
    assert completed(frontend) is frontend, "the real one is asked directly"
    assert not isinstance(MinimalFake(), AppFrontend)
    assert isinstance(completed(MinimalFake()), AppFrontend)


def test_a_frontend_with_the_mandatory_members_is_served():
    frontend = MinimalFake()
    client = AppClient(create_app(frontend))
    assert client.post("/generate", {"prompt": "x"}).json()["text"] == "Hello wörld"
    assert client.get("/health").status_code == 200
    assert client.get("/server_info").json()["state"] == "ready"
    assert "diffulex_backend_up" in client.get("/metrics").text
    assert [command.input.prompt for command in frontend.commands] == ["x"]
    without_body = ("/pause", "/resume", "/unload_lora")
    for path in ("/start_profile", "/stop_profile", "/flush_cache", *without_body):
        message = check_error(client.post(path), 503, "service_unavailable", "unavailable")
        assert "expected a frontend that can" in message
    response = client.post("/abort", {"rid": "x"})
    check_error(response, 503, "service_unavailable", "unavailable")


def test_what_a_frontend_has_of_the_others_counts():
    frontend = MinimalFake()
    frontend.state, frontend.on_abort = ServerState.STARTING, None
    client = AppClient(create_app(frontend))
    assert client.get("/health").status_code == 503
    frontend.state = ServerState.READY
    assert client.get("/health").status_code == 200
    frontend.on_abort("a", "api")  # set by the application
    assert 'reason="api"' in client.get("/metrics").text


@pytest.mark.parametrize("name", ["start", "stop"])
def test_a_frontend_may_start_and_stop_at_once(name):
    calls = []
    frontend = MinimalFake()
    setattr(frontend, name, lambda: calls.append(name))
    assert AppClient(create_app(frontend)).get("/health").status_code == 200
    assert calls == [name]


#: Members that may be missing or None.
OPTIONAL = (
    *("start", "stop", "has_request", "tokenizer", "info", "limits", "stats", "counters"),
    *("is_healthy", "heartbeat_age_s", "num_inflight", "retry_after_s", "on_abort"),
)


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_member_that_is_none_has_its_default(name):
    """For example what the backend says of itself, before it is ready."""
    frontend = type("Frontend", (FakeFrontend,), {name: None})()
    frontend.__dict__[name] = None
    client = AppClient(create_app(frontend))
    assert client.post("/generate", {"prompt": "x"}).json()["text"] == "Hello wörld"
    assert "diffulex_backend_up" in client.get("/metrics").text
    assert client.get("/health").status_code == 200
    for path in ("/server_info", "/get_server_info", "/v1/models"):
        assert client.get(path).status_code == 200
    assert client.post("/flush_cache").status_code == 200


class Phase(Enum):
    """The states of a program's frontend."""

    UP = "Ready"
    DOWN = "Dead"
    WARM = "warming"


@pytest.mark.parametrize(
    ("state", "shown", "health", "generate"),
    [
        (None, "ready", 200, 200),
        ("READY", "ready", 200, 200),
        (Phase.UP, "ready", 200, 200),
        (Phase.DOWN, "dead", 503, 503),
        (Phase.WARM, "warming", 503, 200),
    ],
)
def test_states_of_programs(state, shown, health, generate):
    frontend = MinimalFake()
    frontend.state = state
    client = AppClient(create_app(frontend))
    assert client.get("/server_info").json()["state"] == shown
    assert client.get("/health").status_code == health
    assert client.post("/generate", {"prompt": "x"}).status_code == generate
    assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize(("answer", "told"), [(None, {}), (True, {}), ({"n": 3}, {"n": 3})])
@pytest.mark.parametrize("name", ["flush_cache", "start_profile", "stop_profile", "pause"])
def test_operations_of_programs_may_tell_nothing(name, answer, told):
    async def operation(*arguments):
        return answer

    frontend = MinimalFake()
    setattr(frontend, "control" if name == "pause" else name, operation)
    response = AppClient(create_app(frontend)).post(f"/{name}")
    assert (response.status_code, response.json()) == (200, {"status": "ok", **told})


class PlainTokenizer:
    """Of a program: the methods alone."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode()

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        return "".join(message["content"] for message in messages)


def test_a_tokenizer_may_have_the_methods_alone():
    frontend = MinimalFake()
    frontend.tokenizer, frontend.info = PlainTokenizer(), {"max_model_len": 64}
    client = AppClient(create_app(frontend))
    assert client.post("/generate", {"prompt": "ab"}).status_code == 200
    messages = [{"role": "user", "content": "cd"}]
    assert client.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    assert [command.input.prompt for command in frontend.commands] == [[97, 98], [99, 100]]
    assert client.post("/tokenize", {"prompt": "x" * 5000}).json()["count"] == 5000
    assert client.post("/detokenize", {"tokens": [97]}).json()["prompt"] == "a"
    described = client.get("/tokenizer_info").json()
    assert described["tokenizer_class"] == "PlainTokenizer"


@pytest.mark.parametrize(("given", "sent"), [(2.5, "2"), (0.2, "1"), (0, "1"), (None, "1")])
def test_the_time_to_retry_is_whole_seconds(given, sent):
    frontend = MinimalFake()
    frontend.state, frontend.retry_after_s = "starting", given
    client = AppClient(create_app(frontend))
    for response in (client.get("/health"), client.post("/generate", {"prompt": "x"})):
        assert (response.status_code, response.headers["retry-after"]) == (503, sent)


def test_a_frontend_without_room_for_more_members():
    class Closed:
        __slots__ = ("generate", "generate_stream", "model_id", "new_request_id")

    frontend, fake = Closed(), MinimalFake()
    for name in Closed.__slots__:
        setattr(frontend, name, getattr(fake, name))
    client = AppClient(create_app(frontend))
    assert client.post("/generate", {"prompt": "x"}).status_code == 200


class OwnError(RuntimeError):
    """Of a program; it carries the event as those of the real frontend do."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(error.message)
        self.error = error


@pytest.mark.parametrize("path", ["/generate", "/flush_cache"])
def test_errors_of_programs_may_carry_an_event(path):
    async def fail(*arguments, **options):
        raise OwnError(ServingError("a", "prompt: expected less", "too_long", 400))

    frontend = MinimalFake()
    frontend.generate = frontend.flush_cache = fail
    response = AppClient(create_app(frontend)).post(path, {"prompt": "x"})
    assert (
        check_error(response, 400, "invalid_request_error", "too_long") == "prompt: expected less"
    )
