# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document says in JSON schema what the checks of the requests are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diffulex.server.api_server import create_app
from fake_frontend import FakeFrontend


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
        "max_tokens": {"minimum": 1, "maximum": 2**31 - 1},
        "temperature": {"minimum": 0, "maximum": 1e308},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1, "maximum": 2**31 - 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "seed": {"minimum": 0, "maximum": float(2**63 - 1)},
        "logprobs": {"minimum": 0, "maximum": 20},
    }
