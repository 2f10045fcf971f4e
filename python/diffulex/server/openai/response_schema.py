# SPDX-License-Identifier: Apache-2.0
"""Bodies of the responses, as the OpenAPI document describes them.

The routes build plain maps; these classes are the description that clients and tests read.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = [
    "ChatCompletionResponse",
    "CompletionResponse",
    "ErrorResponse",
    "GenerateResponse",
    "ResponsesResponse",
    "declare_errors",
    "error_responses",
    "generation_responses",
]


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


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


class PromptTokensDetails(BaseModel):
    """Part of `usage`."""

    cached_tokens: int


class Usage(_Open):
    """Tokens, and what a diffusion model spent on them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class GenerateResponse(_Open):
    """Body of `/generate`."""

    id: str
    text: str
    token_ids: list[int]
    nfe: int
    finish_reason: str | None
    full_text: str
    full_token_ids: list[int]
    engine_decode_time_s: float | None
    engine_decode_tokens: int | None
    engine_decode_tps: float | None
    usage: Usage


class AssistantMessage(BaseModel):
    """The answer."""

    role: str
    content: str


class ChoiceDetails(_Open):
    """What only a diffusion model has to say about a choice."""

    finish_detail: str | None
    nfe: int
    num_masked: int


class ChatChoice(BaseModel):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    diffulex: ChoiceDetails


class ChatCompletionResponse(_Open):
    """Body of `/v1/chat/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str
    diffulex: ChoiceDetails


class CompletionResponse(_Open):
    """Body of `/v1/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ResponsesUsage(_Open):
    """Tokens by the names of the Responses API, and what a diffusion model spent on them."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class OutputText(BaseModel):
    """The part of a message."""

    type: str
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class OutputMessage(BaseModel):
    """The item of a response."""

    id: str
    type: str
    status: str
    role: str
    content: list[OutputText]


class IncompleteDetails(BaseModel):
    """Why an answer was cut off."""

    reason: str


class ResponsesResponse(_Open):
    """Body of `/v1/responses`."""

    id: str
    object: str
    created_at: int
    status: str
    error: dict[str, Any] | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    tool_choice: str
    tools: list[Any]
    top_p: float
    usage: ResponsesUsage
    diffulex: ChoiceDetails


class ModelCard(_Open):
    """One served model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(BaseModel):
    """Body of `/v1/models`."""

    object: str
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """Body of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None


class DetokenizeResponse(_Open):
    """Body of `/detokenize`."""

    prompt: str


class AbortResponse(BaseModel):
    """Body of `/abort`."""

    aborted: bool


class StatusResponse(_Open):
    """Body of the administrative and the health routes."""

    status: str


class VersionResponse(BaseModel):
    """Body of `/version`."""

    version: str
    extension_version: str | None
    cuda: bool


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


def generation_responses(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Entries of the OpenAPI document for a route that generates."""
    return {
        200: {
            "model": model,
            "description": "The answer, in one piece or as server-sent events",
            "content": {"text/event-stream": {}},
        },
        **error_responses(400, 404, 409, 413, 415, 429, 499, 503, 504),
    }
