# SPDX-License-Identifier: Apache-2.0
"""The routes of the tokenizer; their shapes are those that evaluation harnesses probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, StrictBool
from starlette.requests import Request
from starlette.responses import Response

from diffulex.server.http.api_errors import ApiError
from diffulex.server.http.error_schema import error_responses
from diffulex.server.http.json_response import JSONBody
from diffulex.server.http.large_bodies import BodyRoute
from diffulex.server.http.request_bounds import check_queue, run_bounded
from diffulex.server.openai.field_types import Ids, Name
from diffulex.server.openai.prompt_encoder import ChatOptions
from diffulex.server.openai.request_schema import TokenizeRequest
from diffulex.server.openai.response_schema import (
    DetokenizeResponse,
    TokenizeResponse,
)

if TYPE_CHECKING:
    from diffulex.server.http.app_options import AppContext

__all__ = ["DetokenizeRequest", "tokenizer_router"]


class DetokenizeRequest(BaseModel):
    """Body of `POST /detokenize`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2]}]})

    model: Name | None = None
    tokens: Ids
    skip_special_tokens: StrictBool = False
    return_token_strs: StrictBool | None = False


class _TokenizerRoutes:
    """The handlers, over one application's context."""

    def __init__(self, context: AppContext) -> None:
        self._context = context

    async def tokenize(self, payload: TokenizeRequest, request: Request) -> Response:
        """Answers `/tokenize`."""
        context = self._context
        self._tokenizer()
        context.check_model(payload.model)
        check_queue(context)
        if (payload.prompt is None) == (payload.messages is None):
            given = "none" if payload.prompt is None else "both"
            raise ApiError(400, f"prompt: expected either prompt or messages, got {given}")
        with context.encoder.counted():
            ids, texts = await run_bounded(context, request, lambda: self._tokenize(payload))
        return JSONBody(
            {
                "tokens": ids,
                "count": len(ids),
                "max_model_len": context.info.get("max_model_len"),
                "token_strs": texts,
            }
        )

    async def _tokenize(self, payload: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        """Token ids of a text or a conversation, and the texts of each if they are wanted."""
        encoder = self._context.encoder
        if payload.messages is not None:
            trusted = self._context.options.trust_request_chat_template
            options = ChatOptions(payload, is_template_trusted=trusted)
            messages = [message.to_message() for message in payload.messages]
            ids = await encoder.encode_chat(messages, options, is_prompt=False)
        else:
            ids = await encoder.encode_text(
                payload.prompt or "",
                add_special_tokens=payload.add_special_tokens is not False,
                is_prompt=False,
            )
        if not payload.return_token_strs:
            return ids, None
        return ids, await encoder.run(_token_texts, encoder.tokenizer, ids, size=len(ids))

    async def detokenize(self, payload: DetokenizeRequest, request: Request) -> Response:
        """Answers `/detokenize`."""
        context = self._context
        self._tokenizer()
        context.check_model(payload.model)
        check_queue(context)
        size = context.info.get("vocab_size")
        highest = max(payload.tokens, default=0)
        if size is not None and highest >= size:
            raise ApiError(
                400,
                f"tokens: expected ids below {size}, got {highest}",
                code="token_out_of_range",
                param="tokens",
            )
        with context.encoder.counted():
            return JSONBody(await run_bounded(context, request, lambda: self._detokenize(payload)))

    async def _detokenize(self, payload: DetokenizeRequest) -> dict[str, Any]:
        encoder, ids, skip = self._context.encoder, payload.tokens, payload.skip_special_tokens
        decode = encoder.known_tokenizer.decode
        body: dict[str, Any] = {"prompt": await encoder.run(decode, ids, skip, size=len(ids))}
        if payload.return_token_strs:
            texts = await encoder.run(_token_texts, encoder.tokenizer, ids, size=len(ids))
            body["token_strs"] = texts
        return body

    async def info(self) -> Response:
        """Answers `/tokenizer_info`."""
        tokenizer = self._tokenizer()
        return JSONBody(await self._context.encoder.run(_describe, tokenizer, self._context.info))

    def _tokenizer(self) -> Any:
        tokenizer = self._context.encoder.tokenizer
        if tokenizer is None:
            self._context.check_accepting()
            raise ApiError(
                503, "tokenizer: expected one in the server, got none", code="no_tokenizer"
            )
        return tokenizer


def _token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """One text per id, special tokens included; each id is decoded alone."""
    texts = {token: str(tokenizer.decode([token], False)) for token in set(ids)}
    return [texts[token] for token in ids]


def _describe(tokenizer: Any, info: Any) -> dict[str, Any]:
    backend = tokenizer.backend
    names = ("eos_token", "bos_token", "pad_token", "mask_token", "unk_token")
    described: dict[str, Any] = {name: _text(getattr(backend, name, None)) for name in names}
    for name in names:
        described[f"{name}_id"] = getattr(backend, f"{name}_id", None)
    if described["mask_token"] is None and info.get("mask_token_id") is not None:
        mask = int(info["mask_token_id"])
        described["mask_token_id"] = mask
        described["mask_token"] = str(tokenizer.decode([mask], False))
    described["chat_template"] = getattr(backend, "chat_template", None)
    described["tokenizer_class"] = type(backend).__name__
    described["model_max_length"] = info.get("max_model_len")
    described["vocab_size"] = info.get("vocab_size")
    described["all_special_ids"] = list(getattr(backend, "all_special_ids", ()))
    return described


def _text(token: Any) -> str | None:
    return None if token is None else str(token)


def tokenizer_router(context: AppContext) -> APIRouter:
    """The routes of the tokenizer."""
    router, routes = APIRouter(tags=["tokenizer"], route_class=BodyRoute), _TokenizerRoutes(context)
    errors = error_responses(400, 404, 413, 415, 429, 503)
    router.add_api_route(
        "/tokenize",
        routes.tokenize,
        methods=["POST"],
        response_model=None,
        responses={200: {"model": TokenizeResponse}, **errors},
        summary="Token ids of a text or a conversation",
    )
    router.add_api_route(
        "/detokenize",
        routes.detokenize,
        methods=["POST"],
        response_model=None,
        responses={200: {"model": DetokenizeResponse}, **errors},
        summary="Text of token ids",
    )
    router.add_api_route(
        "/tokenizer_info",
        routes.info,
        methods=["GET"],
        response_model=None,
        responses=error_responses(503),
        summary="Special tokens and chat template",
    )
    return router
