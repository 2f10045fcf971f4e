# SPDX-License-Identifier: Apache-2.0
"""Failures of the HTTP side and the one body that every one of them has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from diffulex.server.http.json_response import JSONBody
from diffulex.server.http.request_record import record_of
from diffulex.wire.protocol import ServingError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

__all__ = [
    "CLIENT_CLOSED",
    "ApiError",
    "api_error_of",
    "error_body",
    "error_response",
    "install_error_handlers",
    "shown",
]

#: Status in logs and metrics of a request whose client left; it is sent to no client.
CLIENT_CLOSED = 499

# What a status means where nothing more precise is known: (type, code).
_KINDS: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    403: ("permission_error", "forbidden"),
    408: ("timeout", "request_timeout"),
    409: ("conflict", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    431: ("invalid_request_error", "request_head_too_large"),
    429: ("rate_limit_error", "queue_full"),
    CLIENT_CLOSED: ("invalid_request_error", "client_disconnected"),
    500: ("server_error", "engine_error"),
    503: ("service_unavailable", "unavailable"),
    504: ("timeout", "request_timeout"),
}
_PARAM = re.compile(r"\bSamplingParams\.(\w+)")


class ApiError(Exception):
    """A request that ends with a status other than 2xx.

    Attributes:
        status: HTTP status.
        code: what a program decides by; None takes the usual one of the status.
        param: the field of the request that caused it.
        retry_after_s: value of the header `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @classmethod
    def from_value_error(cls, error: ValueError) -> ApiError:
        """The 400 for a value that the engine's classes reject; they name the field."""
        message = str(error)
        found = _PARAM.search(message)
        return cls(400, _PARAM.sub(r"\1", message), param=found and found[1])

    @classmethod
    def from_event(cls, event: ServingError, *, retry_after_s: int | None = None) -> ApiError:
        """The failure that an error event reports."""
        is_later = event.http_status in (429, 503)
        return cls(
            event.http_status,
            event.message,
            code=event.code,
            param=event.param,
            retry_after_s=retry_after_s if is_later else None,
        )

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return error_body(self.status, self.message, code=self.code, param=self.param)


def api_error_of(error: RuntimeError, *, retry_after_s: int | None = None) -> ApiError:
    """The failure for what a frontend raised: with its error event, or else 503."""
    event = getattr(error, "error", None)
    if isinstance(event, ServingError):
        return ApiError.from_event(event, retry_after_s=retry_after_s)
    return ApiError(503, str(error) or type(error).__name__, retry_after_s=retry_after_s)


def error_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The body of a failure; `detail` repeats the message for clients of older servers."""
    kind, usual = _KINDS.get(status, _KINDS[400] if status < 500 else _KINDS[500])
    error = {"message": message, "type": kind, "param": param, "code": code or usual}
    return {"error": error, "detail": message}


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONBody:
    """The response of a failure."""
    shown = dict(headers or {})
    if error.retry_after_s is not None or error.status in (429, 503):
        shown["Retry-After"] = str(error.retry_after_s or 1)
    return JSONBody(error.body(), status_code=error.status, headers=shown)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every failure of the app's routes have the body of `error_body`."""
    from fastapi.exceptions import RequestValidationError  # noqa: PLC0415
    from starlette.exceptions import HTTPException  # noqa: PLC0415

    async def on_api_error(request: Request, error: Exception) -> JSONBody:
        assert isinstance(error, ApiError)
        record_of(request.scope).reason = error.code or "invalid_request"
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> JSONBody:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404 and message == "Not Found":
            message = f"path: expected a known one, got {request.url.path!r}"
        elif error.status_code == 405 and message == "Method Not Allowed":
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{request.url.path}: expected {allowed}, got {request.method}"
        elif error.status_code == 400 and error.__cause__ is not None:
            # What the JSON parser raised beyond its own error: nesting, digits, encoding.
            message = f"body: expected JSON, got {_one_line(error.__cause__)}"
        return error_response(ApiError(error.status_code, message), error.headers)

    async def on_invalid(_: Request, error: Exception) -> JSONBody:
        assert isinstance(error, RequestValidationError)
        return error_response(_first_invalid(error.errors()))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)


def _first_invalid(errors: Any) -> ApiError:
    """The 400 for what the schema rejected, telling the first of it."""
    for error in errors:
        location = [str(part) for part in error.get("loc", ()) if part != "body"]
        if error.get("type") == "json_invalid":
            text = f"{error['msg']}: {(error.get('ctx') or {}).get('error', '')}"
            return ApiError(400, f"body: expected JSON, got {text}")
        where = ".".join(location)
        text = _expected(error, "an object" if where else "a JSON object")
        return ApiError(400, f"{where or 'body'}: {text}", param=where or None)
    return ApiError(400, "body: expected a request of the documented form, got another")


#: What was expected, by the kind of error that pydantic reports; in braces what it says of it.
_EXPECTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length} entries",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "extra_forbidden": "a documented field",
}


def _expected(error: Mapping[str, Any], an_object: str) -> str:
    """What a field should have been, and what came, as all errors here say it."""
    kind, context = str(error.get("type")), error.get("ctx") or {}
    if kind == "missing":
        return "expected a value, got none"
    if kind == "too_long":
        # An object has no length there.
        count = context.get("actual_length") or len(error["input"])
        return f"expected at most {context['max_length']} entries, got {count}"
    text = str(error.get("msg", "invalid")).removeprefix("Value error, ")
    if kind in ("model_type", "model_attributes_type"):
        text = f"expected {an_object}"
    elif kind in _EXPECTED:
        text = f"expected {_EXPECTED[kind].format(**context)}"
    return text if ", got " in text else f"{text}, got {shown(error.get('input'), 100)}"


def shown(value: object, most: int = 60) -> str:
    """A value of a request in the text of an error: the first characters of what `repr` writes,
    however much that would be."""
    text = ""
    for piece in _pieces(value, most):
        text += piece
        if len(text) > most:
            return text[: most - 3] + "..."
    return text


def _pieces(value: object, most: int) -> Iterator[str]:
    """What `repr` writes for JSON, piece by piece, texts without what is too long anyway."""
    if isinstance(value, dict):
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(key, most)
            yield ": "
            yield from _pieces(item, most)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(item, most)
        yield "]"
    else:
        yield repr(value[:most] if isinstance(value, str) else value)


def _one_line(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 100 else text[:97] + "..."
