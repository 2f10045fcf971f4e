# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses` over a frontend that answers from a script."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diffulex.server.http.api_server import create_app
from diffulex.wire.protocol import ChatInput, ServingDelta, ServingError
from fake_frontend import FakeFrontend
from http_client import AppClient, check_error

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "hi"}
RECORD = {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108], "top": []}


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
def client(frontend: FakeFrontend) -> AppClient:
    return AppClient(create_app(frontend))


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeFrontend())


def stop(frontend: FakeFrontend, **fields: Any) -> None:
    """Lets the answer end by itself."""

    def script(command: Any) -> Any:
        *events, _ = frontend.answer(command)
        return [*events, frontend.reply(command, finish_reason="eos_token_generated", **fields)]

    frontend.script = script


def events(client: AppClient, **fields: Any) -> list[Any]:
    """The events of a stream; their types are also those of the frames."""
    response = client.post(PATH, BODY | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    found = []
    for frame in response.content.decode().split("\n\n")[:-1]:
        head, _, data = frame.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_an_answer_in_one_piece(client, frontend):
    stop(frontend)
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9}
    response = client.post(PATH, BODY | fields | {"max_output_tokens": 9, "store": True})
    body = response.json()
    assert body["id"] == "resp_diffulex-0"
    assert response.headers["x-request-id"] == "diffulex-0"
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "fake")
    assert body["output"] == [
        {
            "id": "msg_diffulex-0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [
                {
                    "type": "output_text",
                    "text": "Hello wörld",
                    "annotations": [],
                    "logprobs": [],
                }
            ],
        }
    ]
    assert {name: body[name] for name in fields} == fields
    assert body["max_output_tokens"] == 9
    assert body["error"] is body["incomplete_details"] is body["previous_response_id"] is None
    assert body["store"] is False, "nothing is kept, whatever was asked"
    assert body["completed_at"] >= body["created_at"]
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 3, 8)
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["nfe"] == 6
    assert body["diffulex"]["finish_detail"] == "eos_token_generated"
    (command,) = frontend.commands
    assert command.input == ChatInput(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    )
    params = command.sampling_params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 9)
    assert command.strict_max_tokens


def test_defaults_are_those_of_the_chat_route(client, frontend):
    client.post(PATH, BODY)
    client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    first, second = frontend.commands
    assert first.input == second.input
    names = ("temperature", "max_tokens", "top_p", "stop", "logprobs", "skip_special_tokens")
    for name in names:
        assert getattr(first.sampling_params, name) == getattr(second.sampling_params, name), name
    assert not first.strict_max_tokens


def test_an_answer_that_was_cut_off_is_incomplete(client):
    body = client.post(PATH, BODY).json()
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["completed_at"] is None
    assert body["diffulex"]["finish_detail"] == "max_new_tokens_reached"


def test_a_conversation(client, frontend):
    answer = client.post(PATH, BODY).json()["output"]
    turns = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        *answer,
        {"role": "user", "content": [{"type": "input_text", "text": x} for x in ("b", "c")]},
    ]
    assert client.post(PATH, {"input": turns}).status_code == 200
    assert frontend.commands[1].input.messages == [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Hello wörld"},
        {"role": "user", "content": "b\nc"},
    ]


def test_the_order_of_the_events(client, frontend):
    stop(frontend)
    found = events(client)
    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    by_type = {event["type"]: event for event in found}
    for kind in ("created", "in_progress"):
        response = by_type[f"response.{kind}"]["response"]
        assert (response["status"], response["output"], response["usage"]) == (
            "in_progress", [], None
        )  # fmt: skip
    assert by_type["response.output_item.added"]["item"]["content"] == []
    assert by_type["response.content_part.added"]["part"]["text"] == ""
    texts = [e["delta"] for e in found if e["type"] == "response.output_text.delta"]
    assert texts == ["Hel", "lo ", "wörld"]
    assert by_type["response.output_text.done"]["text"] == "Hello wörld"
    part = by_type["response.content_part.done"]["part"]
    item = by_type["response.output_item.done"]["item"]
    response = by_type["response.completed"]["response"]
    assert item["content"] == [part]
    assert response["output"] == [item]
    places = {
        (e["item_id"], e["output_index"], e["content_index"]) for e in found if "item_id" in e
    }
    assert places == {(item["id"], 0, 0)}


def test_a_stream_ends_with_the_answer_in_one_piece(client, frontend):
    def plain(response: dict[str, Any]) -> dict[str, Any]:
        ids = {"id", "created_at", "completed_at", "usage", "diffulex", "output"}
        return {key: value for key, value in response.items() if key not in ids} | {
            "text": response["output"][0]["content"],
            "tokens": response["usage"]["total_tokens"],
        }

    for finish in (lambda: None, lambda: stop(frontend)):
        finish()
        whole = client.post(PATH, BODY | {"metadata": {"k": "v"}}).json()
        last = events(client, metadata={"k": "v"})[-1]
        assert last["type"] == f"response.{whole['status']}"
        assert plain(last["response"]) == plain(whole)


@pytest.mark.parametrize("mode", ["both", "denoise"])
def test_denoising_events(client, frontend, mode):
    found = events(client, stream_mode=mode)
    drafts = [event for event in found if event["type"] == "diffulex.response.denoise"]
    assert [draft["token_offset"] for draft in drafts] == [0, 1, 2]
    assert {draft["event"] for draft in drafts} == {"buffer_snapshot"}
    assert {draft["id"] for draft in drafts} == {"resp_diffulex-0"}
    texts = [e["delta"] for e in found if e["type"] == "response.output_text.delta"]
    assert texts == (["Hel", "lo ", "wörld"] if mode == "both" else ["Hello wörld"])
    chat = client.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_mode": mode},
    )
    frame = json.loads(chat.content.decode().split("\n\n")[0].removeprefix("data: "))
    assert set(frame) - set(drafts[0]) == {"object", "created", "model", "choices"}


def test_an_empty_answer_has_an_item(client, frontend):
    frontend.pieces = ()
    found = events(client)
    assert "response.output_text.delta" not in [event["type"] for event in found]
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""
    assert found[-2]["type"] == "response.output_item.done"


def test_a_failure_in_the_middle(client, frontend):
    frontend.script = lambda command: [
        ServingDelta(command.rid, 0, "a", [1], 2),
        ServingError(command.rid, "it broke", "engine_dead", 500),
    ]
    last = events(client)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {
        "code": "server_error",
        "message": "it broke",
        "type": "engine_dead",
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token(client, frontend, stream):
    frontend.script = lambda command: [ServingError(command.rid, "too long", "kv_capacity", 400)]
    response = client.post(PATH, BODY | {"stream": stream})
    check_error(response, 400, "invalid_request_error", "kv_capacity")


def test_logprobs(client, frontend):
    stop(frontend, logprobs=[RECORD])
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = client.post(PATH, BODY | fields).json()
    (entry,) = body["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["logprob"], entry["top_logprobs"]) == ("Hel", -0.5, [])
    assert body["top_logprobs"] == 2
    assert frontend.commands[0].sampling_params.logprobs == 2
    frontend.script = lambda command: [
        ServingDelta(command.rid, 0, "Hel", [1], 2, logprobs=[RECORD]),
        frontend.reply(command, text="Hel", logprobs=[RECORD]),
    ]
    shown = [event.get("logprobs") for event in events(client, **fields)]
    assert [len(logprobs) for logprobs in shown if logprobs is not None] == [1, 1]


#: Fields that ask for what is not there, and the beginning of the message where it matters.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "name": "f"}], "tool_choice": "auto"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"effort": "low"}}, "reasoning"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, "text"),
    ({"text": {"format": {"type": "json_object"}}}, "text"),
    ({"text": {"verbosity": "low"}}, "text"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
    ({"n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"include": ["all"]}, "include.0"),
    ({"metadata": {"k": 1}}, "metadata.k"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ({"input": [{"role": "user", "content": None}]}, "input"),
    ({"input": [BODY] * 5000}, "input"),
]
ALLOWED: list[dict[str, Any]] = [
    {"background": False, "conversation": None, "previous_response_id": None, "prompt": None},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "max_tool_calls": 3},
    {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none"},
    {"reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}}},
    {"reasoning": {"effort": "none"}, "text": {"verbosity": "medium"}},
    {"truncation": "disabled", "service_tier": "auto", "stream_options": {}, "text": {}},
    {"include": ["reasoning.encrypted_content"], "store": False, "user": "u", "another": 1},
    {"model": "", "instructions": None, "metadata": None, "top_logprobs": 0, "seed": -1},
    {"input": [{"role": "user", "content": ""}], "stop": "x", "top_k": 3, "max_nfe": 4},
    {"decoding": {"accept_threshold": 0.5}, "request_id": "r"},
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_not_there_is_refused_by_name(app, fields, param):
    response = AppClient(app).post(PATH, BODY | fields)
    message = check_error(response, 400, "invalid_request_error", "invalid_request", param)
    assert message.startswith(param)


@pytest.mark.parametrize("fields", ALLOWED, ids=lambda value: str(value)[:60])
def test_what_asks_nothing_is_accepted(app, fields):
    response = AppClient(app).post(PATH, BODY | fields)
    assert response.status_code == 200, response.text


def test_the_message_names_the_place_in_the_input(client):
    turns = [{"role": "user", "content": "x"}, {"type": "reasoning", "summary": []}]
    message = client.post(PATH, {"input": turns}).json()["error"]["message"]
    assert message == (
        "input: [1].type: expected 'message', tools, reasoning and references are not supported,"
        " got 'reasoning'"
    )


@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [(fields, False) for fields, _ in REFUSED] + [(fields, True) for fields in ALLOWED],
    ids=lambda value: str(value)[:60],
)
def test_the_document_says_the_same(app, fields, is_allowed):
    jsonschema = pytest.importorskip("jsonschema_rs", reason="jsonschema_rs is not installed")
    schema = {**app.openapi(), "$ref": "#/components/schemas/ResponsesRequest"}
    assert jsonschema.is_valid(schema, BODY | fields) == is_allowed


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_response_is_kept(client, method):
    made = client.post(PATH, BODY).json()["id"]
    response = client.request(method, f"{PATH}/{made}")
    message = check_error(response, 404, "invalid_request_error", "not_found", param="response_id")
    assert message.endswith(f"keeps no responses, got '{made}'")


def test_it_is_counted_as_a_route_that_generates(client):
    client.post(PATH, BODY)
    client.post(PATH, {"input": 5})
    client.get(f"{PATH}/x")
    text = client.get("/metrics").text
    count = 'diffulex_requests_total{model_name="fake",route="/v1/responses",status="%s"} 1.0'
    assert count % 200 in text
    assert count % 400 in text
    assert 'route="/v1/responses/{response_id}",status="404"} 1.0' in text
    assert "diffulex_request_finished_total{" in text
