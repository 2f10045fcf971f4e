# SPDX-License-Identifier: Apache-2.0
"""Requests to an application in the same process, and the frames of a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx


class AppClient:
    """Sends requests to an application without a socket."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def request(self, method: str, path: str, **keywords: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with (
                self._app.router.lifespan_context(self._app),
                httpx.AsyncClient(transport=transport, base_url="http://test") as client,
            ):
                return await client.request(method, path, **keywords)

        return asyncio.run(send())

    def get(self, path: str, **keywords: Any) -> httpx.Response:
        return self.request("GET", path, **keywords)

    def post(self, path: str, body: Any = None, **keywords: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **keywords)


def frames(response: httpx.Response) -> list[Any]:
    """The data of every frame; the terminator stays a text."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for part in response.content.decode().split("\n\n"):
        if part and not part.startswith(":"):
            assert part.startswith("data: "), part
            data = part.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    assert found[-1] == "[DONE]"
    return found


def check_error(
    response: httpx.Response, status: int, kind: str, code: str, param: str | None = None
) -> Any:
    """The message of a failure, whose body must have the one form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error", "detail"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["detail"] == body["error"]["message"]
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    if param is not None:
        assert body["error"]["param"] == param
    return body["detail"]
