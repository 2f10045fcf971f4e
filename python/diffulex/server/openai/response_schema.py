# SPDX-License-Identifier: Apache-2.0
"""Bodies of the responses, as the OpenAPI document describes them.

The routes build plain maps; these classes are the description that clients and tests read.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from diffulex.server.http.error_schema import error_responses

__all__ = [
    "ChatCompletionResponse",
    "CompletionResponse",
    "GenerateResponse",
    "ResponsesResponse",
    "generation_responses",
]


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


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
