# SPDX-License-Identifier: Apache-2.0
"""The body of failures, as OpenAPI documents describe it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

__all__ = ["ErrorResponse", "declare_errors", "error_responses"]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorResponse(BaseModel):
    """Body of every response that is not 2xx."""

    error: ErrorDetail
    detail: str


_ERRORS = {
    400: "The request is malformed, contradicts itself or asks for what is not supported",
    401: "The API key is missing or wrong",
    404: "No such model or path",
    405: "The path has other methods",
    409: "Contradicts what is in progress",
    413: "The body is over the limit",
    415: "The body is not JSON",
    429: "Too many requests are waiting; see Retry-After",
    499: "The request was aborted",
    500: "The engine failed",
    503: "The server takes no requests now; see Retry-After",
    504: "The request took longer than allowed",
}


_SCHEMAS = "#/components/schemas/{model}"


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Entries of the OpenAPI document for failures; 401, 405 and 500 are always among them.

    They name the schema that `declare_errors` puts into the document: for each `model` of each route
    FastAPI would make a field, which took half the time of making the application.
    """
    body = {"application/json": {"schema": {"$ref": _SCHEMAS.format(model="ErrorResponse")}}}
    wanted = sorted({*statuses, 401, 405, 500})
    return {status: {"description": _ERRORS[status], "content": body} for status in wanted}


def declare_errors(document: dict[str, Any]) -> None:
    """Defines the body of failures in an OpenAPI document: invalid requests are 400, never 422."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
    schema = ErrorResponse.model_json_schema(mode="serialization", ref_template=_SCHEMAS)
    parts = schema.pop("$defs")
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(parts | {"ErrorResponse": schema})
