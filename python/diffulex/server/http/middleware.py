# SPDX-License-Identifier: Apache-2.0
"""What happens around every request: body limit, log and metrics, API keys, content type.

Plain ASGI middleware: nothing here buffers a stream.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from diffulex.log import get_logger
from diffulex.server.http.api_errors import ApiError, error_response
from diffulex.server.http.request_record import RequestRecord, route_path
from diffulex.server.loopback import LOCALHOST, is_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from diffulex.server.http.request_metrics import RequestMetrics

__all__ = [
    "ApiKeys",
    "BodyLimit",
    "Canonical",
    "JSONOnly",
    "LocalOnly",
    "Recorder",
]

logger = get_logger(__name__)

#: After a refusal so much more of the body is read and dropped, in bytes and seconds, so that
#: clients that write before they read receive the answer.
_MAX_DROPPED, _MAX_DROP_S = 64 << 20, 5.0


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


class _BodyTooLargeError(Exception):
    """Raised where the body is read."""


class BodyLimit:
    """Answers 413 to a body over the limit, announced or not, without keeping it.

    Args:
        max_bytes: tells the limit: it depends on the model, which is known later.
    """

    def __init__(self, app: ASGIApp, max_bytes: Callable[[], int]) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced, max_bytes = _header(scope, b"content-length"), self._max_bytes()
        if announced is not None and announced.isdecimal() and int(announced) > max_bytes:
            await self._refuse(scope, receive, send)
            return
        num_read, is_started, is_exceeded = 0, False, False

        async def counted() -> Message:
            nonlocal num_read, is_exceeded
            message = await receive()
            if message["type"] == "http.request":
                num_read += len(message.get("body", b""))
                if num_read > max_bytes:
                    is_exceeded = True
                    raise _BodyTooLargeError
            return message

        async def guarded(message: Message) -> None:
            nonlocal is_started
            # What the application says about a body it could not read is replaced.
            if not is_exceeded:
                is_started = True
                await send(message)

        with suppress(_BodyTooLargeError):
            await self._app(scope, counted, guarded)
        if is_exceeded and not is_started:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"body: expected at most {self._max_bytes()} bytes (--max-body-bytes), got more"
        response = error_response(ApiError(413, message), {"Connection": "close"})
        # A client that waits for permission to send has sent nothing.
        if _header(scope, b"expect") is None:
            await _drop_body(receive)
        await response(scope, receive, send)


async def _drop_body(receive: Receive) -> None:
    async def drop() -> None:
        num_dropped = 0
        while num_dropped < _MAX_DROPPED:
            message = await receive()
            if message["type"] != "http.request" or not message.get("more_body", False):
                return
            num_dropped += len(message.get("body", b""))

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drop(), _MAX_DROP_S)


class Recorder:
    """Makes the record of a request, and its log line and metrics when it has ended.

    An unhandled exception becomes a 500 with the usual body here.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: RequestMetrics | None,
        generating: Collection[str],
        log_requests: str,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._generating = generating
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        record = RequestRecord(path)
        scope["diffulex.record"] = record
        is_generating = path in self._generating and scope["method"] == "POST"
        if self._metrics is not None and is_generating:
            self._metrics.start(record)
        is_started = False

        async def watched(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            logger.exception("%s %s failed", scope["method"], path)
            record.status = 500
            if not is_started:
                failure = ApiError(500, "internal error, see the log", code="internal_error")
                await error_response(failure)(scope, receive, watched)
        finally:
            record.route = path if path in self._generating else _label(scope, path)
            if self._metrics is not None:
                self._metrics.finish(record, is_generating)
            record.log(self._log_requests)


def _label(scope: Scope, path: str) -> str:
    """The path as the application declares it; unknown ones share a label, so that clients cannot
    make any number of them."""
    if path == "/ui" or path.startswith("/ui/"):
        return "/ui"
    route = scope.get("route")
    return "other" if route is None else str(route.path)


class Canonical:
    """Reads a path with a slash at its end as that without, and HEAD as GET: the server that sends
    the answer leaves out its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] == "http":
            # The page's addresses are relative to the one without.
            path = route_path(scope)
            if len(path) > 1 and path.endswith("/") and not path.endswith("/ui/"):
                prefix = scope["path"].removesuffix(path)
                scope = {**scope, "path": prefix + (path.rstrip("/") or "/")}
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class LocalOnly:
    """Answers 403 to pages of other sites, whose requests browsers send to this machine.

    Args:
        hosts: names in `Host` and `Origin`, `localhost` for every one of this machine alone; without
            any, all are accepted.
        origins: further values of `Origin`; `*` is all.
        admin_paths: never for requests of other sites, whatever the rest allows.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str],
        origins: Collection[str],
        admin_paths: Collection[str],
    ) -> None:
        self._app = app
        self._hosts = {name.lower() for name in hosts}
        self._origins = origins
        self._admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        message = self._refusal(scope) if scope["type"] == "http" else None
        if message is None:
            await self._app(scope, receive, send)
        else:
            await error_response(ApiError(403, message))(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        host, origin = _header(scope, b"host") or "", _header(scope, b"origin")
        is_admin = route_path(scope).rstrip("/") in self._admin_paths
        if is_admin and self._is_other_site(scope, host, origin):
            return f"{route_path(scope)}: expected no page of another site, got one"
        if not self._hosts:
            return None
        # HTTP/1.0 clients send none, and are not browsers.
        if host and not self._is_known(host):
            return f"Host: expected a name of this machine (--allowed-hosts), got {host!r}"
        # Other schemes are those of programs; only pages of other sites are to be kept out.
        if origin is None or not origin.startswith(("http://", "https://")):
            return None
        if {origin, "*"} & set(self._origins) or self._is_known(origin.partition("://")[2]):
            return None
        return f"Origin: expected this machine or one of --allowed-origins, got {origin!r}"

    def _is_other_site(self, scope: Scope, host: str, origin: str | None) -> bool:
        """What the browser says, or else whether the page has come from another address: browsers
        say nothing where neither encryption nor a loopback address makes an address sure."""
        site = _header(scope, b"sec-fetch-site")
        if site is not None or origin is None or origin in self._origins:
            return site == "cross-site"
        return origin.partition("://")[2].lower() != host.lower()

    def _is_known(self, authority: str) -> bool:
        try:
            name = urlsplit(f"//{authority}").hostname or ""
        except ValueError:  # brackets without an address
            return False
        return name in self._hosts or (LOCALHOST in self._hosts and is_loopback(name))


class ApiKeys:
    """Answers 401 to requests without one of the keys, except on open paths.

    Args:
        keys: of all paths; empty: they need none.
        open_paths: need no key.
        admin_keys: of all paths, and the only ones of `admin_paths`; empty: those are as the others.
        admin_paths: see `admin_keys`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Collection[str],
        open_paths: Collection[str],
        admin_keys: Collection[str] = (),
        admin_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._admin_keys = [key.encode() for key in admin_keys]
        self._keys = [key.encode() for key in keys]
        self._open_paths = open_paths
        self._admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        is_admin = bool(self._admin_keys) and path.rstrip("/") in self._admin_paths
        if self._is_open(path) or not (self._keys or is_admin):
            await self._app(scope, receive, send)
            return
        scheme, _, key = (_header(scope, b"authorization") or "").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        # Every key is compared, and each in constant time, so that timing tells nothing.
        known_keys = self._admin_keys if is_admin else [*self._keys, *self._admin_keys]
        matches = [hmac.compare_digest(given, known) for known in known_keys]
        if scheme.lower() == "bearer" and any(matches):
            await self._app(scope, receive, send)
            return
        # No part of it: it may be a right key with a slip.
        logger.warning("%s: refused %s", scope["path"], "a wrong key" if given else "no key")
        kind = "an admin key" if is_admin else "a known API key"
        message = f"Authorization: expected Bearer with {kind}, got "
        failure = ApiError(401, message + ("another key" if given else "none"))
        await error_response(failure, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith("/ui/")


class JSONOnly:
    """Answers 415 to a body of another type.

    Args:
        forms: paths that read `multipart/form-data` as well. Browsers send it to other sites unasked:
            such paths are also for `LocalOnly.admin_paths`.
    """

    def __init__(self, app: ASGIApp, forms: Collection[str] = ()) -> None:
        self._app = app
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http" or scope["method"] != "POST" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        kind = (_header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if kind == "application/json" or (
            kind.startswith("application/") and kind.endswith("+json")
        ):
            await self._app(scope, receive, send)
            return
        if kind == "multipart/form-data" and route_path(scope) in self._forms:
            await self._app(scope, receive, send)
            return
        message = f"Content-Type: expected application/json, got {kind or 'none'!r}"
        await error_response(ApiError(415, message))(scope, receive, send)


def _has_body(scope: Scope) -> bool:
    if _header(scope, b"transfer-encoding") is not None:
        return True
    return _header(scope, b"content-length") not in (None, "0")
