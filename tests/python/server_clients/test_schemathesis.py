# SPDX-License-Identifier: Apache-2.0
"""Requests made from the application's own OpenAPI document: answers must be as it says."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

from fixtures.live_server import LiveServer

httpx = pytest.importorskip("httpx", reason="httpx is not installed")

_NUM_EXAMPLES = 16
#: Least share of the requests of legal form that must succeed. What is left contradicts itself in
#: ways that JSON schema cannot say.
_LEAST_ACCEPTED = 0.9
#: The routes of the document; a new one must be listed here.
_OPERATIONS = {
    "GET /get_server_info",
    "GET /health",
    "GET /health/live",
    "GET /metrics",
    "GET /ping",
    "GET /ready",
    "GET /server_info",
    "GET /tokenizer_info",
    "GET /v1/models",
    "GET /v1/models/{model_id}",
    "GET /version",
    "POST /abort",
    "POST /detokenize",
    "POST /flush_cache",
    "POST /generate",
    "POST /load_lora",
    "POST /pause",
    "POST /resume",
    "POST /start_profile",
    "POST /stop_profile",
    "POST /tokenize",
    "POST /unload_lora",
    "POST /update_weights",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
}
#: A server without a profiler refuses them, and there are no weights at random paths.
_CONFLICTS = {
    "POST /load_lora",
    "POST /start_profile",
    "POST /stop_profile",
    "POST /unload_lora",
    "POST /update_weights",
}
#: Those with something that can be wrong.
_WITH_BODY = {
    "POST /abort",
    "POST /detokenize",
    "POST /generate",
    "POST /load_lora",
    "POST /start_profile",
    "POST /tokenize",
    "POST /update_weights",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
}
_BODIES = (
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerateRequest",
    "ResponsesRequest",
    "TokenizeRequest",
)


@pytest.fixture(scope="module", autouse=True)
def schemathesis() -> Any:
    """The package, imported by those that run these tests: it takes seconds."""
    return pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@pytest.fixture(scope="module")
def document(server: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def operations(server: LiveServer, document: dict[str, Any]) -> dict[str, Any]:
    """What the document says."""
    return _operations(document, server)


@pytest.fixture(scope="module")
def served_operations(server: LiveServer, document: dict[str, Any]) -> dict[str, Any]:
    """The same, with what the document cannot say.

    That is what depends on the model (roles, token ids) or on another field; answers are short.
    """
    narrow = copy.deepcopy(document)
    schemas = narrow["components"]["schemas"]
    info = httpx.get(f"{server.url}/server_info").json()
    highest = min(info["vocab_size"], info["mask_token_id"]) - 1
    _limit_token_ids(schemas, highest)
    for form in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"][2:]:
        form["maxItems"] = 2
    schemas["ChatCompletionRequest"]["patternProperties"]["^best_of$"]["maximum"] = 1
    schemas["ChatMessage"]["properties"]["role"] = {"enum": ["system", "user", "assistant"]}
    for name in _BODIES:
        fields = schemas[name]["properties"]
        limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        limits = limits[2:] if "max_output_tokens" in fields else limits
        if limits[0] in fields:
            schemas[name]["required"].append(limits[0])
        for field in limits:
            if field in fields:
                fields[field] = {"type": "integer", "minimum": 4, "maximum": 8}
        if "template_token_ids" in fields:
            _limit_templates(schemas[name], highest)
        if "min_tokens" in fields:
            fields["min_tokens"]["anyOf"][0]["maximum"] = 4
        if "best_of" in fields:
            fields["best_of"]["anyOf"][0]["maximum"] = 1
        if "n" in fields:
            fields["n"]["anyOf"][0]["maximum"] = 2
        if "messages" in fields:
            messages = fields["messages"].get("anyOf", [fields["messages"]])[0]
            messages["maxItems"] = 4
            messages["contains"] = {"properties": {"role": {"const": "user"}}}
        if "input" in fields:
            fields["input"]["anyOf"][1] |= {
                "maxItems": 4,
                "contains": {"properties": {"role": {"const": "user"}}},
            }
    return _operations(narrow, server)


def _limit_templates(schema: dict[str, Any], highest: int) -> None:
    """They are as short as the answers, leave a position free and exclude what a request of their own has."""
    template = schema["properties"]["template_token_ids"]["anyOf"][0]
    template["maxItems"] = 4
    template["items"]["anyOf"][0] = {"type": "integer", "minimum": 0, "maximum": highest}
    template["contains"] = template["items"]["anyOf"][1]  # a free position
    excluded = ("logprobs", "include", "max_repetition_run")
    without = {name: {"enum": [None]} for name in excluded if name in schema["properties"]}
    rule = [{"properties": {"template_token_ids": {"type": "null"}}}, {"properties": without}]
    schema.setdefault("allOf", []).append({"anyOf": rule})


def _limit_token_ids(node: Any, highest: int) -> None:
    """In the document they have any of 31 bits, and the lists any length."""
    if isinstance(node, dict):
        items = node.get("items")
        if isinstance(items, dict) and items.get("maximum") == 2**31 - 1:
            items["maximum"] = highest
            node["maxItems"] = 16
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            _limit_token_ids(item, highest)


def _operations(document: dict[str, Any], server: LiveServer) -> dict[str, Any]:
    import schemathesis

    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    found = [result.ok() for result in schema.get_all_operations()]
    return {f"{item.method.upper()} {item.path}": item for item in found}


def _run(operation: Any, mode: Any, check: Callable[[Any], None]) -> None:
    """Checks cases of one operation."""

    @hypothesis.settings(
        max_examples=_NUM_EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        check(case)

    run()


def test_every_route_is_in_the_document(operations: dict[str, Any]) -> None:
    assert set(operations) == _OPERATIONS


@pytest.mark.parametrize("name", sorted(_OPERATIONS))
def test_legal_requests_succeed_as_the_document_says(
    served_operations: dict[str, Any], server: LiveServer, name: str
) -> None:
    """Declared statuses, content types and bodies, and few of them are refusals."""
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    statuses: Counter[int] = Counter()
    refusals: list[str] = []

    def check(case: Any) -> None:
        response = case.call(timeout=60)
        case.validate_response(response, excluded_checks=[positive_data_acceptance])
        statuses[response.status_code] += 1
        if response.status_code >= 300:
            refusals.append(response.text)

    _run(served_operations[name], GenerationMode.POSITIVE, check)
    httpx.post(f"{server.url}/resume", timeout=60).raise_for_status()  # it may be paused
    if name in _CONFLICTS:
        assert set(statuses) == {409}
    else:
        assert statuses[200] >= max(1, _LEAST_ACCEPTED * statuses.total()), refusals


@pytest.mark.parametrize("name", sorted(_WITH_BODY))
def test_illegal_requests_are_refused(operations: dict[str, Any], name: str) -> None:
    """4xx with the body of every failure, for what the document does not allow."""
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import negative_data_rejection

    num_cases = 0

    def check(case: Any) -> None:
        nonlocal num_cases
        num_cases += 1
        response = case.call(timeout=60)
        # A body that is too large is refused as well, by a status that the check does not list.
        is_listed = response.status_code != 413
        excluded = [] if is_listed else [negative_data_rejection]
        case.validate_response(response, excluded_checks=excluded)
        assert 400 <= response.status_code < 500
        body = response.json()
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["detail"] == body["error"]["message"] != ""

    _run(operations[name], GenerationMode.NEGATIVE, check)
    assert num_cases >= _NUM_EXAMPLES


def test_examples_of_the_document_are_answered(
    server: LiveServer, document: dict[str, Any]
) -> None:
    num_examples = 0
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
        schema = document["components"]["schemas"].get(reference.split("/")[-1], {})
        for example in schema.get("examples", ()):
            response = httpx.post(f"{server.url}{path}", json=example, timeout=60)
            assert response.status_code == 200, (path, example, response.text)
            num_examples += 1
    assert num_examples >= len(_BODIES)


def test_the_server_is_still_well(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "1 + 2 ="}], "max_tokens": 8}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200
