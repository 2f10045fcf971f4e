# SPDX-License-Identifier: Apache-2.0
"""What bounds a request before the engine knows of it: the queue, its time, its client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from diffulex.server.http.api_errors import CLIENT_CLOSED, ApiError
from diffulex.server.http.disconnect import ClientLeftError, run_while_connected
from diffulex.server.http.request_record import record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from starlette.requests import Request

    from diffulex.server.http.app_options import AppContext

__all__ = ["check_queue", "requested_timeout_s", "run_bounded", "run_in_time"]

T = TypeVar("T")


def requested_timeout_s(context: AppContext, request: Request) -> float | None:
    """The time the client gives its request, at most the server's; None: it gives none.

    Raises:
        ApiError: 400, the header is no number of seconds.
    """
    header = request.headers.get("x-request-timeout")
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = -1.0
    # Not a number compares false as well.
    if not 0 < seconds < 1e9:
        raise ApiError(
            400,
            f"X-Request-Timeout: expected seconds > 0, got {header!r}",
            param="X-Request-Timeout",
        )
    limit = context.frontend.limits.request_timeout_s
    return min(seconds, limit) if limit > 0 else seconds


def check_queue(context: AppContext) -> None:
    """ApiError 429 while as many requests are encoded or run as the server takes."""
    most = context.frontend.limits.max_inflight(context.info)
    if most is not None and context.frontend.num_inflight + context.num_encoding >= most:
        raise ApiError(
            429, f"expected at most {most} requests in flight", retry_after_s=context.retry_after_s
        )


async def run_bounded(
    context: AppContext, request: Request, make_work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """The result of work on a request, which ends early when its client leaves or its time is up.

    The body of the request must have been read.

    Raises:
        ApiError: 499, 503 or 504 in these cases.
    """
    try:
        return await run_in_time(
            context,
            request,
            lambda: run_while_connected(request.receive, lambda _: make_work()),
        )
    except ClientLeftError as error:
        raise ApiError(CLIENT_CLOSED, str(error)) from error


async def run_in_time(
    context: AppContext, request: Request, make_work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """As `run_bounded`, for work that notices itself that the client left.

    Raises:
        ApiError: 503 or 504, the time is up.
    """
    limits = context.frontend.limits
    queue_s = limits.queue_timeout_s
    total_s = requested_timeout_s(context, request) or limits.request_timeout_s
    late = ApiError(504, "request: not complete in time", code="request_timeout")
    if queue_s > 0 and not 0 < total_s < queue_s:
        late = ApiError(503, "request: not scheduled in time", code="queue_timeout")
        total_s = queue_s
    left_s = max(0.0, total_s - record_of(request.scope).elapsed_s) if total_s > 0 else None
    try:
        return await asyncio.wait_for(make_work(), left_s)
    except asyncio.TimeoutError:
        raise late from None
