# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document says in JSON schema what the checks of the requests are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from diffulex.server.http.api_server import create_app
from fake_frontend import FakeFrontend
from http_client import AppClient
from template_frontend import make_frontend


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeFrontend())


def document(**options: Any) -> dict[str, Any]:
    return create_app(FakeFrontend(), **options).openapi()


def properties(name: str, **options: Any) -> dict[str, Any]:
    """The schemas of the fields of one request."""
    found: dict[str, Any] = document(**options)["components"]["schemas"][name]["properties"]
    return found


def keywords(node: Any) -> Iterator[str]:
    """All keys, also names of properties."""
    if isinstance(node, dict):
        yield from node
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from keywords(item)


def test_bounds_are_keywords_of_json_schema():
    found = set(keywords(document()))
    assert not found & {"ge", "le", "gt", "lt", "min_length", "max_length", "multiple_of"}
    assert found >= {"minimum", "maximum", "exclusiveMinimum", "minLength", "maxItems"}


def test_numbers_have_the_bounds_of_the_checks():
    fields = properties("CompletionRequest")
    shown = {
        name: {key: value for key, value in fields[name]["anyOf"][0].items() if key != "type"}
        for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs")
    }
    assert shown == {
        "max_tokens": {"minimum": 0, "maximum": 2**31 - 1},
        "temperature": {"minimum": 0, "maximum": 3.4e38},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1, "maximum": 2**31 - 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "seed": {"minimum": -(2.0**63), "maximum": float(2**64 - 1)},
        "logprobs": {"minimum": 0, "maximum": 20},
    }


def test_options_narrow_the_requests():
    chat = properties("ChatCompletionRequest", served_model_name=("a", "b"), max_n=3)
    assert chat["model"] == {"enum": ["a", "b", "", None]}
    assert chat["n"]["anyOf"][0]["maximum"] == 3
    assert chat["chat_template"] == {"type": "null"}
    options = {"accept_any_model": True, "trust_request_chat_template": True}
    chat = properties("ChatCompletionRequest", **options)
    assert chat["model"]["anyOf"] == [{"type": "string", "maxLength": 1024}, {"type": "null"}]
    assert chat["chat_template"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    decoding = properties("Decoding", min_accept_threshold=0.25, max_request_penalty=2.5)
    for name, bounds in {"accept_threshold": (0.25, 1), "penalty_lambda": (0, 2.5)}.items():
        form = decoding[name]["anyOf"][0]
        assert (form["minimum"], form["maximum"]) == bounds
    forms = properties("CompletionRequest", max_prompts_per_request=5)["prompt"]["anyOf"]
    assert [form.get("maxItems") for form in forms] == [None, 2**22, 5, 5]


def test_the_path_of_a_model_has_the_served_names():
    served = document(served_model_name=("a", "b"), accept_any_model=True)
    [parameter] = served["paths"]["/v1/models/{model_id}"]["get"]["parameters"]
    assert parameter["schema"] == {"type": "string", "enum": ["a", "b"]}


#: Fields of chat requests that the document does not allow.
REFUSED = [
    {"temperature": 1e39},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 0},
    {"logit_bias": {"1": 1}},
    {"use_beam_search": True},
    {"prompt_logprobs": 1},
    {"structured_outputs": {}},
    {"response_format": {"type": "json_object"}},
    {"tools": [{}]},
    {"tools": [{}], "tool_choice": "auto"},
    {"tools": "x", "tool_choice": "none"},
    {"functions": "x", "function_call": "none"},
    {"functions": [{}], "function_call": "auto"},
    {"decoding": {"penalty_lambda": 1000.5}},
    {"decoding": {"max_post_edit_steps": 1025}},
    {"stop": [""]},
    {"chat_template_kwargs": {"tokenize": True}},
    {"tool_choice": "required"},
    {"functions": [{}]},
    {"guided_json": {}},
    {"best_of": 0},
    {"request_id": "a b"},
    {"chat_template": "T"},
    {"chat_template_kwargs": {"messages": []}},
    {"top_logprobs": 1},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": []},
]
ALLOWED = [
    {"temperature": 3.4e38},
    {"frequency_penalty": 0.0, "presence_penalty": None, "repetition_penalty": 1},
    {"logit_bias": {}, "use_beam_search": False, "prompt_logprobs": None},
    {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"},
    {"tools": [{}], "tool_choice": "none", "stop": ""},
    {"functions": [], "guided_json": None, "best_of": 1, "another": 1},
    {"functions": [{}], "function_call": "none"},
    {"decoding": {"penalty_lambda": 1000, "max_post_edit_steps": 1024}},
    {"request_id": "a-b", "model": ""},
    {"top_logprobs": 1, "logprobs": True},
    {"top_logprobs": 0},
    {"messages": [{"role": "user", "content": []}, {"role": "assistant", "content": None}]},
    {"messages": [{"role": "assistant"}]},
]


@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [
        ({"max_tokens": 0}, False),
        ({"max_tokens": 0, "echo": True}, True),
        ({"suffix": ""}, True),
        ({"suffix": "x"}, False),
        ({"stop": ""}, True),
    ],
    ids=str,
)
def test_the_document_and_the_checks_of_completions_agree(
    app: Any, fields: dict[str, Any], is_allowed: bool
):
    jsonschema = pytest.importorskip("jsonschema_rs", reason="jsonschema_rs is not installed")
    body = {"prompt": "x"} | fields
    schema = {**app.openapi(), "$ref": "#/components/schemas/CompletionRequest"}
    assert jsonschema.is_valid(schema, body) == is_allowed
    response = AppClient(app).post("/v1/completions", body)
    assert response.status_code == (200 if is_allowed else 400), response.text


@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [(fields, False) for fields in REFUSED] + [(fields, True) for fields in ALLOWED],
    ids=str,
)
def test_the_document_and_the_checks_agree(app: Any, fields: dict[str, Any], is_allowed: bool):
    jsonschema = pytest.importorskip("jsonschema_rs", reason="jsonschema_rs is not installed")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields
    schema = {**app.openapi(), "$ref": "#/components/schemas/ChatCompletionRequest"}
    assert jsonschema.is_valid(schema, body) == is_allowed
    response = AppClient(app).post("/v1/chat/completions", body)
    assert response.status_code == (200 if is_allowed else 400), response.text


def test_the_document_declares_what_is_answered():
    document = create_app(make_frontend()).openapi()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert "422" not in responses
            assert {"401", "405", "500"} <= set(responses), path
            if method == "post":
                assert {"413", "415"} <= set(responses), path
    generate = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(generate) == {
        *("200", "400", "401", "404", "405", "409", "413", "415", "429", "499", "500", "503"),
        "504",
    }
    assert set(generate["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "HTTPValidationError" not in document["components"]["schemas"]
    ids = [op["operationId"] for ops in document["paths"].values() for op in ops.values()]
    assert len(ids) == len(set(ids))
