# SPDX-License-Identifier: Apache-2.0
"""Ids that clients choose and that another request has already."""

from __future__ import annotations

import pytest

from diffulex import SamplingParams
from diffulex.server.http.api_errors import ApiError
from diffulex.server.http.api_server import create_app
from diffulex.server.openai.generation import Generation, LiveRequests
from diffulex.wire.protocol import PromptInput, RequestOptions
from fake_frontend import FakeFrontend
from http_client import AppClient, check_error

TEXT = "/v1/completions"
TWO = {"prompt": "x", "request_id": "w", "n": 2, "temperature": 1.0}


def two_choices(rid):
    return Generation.expand(
        rid=rid,
        inputs=[PromptInput("x")],
        params=SamplingParams(),
        num_choices=2,
        stream_mode=None,
        user=None,
        created_time=0.0,
        strict_max_tokens=False,
        options=RequestOptions(),
        timeout_s=None,
        info={},
    )


def test_choices_take_their_ids():
    live = LiveRequests(FakeFrontend())
    live.claim("w")
    live.start(two_choices("w"))
    for name in ("w", "w-0", "w-1"):
        with pytest.raises(ApiError, match=f"not in use, got '{name}'") as caught:
            live.claim(name)
        assert (caught.value.status, caught.value.param) == (409, "request_id")
    live.claim("w-2")
    live.release("w")
    for name in ("w-0", "w-1", "w"):
        live.claim(name)


def test_choices_whose_ids_are_taken():
    live = LiveRequests(FakeFrontend())
    live.claim("w-1")
    live.claim("w")
    with pytest.raises(ApiError, match="not in use, got 'w-1'"):
        live.start(two_choices("w"))
    live.release("w")
    with pytest.raises(ApiError):
        live.claim("w-1")
    live.claim("w-0")


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_whose_id_the_frontend_knows(stream):
    frontend = FakeFrontend()
    taken = {"diffulex-w-0"}
    frontend.has_request = taken.__contains__
    client = AppClient(create_app(frontend))
    response = client.post(TEXT, {**TWO, "stream": stream})
    message = check_error(response, 409, "conflict", "conflict", "request_id")
    assert "'diffulex-w-0'" in message
    assert not frontend.commands
    taken.clear()
    assert client.post(TEXT, {**TWO, "stream": stream}).status_code == 200, "it is free again"


@pytest.mark.parametrize("stream", [False, True])
def test_a_frontend_that_finds_the_clash_itself(stream):
    frontend = FakeFrontend()

    async def generate_stream(command, *, is_disconnected=None):
        raise ValueError(f"rid: expected a new one, got {command.rid!r} again")
        yield

    frontend.generate_stream = generate_stream
    response = AppClient(create_app(frontend)).post(TEXT, {**TWO, "stream": stream})
    check_error(response, 409, "conflict", "conflict")
