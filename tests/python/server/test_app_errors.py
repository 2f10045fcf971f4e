# SPDX-License-Identifier: Apache-2.0
"""Failures over HTTP: statuses, bodies, limits, keys."""

from __future__ import annotations

import logging

import pytest

from byte_tokenizer import MASK, VOCAB_SIZE, ByteTokenizer
from diffulex.errors import PromptError
from diffulex.server.http.api_server import create_app
from diffulex.server.http.service_routes import ADMIN_PATHS
from diffulex.serving.frontend import (
    BackendUnavailable,
    ClientDisconnected,
    FrontendLimits,
    OperationFailed,
)
from diffulex.wire.protocol import PromptInput, ServingError
from http_client import AppClient, check_error
from template_frontend import LIMIT, make_frontend

USER = [{"role": "user", "content": "hi"}]
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.fixture(scope="module")
def shared():
    frontend = make_frontend()
    return create_app(frontend), frontend


@pytest.fixture
def frontend(shared):
    shared[1].__dict__ = make_frontend().__dict__
    return shared[1]


@pytest.fixture
def client(shared, frontend):
    return AppClient(shared[0])


# Values.


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (NATIVE, {}, "prompt"),
        (NATIVE, {"prompt": 5}, "prompt"),
        (NATIVE, {"prompt": [1, "a"]}, "prompt"),
        (NATIVE, {"prompt": [True]}, "prompt"),
        (NATIVE, {"prompt": [-1]}, "prompt"),
        (NATIVE, {"prompt": ""}, "prompt"),
        (NATIVE, {"prompt": []}, "prompt"),
        (NATIVE, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (NATIVE, {"prompt": "x", "max_tokens": "9"}, "max_tokens"),
        (NATIVE, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        (NATIVE, {"prompt": "x", "temperature": -1}, "temperature"),
        (NATIVE, {"prompt": "x", "temperature": True}, "temperature"),
        (NATIVE, {"prompt": "x", "max_nfe": 0}, "max_nfe"),
        (NATIVE, {"prompt": "x", "max_repetition_run": 0}, "max_repetition_run"),
        (NATIVE, {"prompt": "x", "seed": 2**64}, "seed"),
        (NATIVE, {"prompt": "x", "seed": -(2**63) - 1}, "seed"),
        (NATIVE, {"prompt": "x", "stop": [""]}, "stop"),
        (NATIVE, {"prompt": "x", "stop": ["a"] * 17}, "stop"),
        (NATIVE, {"prompt": "x", "stop": "a" * 257}, "stop"),
        (NATIVE, {"prompt": "x", "stop": 3}, "stop"),
        (NATIVE, {"prompt": "x", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (NATIVE, {"prompt": "x", "top_p": 0}, "top_p"),
        (NATIVE, {"prompt": "x", "top_p": 1.5}, "top_p"),
        (NATIVE, {"prompt": "x", "top_k": -2}, "top_k"),
        (NATIVE, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (NATIVE, {"prompt": "x", "stream_mode": "fast"}, "stream_mode"),
        (NATIVE, {"prompt": "x", "ignore_eos": "no"}, "ignore_eos"),
        (NATIVE, {"prompt": "x", "request_id": "a b"}, "request_id"),
        (NATIVE, {"prompt": "x", "decoding": {"accept_threshold": 2}}, None),
        (NATIVE, {"prompt": "x", "decoding": {"penalty_lambda": -1}}, None),
        (NATIVE, {"prompt": "x", "decoding": {"remask_threshold": 1.5}}, None),
        (NATIVE, {"prompt": "x", "decoding": {"max_post_edit_steps": 0.5}}, None),
        (NATIVE, {"prompt": "x", "decoding": {"max_post_edit_steps": True}}, None),
        (NATIVE, {"prompt": "x", "decoding": {"block_size": 8}}, None),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, None),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, None),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        (CHAT, {"messages": USER * 4097}, "messages"),
        (CHAT, {"messages": USER, "n": 17}, "n"),
        (CHAT, {"messages": USER, "n": 0}, "n"),
        (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": USER, "chat_template": "x"}, "chat_template"),
        (
            CHAT,
            {"messages": USER, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ["a"] * 257}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (TEXT, {"prompt": "x", "best_of": 2}, "best_of"),
    ],
)
def test_bad_values_are_400_and_reach_nobody(client, frontend, path, body, param):
    check_error(client.post(path, body), 400, "invalid_request_error", "invalid_request", param)
    assert not frontend.commands


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("structured_outputs", {"json": {}}),
        ("use_beam_search", True),
        ("prompt_logprobs", 1),
        ("best_of", 3),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client, name, value):
    for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
        response = client.post(path, {**body, name: value})
        message = check_error(response, 400, "invalid_request_error", "invalid_request", param=name)
        assert name in message


def test_suffixes_are_refused(client):
    check_error(
        client.post(TEXT, {"prompt": "x", "suffix": "y"}),
        400,
        "invalid_request_error",
        "invalid_request",
        "suffix",
    )


def test_likelihood_requests_are_pointed_elsewhere(client):
    body = {"prompt": ["x"], "echo": True, "logprobs": 1, "max_tokens": 1}
    message = check_error(
        client.post(TEXT, body), 400, "invalid_request_error", "invalid_request", "echo"
    )
    assert "Monte-Carlo likelihood estimator" in message


# Lengths and tokens.


def test_prompts_that_are_too_long(client, frontend):
    for body in ({"prompt": "a" * LIMIT}, {"prompt": [1] * LIMIT}):
        message = check_error(
            client.post(NATIVE, body), 400, "invalid_request_error", "context_length_exceeded"
        )
        assert "max_model_len 100" in message
        assert "got 100" in message
    assert client.post(NATIVE, {"prompt": "a" * (LIMIT - 1)}).status_code == 200


def test_max_tokens_that_do_not_fit_are_refused_only_where_they_were_asked_for(client, frontend):
    prompt = "a" * 60
    for body in ({"max_tokens": 41}, {"max_tokens": 512}):
        message = check_error(
            client.post(TEXT, {"prompt": prompt, **body}),
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "max_tokens",
        )
        assert f"got 60 and {body['max_tokens']}" in message
        assert "100" in message
    chat = {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": 90}
    check_error(client.post(CHAT, chat), 400, "invalid_request_error", "context_length_exceeded")
    assert client.post(TEXT, {"prompt": prompt, "max_tokens": 40}).status_code == 200
    assert client.post(NATIVE, {"prompt": prompt, "max_tokens": 500}).status_code == 200
    assert client.post(CHAT, {"messages": USER}).status_code == 200


def test_ids_the_model_must_not_see(client, frontend):
    for path in (NATIVE, TEXT):
        check_error(
            client.post(path, {"prompt": [1, MASK]}),
            400,
            "invalid_request_error",
            "mask_token_in_prompt",
        )
        check_error(
            client.post(path, {"prompt": [1, VOCAB_SIZE]}),
            400,
            "invalid_request_error",
            "token_out_of_range",
        )
    assert not frontend.commands
    frontend.info = {**frontend.info, "mask_token_id": None}
    assert client.post(NATIVE, {"prompt": [1, MASK]}).status_code == 200


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_num_batched_tokens": 30}, "context_length_exceeded"),
        ({"num_pages": 3}, "kv_capacity"),
    ],
)
def test_what_can_never_be_scheduled_is_refused_here(client, frontend, limits, code):
    frontend.info.update(limits)
    body = {"prompt": [1] * 20, "max_tokens": 20}
    check_error(client.post(TEXT, body), 400, "invalid_request_error", code, "prompt")
    body = {"prompt": [1], "stop_token_ids": [VOCAB_SIZE]}
    check_error(
        client.post(NATIVE, body), 400, "invalid_request_error", "invalid_request", "stop_token_ids"
    )
    assert not frontend.commands


def test_a_frontend_that_tells_less_leaves_the_checks_to_the_engine(client, frontend):
    frontend.info = {"max_model_len": LIMIT, "vocab_size": VOCAB_SIZE}
    assert client.post(NATIVE, {"prompt": [1] * LIMIT}).status_code == 200
    assert len(frontend.commands) == 1


# Chats and tokens.


def test_prompts_are_encoded_here(client, frontend):
    client.post(NATIVE, {"prompt": "ab"})
    client.post(CHAT, {"messages": USER})
    client.post(CHAT, {"messages": USER, "continue_final_message": True})
    client.post(CHAT, {"messages": USER, "chat_template_kwargs": {"thinking": False}})
    texts = [bytes(command.input.prompt).decode() for command in frontend.commands]
    assert texts == [
        "ab",
        "user=hi|>",
        "user=hi|continue_final_message=True",
        "user=hi|thinking=False|>",
    ]
    assert all(isinstance(command.input, PromptInput) for command in frontend.commands)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/tokenize"])
def test_arguments_of_the_renderer_are_no_variables(client, path):
    body = {"input": "x"} if path == "/v1/responses" else {"messages": USER}
    response = client.post(path, {**body, "chat_template_kwargs": {"tokenize": True}})
    param = "chat_template_kwargs"
    message = check_error(response, 400, "invalid_request_error", "invalid_request", param)
    assert message == (
        "chat_template_kwargs.tokenize: expected a variable of the template, got an argument of its"
        " renderer"
    )


def test_a_template_that_refuses_is_a_bad_request(client):
    response = client.post(CHAT, {"messages": [{"role": "other", "content": ""}]})
    message = check_error(response, 400, "invalid_request_error", "invalid_request")
    assert "no such role" in message


def test_trusted_templates_of_requests(frontend):
    client = AppClient(create_app(frontend, trust_request_chat_template=True))
    client.post(CHAT, {"messages": USER, "chat_template": "T"})
    assert bytes(frontend.commands[0].input.prompt) == b"user=hi|chat_template=T|>"


def test_without_a_template_the_backend_renders(client, frontend):
    frontend.tokenizer = ByteTokenizer()
    client.post(CHAT, {"messages": USER})
    assert frontend.commands[0].input.messages == USER
    response = client.post(CHAT, {"messages": USER, "chat_template_kwargs": {"a": 1}})
    check_error(response, 400, "invalid_request_error", "invalid_request")


def test_tokenize(client):
    body = client.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert body == {
        "tokens": [97, 195, 169],
        "count": 3,
        "max_model_len": LIMIT,
        "token_strs": ["a", "\ufffd", "\ufffd"],
    }
    body = client.post("/tokenize", {"messages": USER, "add_generation_prompt": False}).json()
    assert bytes(body["tokens"]) == b"user=hi"
    assert body["token_strs"] is None
    for bad in ({}, {"prompt": "x", "messages": USER}):
        check_error(client.post("/tokenize", bad), 400, "invalid_request_error", "invalid_request")


def test_detokenize(client):
    assert client.post("/detokenize", {"tokens": [97, 98]}).json() == {"prompt": "ab"}
    body = {"tokens": [97, MASK], "return_token_strs": True}
    assert client.post("/detokenize", body).json() == {
        "prompt": "a<mask>",
        "token_strs": ["a", "<mask>"],
    }
    check_error(
        client.post("/detokenize", {"tokens": [VOCAB_SIZE]}),
        400,
        "invalid_request_error",
        "token_out_of_range",
    )


def test_tokenizer_info(client):
    info = client.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "TemplateTokenizer"
    assert info["model_max_length"] == LIMIT
    assert (info["mask_token"], info["mask_token_id"]) == ("<mask>", MASK)
    assert {"eos_token", "bos_token", "pad_token", "chat_template"} <= set(info)


def test_tokens_without_a_tokenizer(client, frontend):
    frontend.tokenizer = None
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
        assert client.post(path, body).status_code == 503
    assert client.get("/tokenizer_info").status_code == 503
    response = client.post(TEXT, {"prompt": [1], "echo": True})
    check_error(response, 400, "invalid_request_error", "invalid_request", "echo")


# Bodies.


@pytest.mark.parametrize(
    "content", [b"{", b"", b"[]", b"1", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt": NaN}']
)
def test_bodies_that_are_no_request(client, content):
    headers = {"content-type": "application/json"}
    response = client.request("POST", NATIVE, content=content, headers=headers)
    check_error(response, 400, "invalid_request_error", "invalid_request")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "body: expected JSON, got "),
        (b"[1]", "body: expected a JSON object, got [1]"),
        (b"[" * 100_000, "body: expected JSON, got maximum recursion depth"),
        (b'{"prompt": "\xff"}', "body: expected JSON, got 'utf-8' codec"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "body: expected JSON, got Exceeds the limit"),
        (b"{}", "prompt: expected a value, got none"),
        (b'{"prompt": "x", "max_tokens": -7}', "max_tokens: expected at least 1, got -7"),
        (b'{"prompt": "x", "stream": "yes"}', "stream: expected true or false, got 'yes'"),
        (
            b'{"prompt": "x", "stream_mode": "x"}',
            "expected 'block_append', 'denoise' or 'both', got",
        ),
        (
            b'{"prompt": "x", "user": "' + b"y" * 1025 + b'"}',
            "user: expected at most 1024 characters",
        ),
        (b'{"prompt": "x", "seed": "' + b"9" * 500 + b'"}', "seed: expected an integer, got '99"),
    ],
)
def test_messages_name_the_field_and_the_value(client, content, message):
    headers = {"content-type": "application/json"}
    response = client.request("POST", NATIVE, content=content, headers=headers)
    found = check_error(response, 400, "invalid_request_error", "invalid_request")
    assert message in found
    assert "\n" not in found
    assert len(found) < 300


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_bodies_of_another_type(client, kind):
    headers = {"content-type": kind} if kind else {}
    response = client.request("POST", NATIVE, content=b'{"prompt": "x"}', headers=headers)
    check_error(response, 415, "invalid_request_error", "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/problem+json"])
def test_json_by_other_names(client, kind):
    headers = {"content-type": kind}
    response = client.request("POST", NATIVE, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 200


# Paths and methods.


def test_unknown_paths_and_methods(client):
    message = check_error(client.get("/nowhere"), 404, "invalid_request_error", "not_found")
    assert message == "path: expected a known one, got '/nowhere'"
    response = client.get(NATIVE)
    message = check_error(response, 405, "invalid_request_error", "method_not_allowed")
    assert message == "/generate: expected POST, got GET"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/ready", "/ping", "/metrics", "/v1/models", "/version"]
)
def test_what_can_be_got_can_be_headed(client, path):
    response = client.request("HEAD", path)
    assert response.status_code == client.get(path).status_code == 200
    assert not response.content


def test_a_slash_at_the_end_changes_nothing(client, frontend):
    response = client.post(CHAT + "/", {"messages": USER})
    assert response.status_code == 200
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
    # The page's own addresses are relative.
    response = client.get("/ui/")
    assert (response.status_code, response.headers["location"]) == (307, "/ui")
    assert client.get("/ui").status_code == 200
    assert client.post("/v1//", {}).status_code == 404


def test_unknown_models(client):
    for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
        response = client.post(path, {**body, "model": "other"})
        message = check_error(response, 404, "invalid_request_error", "model_not_found", "model")
        assert message == "model: expected one of fake, got 'other'"
        assert client.post(path, {**body, "model": ""}).status_code == 200
    check_error(client.get("/v1/models/other"), 404, "invalid_request_error", "model_not_found")


# Failures of the engine.


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (("broken", "engine_error", 500), "server_error"),
        (("dead", "engine_dead", 500), "server_error"),
        (("late", "queue_timeout", 503), "service_unavailable"),
        (("late", "request_timeout", 504), "timeout"),
        (("long", "context_length_exceeded", 400), "invalid_request_error"),
        (("full", "queue_full", 429), "rate_limit_error"),
        (("aborted", "aborted", 499), "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("path", [NATIVE, CHAT, TEXT])
def test_failures_of_the_engine_keep_their_status(client, frontend, path, event, kind):
    frontend.script = lambda command: [ServingError(command.rid, *event)]
    body = {"messages": USER} if path == CHAT else {"prompt": "x"}
    response = client.post(path, body)
    assert check_error(response, event[2], kind, event[1]) == event[0]
    assert ("retry-after" in response.headers) is (event[2] in (429, 503))
    assert response.headers["x-request-id"] == "diffulex-0"


def test_runtime_errors_of_a_frontend_are_503(client, frontend):
    frontend.script = lambda command: []
    check_error(client.post(NATIVE, {"prompt": "x"}), 503, "service_unavailable", "unavailable")


def test_bugs_are_500_with_a_body(client, frontend, caplog):
    frontend.script = lambda command: 1 / 0
    with caplog.at_level(logging.CRITICAL, logger="diffulex"):
        response = client.post(NATIVE, {"prompt": "x"})
    check_error(response, 500, "server_error", "internal_error")
    assert "ZeroDivisionError" not in response.text


def test_clients_that_left_are_499(client, frontend):
    async def generate(command, *, is_disconnected=None):
        raise ClientDisconnected("gone")

    frontend.generate = generate
    assert client.post(NATIVE, {"prompt": "x"}).status_code == 499


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("starting", "starting"),
        ("draining", "draining"),
        ("dead", "engine_dead"),
        ("unresponsive", "engine_unresponsive"),
        ("stopped", "server_shutdown"),
    ],
)
def test_servers_that_take_no_requests(client, frontend, state, code):
    frontend.state, frontend.retry_after_s = state, 12
    for path, body in (
        (CHAT, {"messages": USER}),
        (TEXT, {"prompt": "x"}),
        (NATIVE, {"prompt": "x"}),
    ):
        response = client.post(path, body)
        check_error(response, 503, "service_unavailable", code)
        assert response.headers["retry-after"] == "12"
    assert not frontend.commands


# Ids and time.


def test_request_ids_of_clients(client, frontend):
    response = client.post(NATIVE, {"prompt": "x", "request_id": "mine.1-a_B"})
    assert response.headers["x-request-id"] == frontend.commands[0].rid == "diffulex-mine.1-a_B"
    response = client.post(NATIVE, {"prompt": "x"}, headers={"X-Request-Id": "head"})
    assert response.json()["id"] == "diffulex-head"
    response = client.post(NATIVE, {"prompt": "x"}, headers={"X-Request-Id": "no good"})
    assert response.json()["id"] == "diffulex-0"


def test_ids_in_use_are_a_conflict(client, frontend):
    frontend.has_request = lambda rid: rid == "diffulex-a"
    body = {"prompt": "x", "request_id": "a"}
    check_error(client.post(NATIVE, body), 409, "conflict", "conflict", "request_id")
    assert client.post(NATIVE, {**body, "request_id": "b"}).status_code == 200
    assert client.post(NATIVE, {**body, "request_id": "b"}).status_code == 200, "it is free again"
    assert client.post(NATIVE, {**body, "request_id": "c", "prompt": []}).status_code == 400
    assert client.post(NATIVE, {**body, "request_id": "c"}).status_code == 200


def test_an_echo_that_fails_gives_its_id_back(client, frontend):
    def decode(token_ids, skip_special_tokens=False):
        raise PromptError("no text for these")

    frontend.tokenizer.decode = decode
    for _ in range(2):
        body = {"prompt": [1], "echo": True, "request_id": "e"}
        check_error(client.post(TEXT, body), 400, "invalid_request_error", "invalid_request")
    assert not frontend.commands


def test_requests_may_lower_their_time(frontend):
    seen = []

    async def generate(command, *, is_disconnected=None, timeout_s=None):
        seen.append(timeout_s)
        return frontend.reply(command)

    frontend.generate = generate
    frontend.limits = FrontendLimits(max_queue_size=0, request_timeout_s=5.0)
    client = AppClient(create_app(frontend))
    for value in ("2.5", "60"):
        client.post(NATIVE, {"prompt": "x"}, headers={"X-Request-Timeout": value})
    client.post(NATIVE, {"prompt": "x"})
    # What passed before the engine is asked counts.
    assert 1.5 < seen[0] <= 2.5
    assert 4.0 < seen[1] <= 5.0
    assert seen[2] is None
    for value in ("x", "0", "-1", "nan", "inf"):
        response = client.post(NATIVE, {"prompt": "x"}, headers={"X-Request-Timeout": value})
        check_error(response, 400, "invalid_request_error", "invalid_request")


# Administration.


def test_operations(client, frontend):
    calls = []

    async def start_profile(prefix=None):
        calls.append(("start", prefix))
        return {"dir": "/t"}

    async def stop_profile():
        raise OperationFailed("not running")

    async def flush_cache():
        raise BackendUnavailable("no backend")

    frontend.start_profile, frontend.stop_profile = start_profile, stop_profile
    frontend.flush_cache = flush_cache
    assert client.post("/start_profile", {"profile_prefix": "p"}).json()["dir"] == "/t"
    assert client.request("POST", "/start_profile").status_code == 200
    assert calls == [("start", "p"), ("start", None)]
    check_error(client.post("/stop_profile"), 409, "conflict", "conflict")
    check_error(client.post("/flush_cache"), 503, "service_unavailable", "unavailable")
    frontend.state = "dead"
    check_error(client.post("/flush_cache"), 503, "service_unavailable", "engine_dead")


def test_abort(client, frontend):
    asked = []

    async def abort_request(rid):
        asked.append(rid)
        return rid == "diffulex-1"

    frontend.abort_request = abort_request
    assert client.post("/abort", {"rid": "chatcmpl-diffulex-1"}).json() == {"aborted": True}
    assert client.post("/abort", {"rid": "cmpl-diffulex-2"}).json() == {"aborted": False}
    assert asked == ["diffulex-1", "diffulex-2"]
    check_error(client.post("/abort", {}), 400, "invalid_request_error", "invalid_request", "rid")


def test_administration_can_be_turned_off(frontend):
    client = AppClient(create_app(frontend, disable_admin_routes=True))
    for path in ADMIN_PATHS:
        assert client.post(path).status_code == 404


# The document.
