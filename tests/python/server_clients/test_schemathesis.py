# SPDX-License-Identifier: Apache-2.0
"""Requests made from the application's own OpenAPI document: answers must be as it says."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest

from fixtures.live_server import LiveServer

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

_NUM_EXAMPLES = 20
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
    "POST /start_profile",
    "POST /stop_profile",
    "POST /tokenize",
    "POST /v1/chat/completions",
    "POST /v1/completions",
}


@pytest.fixture(scope="module")
def operations(server: LiveServer) -> dict[str, Any]:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [result.ok() for result in document.get_all_operations()]
    return {f"{item.method.upper()} {item.path}": item for item in found}


def test_every_route_is_in_the_document(operations: dict[str, Any]) -> None:
    assert set(operations) == _OPERATIONS


@pytest.mark.parametrize("name", sorted(_OPERATIONS))
def test_answers_are_as_the_document_says(operations: dict[str, Any], name: str) -> None:
    """No server error, a declared status, content type and body, whatever is sent.

    A request of legal form may still be refused: a document cannot say which models, token ids and
    lengths there are.
    """
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    @hypothesis.settings(
        max_examples=_NUM_EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operations[name].as_strategy())
    def check(case: Any) -> None:
        case.call_and_validate(timeout=60, excluded_checks=[positive_data_acceptance])

    check()


def test_the_server_is_still_well(server: LiveServer) -> None:
    httpx = pytest.importorskip("httpx")
    body = {"messages": [{"role": "user", "content": "1 + 2 ="}], "max_tokens": 8}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200
