# SPDX-License-Identifier: Apache-2.0
"""The operator's bounds on what requests may set of the decoding rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from diffulex.config.sampling_params import DECODING_FIELDS
from diffulex.errors import ConfigError
from diffulex.server.args import parse_args
from diffulex.server.http.api_server import create_app
from diffulex.server.http.app_options import AppOptions
from fake_frontend import FakeFrontend
from http_client import AppClient, check_error

BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize("path", BODIES)
def test_requests_keep_within_them(path: str) -> None:
    frontend = FakeFrontend()
    bounds = {"min_accept_threshold": 0.4, "max_accept_threshold": 0.9}
    client = AppClient(create_app(frontend, **bounds))
    for threshold in (0.4, 0.9, None):
        decoding = {"accept_threshold": threshold}
        assert client.post(path, {**BODIES[path], "decoding": decoding}).status_code == 200
    for threshold in (0.39, 0.91):
        decoding = {"accept_threshold": threshold}
        response = client.post(path, {**BODIES[path], "decoding": decoding})
        names = ("invalid_request_error", "invalid_request", "decoding.accept_threshold")
        message = check_error(response, 400, *names)
        assert f"expected a number in [0.4, 0.9], got {threshold}" in message
    assert len(frontend.commands) == 3


def test_they_are_in_order() -> None:
    flags = ["--min-accept-threshold", "0.8", "--max-accept-threshold", "0.5"]
    with pytest.raises(
        ConfigError, match=r"expected at most --max-accept-threshold 0\.5, got 0\.8"
    ):
        parse_args(["demo", *flags])
    arguments = parse_args(["demo", *flags[:2]])
    assert (arguments.min_accept_threshold, arguments.max_accept_threshold) == (0.8, 1.0)


@pytest.mark.parametrize(
    ("name", "bound", "legal", "refused"),
    [
        ("max_post_edit_steps", {"max_request_post_edit_steps": 8}, (0, 8), (9, 2**31 - 1)),
        ("penalty_lambda", {"max_request_penalty": 2.5}, (0, 2.5), (2.6, 1e30)),
    ],
)
def test_what_requests_may_ask_of_edits(
    name: str, bound: dict[str, float], legal: tuple[float, ...], refused: tuple[float, ...]
) -> None:
    frontend = FakeFrontend()
    client = AppClient(create_app(frontend, **bound))
    for value in legal:
        assert (
            client.post("/generate", {"prompt": "x", "decoding": {name: value}}).status_code == 200
        )
    (most,) = bound.values()
    for value in refused:
        response = client.post("/generate", {"prompt": "x", "decoding": {name: value}})
        message = check_error(
            response, 400, "invalid_request_error", "invalid_request", f"decoding.{name}"
        )
        assert f"decoding.{name}: expected a number in [0, {most:g}], got {value:g}" in message
    sent = [getattr(command.sampling_params, name) for command in frontend.commands]
    assert sent == list(legal)


def test_the_documentation_lists_what_requests_may_set() -> None:
    text = (Path(__file__).parents[3] / "docs/serving.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*?) ?\|$", text, re.MULTILINE))
    assert set(DECODING_FIELDS) <= set(rows)
    for name in AppOptions().decoding_bounds:
        assert rows[name].startswith("`--m"), name
