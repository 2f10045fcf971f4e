# SPDX-License-Identifier: Apache-2.0
"""The routes that generate: `/generate`, `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from diffulex.config.sampling_params import SamplingParams
from diffulex.server.http.api_errors import CLIENT_CLOSED, ApiError, error_response, shown
from diffulex.server.http.disconnect import ClientLeftError, DisconnectFlag, run_while_connected
from diffulex.server.http.json_response import JSONBody
from diffulex.server.http.large_bodies import BodyRoute
from diffulex.server.http.request_bounds import check_queue, requested_timeout_s, run_bounded
from diffulex.server.http.request_record import record_of
from diffulex.server.http.sse import DONE, PING, EventStream, sse
from diffulex.server.openai.field_types import REQUEST_ID
from diffulex.server.openai.generation import EventMerger, Generation
from diffulex.server.openai.openai_format import OpenAIFrames, OpenAIRoute, openai_response
from diffulex.server.openai.prompt_encoder import SHORT_TEXT, ChatOptions, num_chars
from diffulex.server.openai.request_params import (
    GeneratingRequest,
    check_trajectory,
    request_options,
    sampling_params_from_request,
)
from diffulex.server.openai.request_schema import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerateRequest,
)
from diffulex.server.openai.response_schema import (
    ChatCompletionResponse,
    CompletionResponse,
    GenerateResponse,
    ResponsesResponse,
    generation_responses,
)
from diffulex.server.openai.responses_format import ResponseFrames, ResponseObject
from diffulex.server.openai.responses_schema import ResponsesRequest
from diffulex.server.openai.unsupported_fields import check_responses, check_supported
from diffulex.server.openai.usage import usage_of
from diffulex.wire.protocol import (
    PromptInput,
    ServingBufferSnapshot,
    ServingError,
    ServingEvent,
    ServingInput,
    ServingReply,
    StreamMode,
)

if TYPE_CHECKING:
    from diffulex.server.http.app_options import AppContext

__all__ = ["generation_router"]

_RID = re.compile(REQUEST_ID)
# While no more requests are encoded, a short text is encoded within milliseconds.
_FEW_ENCODED = 8
# A stream without comments is given so long to fail with a status.
_FIRST_EVENT_S = 15.0
# The frontend measures the server's own limit from when it gets a request.
_LONG_ENCODING_S = 0.5


class _Frames(Protocol):
    """Turns events into frames; `terminator` ends the stream, also after an error."""

    terminator: ClassVar[bytes]

    def frames(self, number: int, event: ServingEvent) -> bytes: ...

    def end(self, elapsed_s: float) -> bytes: ...


class _GenerateFrames:
    """Frames of `/generate`: the events themselves."""

    terminator: ClassVar[bytes] = DONE

    def __init__(self, generation: Generation, has_dllm: bool, with_prompt_ids: bool) -> None:
        self._generation = generation
        self._has_dllm = has_dllm
        self._with_prompt_ids = with_prompt_ids

    def frames(self, number: int, event: ServingEvent) -> bytes:
        """The frame of an event."""
        if isinstance(event, ServingError):
            return sse(event.to_dict() | {"code": event.code})
        if isinstance(event, ServingReply):
            return sse({"event": "final"} | self.reply(event, None))
        return sse(event.to_dict())

    def end(self, elapsed_s: float) -> bytes:
        """Nothing follows the final frame but the terminator."""
        return b""

    def reply(self, reply: ServingReply, elapsed_s: float | None) -> dict[str, Any]:
        """The body of a response in one piece."""
        prompts = self._generation.inputs
        usage = usage_of([reply], prompts, has_dllm=self._has_dllm, elapsed_s=elapsed_s)
        answer = reply.to_dict() | {
            "finish_detail": reply.finish_detail or reply.finish_reason,
            "usage": usage,
        }
        if self._with_prompt_ids:
            prompt = prompts[0]
            is_encoded = isinstance(prompt, PromptInput) and not isinstance(prompt.prompt, str)
            answer["prompt_token_ids"] = cast(PromptInput, prompt).prompt if is_encoded else None
        return answer


class _GenerationRoutes:
    """The handlers, over one application's context."""

    def __init__(self, context: AppContext) -> None:
        self._context = context

    async def generate(self, payload: GenerateRequest, request: Request) -> Response:
        """Answers `/generate`."""
        context = self._context
        context.check_accepting()
        params = self._params(payload)

        async def prepare() -> Sequence[ServingInput]:
            prompt = await context.encoder.prompt(
                payload.prompt, add_special_tokens=payload.add_special_tokens
            )
            self._check(prompt, payload, params)
            return [prompt]

        mode = payload.stream_mode if payload.stream else None
        generation = await self._prepare(request, payload, params, prepare, mode, 1, False)
        has_dllm = not context.options.disable_dllm_usage
        frames = _GenerateFrames(generation, has_dllm, payload.return_prompt_token_ids)
        if mode is not None:
            return await self._stream(request, generation, frames)
        return await self._answer(
            request, generation, lambda replies, elapsed_s: frames.reply(replies[0], elapsed_s)
        )

    async def chat(self, payload: ChatCompletionRequest, request: Request) -> Response:
        """Answers `/v1/chat/completions`."""
        context = self._context
        context.check_accepting()
        model = context.check_model(payload.model)
        check_supported(payload)
        if not payload.messages:
            raise ApiError(400, "messages must not be empty", param="messages")
        params = self._params(payload)
        prepare = self._conversation(payload, params)
        return await self._openai(request, payload, "chat", model, params, prepare)

    async def completions(self, payload: CompletionRequest, request: Request) -> Response:
        """Answers `/v1/completions`."""
        context = self._context
        context.check_accepting()
        model = context.check_model(payload.model)
        check_supported(payload)
        limit, count = context.options.max_prompts_per_request, len(payload.prompt)
        if count > limit:
            raise ApiError(
                400, f"prompt: expected at most {limit} prompts, got {count}", param="prompt"
            )
        if payload.echo and context.encoder.tokenizer is None:
            self._check_echo(payload)
        # The engine's parameters have no form of it.
        limit_of = {"max_tokens": 1} if payload.is_echo_only else {}
        params = self._params(payload.model_copy(update=limit_of))

        async def prepare() -> Sequence[ServingInput]:
            prompts = []
            for item in payload.prompt:
                prompt = await context.encoder.prompt(
                    item, add_special_tokens=payload.add_special_tokens
                )
                self._check(prompt, payload, params)
                prompts.append(prompt)
            return prompts

        return await self._openai(request, payload, "text", model, params, prepare)

    async def responses(self, payload: ResponsesRequest, request: Request) -> Response:
        """Answers `/v1/responses`."""
        context = self._context
        context.check_accepting()
        model = context.check_model(payload.model)
        check_responses(payload)
        params = self._params(payload)
        prepare = self._conversation(payload, params)
        mode = self._v1_mode(payload)
        generation = await self._prepare(
            request, payload, params, prepare, mode, 1, payload.wants_max_tokens
        )
        has_dllm = not context.options.disable_dllm_usage
        response = ResponseObject(payload, generation, model, int(time.time()), has_dllm)
        if mode is not None:
            return await self._stream(request, generation, ResponseFrames(response, mode))
        return await self._answer(
            request,
            generation,
            lambda replies, elapsed_s: response.finished(replies[0], elapsed_s),
        )

    async def no_response(self, response_id: str) -> Response:
        """Answers requests for a response of earlier."""
        raise ApiError(
            404,
            "response_id: expected no request for it, since this server keeps no responses,"
            f" got {response_id!r}",
            code="not_found",
            param="response_id",
        )

    def _conversation(
        self, payload: ChatCompletionRequest | ResponsesRequest, params: SamplingParams
    ) -> Callable[[], Any]:
        """What encodes the messages of a request."""
        encoder, options = self._context.encoder, self._context.options
        chat_options = ChatOptions(payload, is_template_trusted=options.trust_request_chat_template)

        async def prepare() -> Sequence[ServingInput]:
            messages = [message.to_message() for message in payload.messages]
            prompt = await encoder.chat(messages, chat_options)
            self._check(prompt, payload, params)
            return [prompt]

        return prepare

    def _v1_mode(self, payload: Any) -> StreamMode | None:
        """How the answer is streamed; None: in one piece."""
        if not payload.stream:
            return None
        return payload.stream_mode or cast(StreamMode, self._context.options.v1_stream_mode)

    def _check_echo(self, payload: CompletionRequest) -> None:
        if not all(isinstance(item, str) for item in payload.prompt):
            raise ApiError(
                400,
                "echo: expected prompts as text (this server has no tokenizer), got token ids",
                param="echo",
            )

    async def _echoes(self, payload: Any, num_choices: int) -> list[str]:
        """The text in front of each choice."""
        if not isinstance(payload, CompletionRequest) or not payload.echo:
            return []
        encoder = self._context.encoder
        texts: list[str] = []
        for item in payload.prompt:
            if isinstance(item, str):
                texts.append(item)
            else:
                decode = encoder.known_tokenizer.decode
                texts.append(await encoder.run(decode, item, payload.skip_special_tokens))
        return [text for text in texts for _ in range(num_choices)]

    def _params(self, payload: GeneratingRequest) -> SamplingParams:
        options = self._context.options
        # Completions have their own, which is that of OpenAI.
        is_completion = isinstance(payload, CompletionRequest)
        return sampling_params_from_request(
            payload,
            default_max_tokens=None if is_completion else options.default_max_tokens,
            bounds=options.decoding_bounds,
            max_trajectory_tokens=options.max_trajectory_tokens,
        )

    def _check(
        self, prompt: ServingInput, payload: GeneratingRequest, params: SamplingParams
    ) -> None:
        """Refuses what can never be served; `/generate` cuts `max_tokens`, but no template."""
        encoder, wants = self._context.encoder, payload.wants_max_tokens
        num_template = encoder.num_template(prompt, params)
        can_cut = isinstance(payload, GenerateRequest) and not num_template
        encoder.check(prompt, params, is_strict=wants and not can_cut)
        if num_template and not wants:
            check_trajectory(params, self._context.options.max_trajectory_tokens, num_template)

    async def _openai(
        self,
        request: Request,
        payload: Any,
        kind: Any,
        model: str,
        params: SamplingParams,
        prepare: Callable[[], Any],
    ) -> Response:
        context = self._context
        num_choices = payload.n or 1
        if num_choices > context.options.max_n:
            raise ApiError(
                400, f"n: expected at most {context.options.max_n}, got {num_choices}", param="n"
            )
        mode = self._v1_mode(payload)
        echoes: list[str] = []

        async def encode() -> Sequence[ServingInput]:
            inputs: Sequence[ServingInput] = await prepare()
            echoes.extend(await self._echoes(payload, num_choices))
            return inputs

        generation = await self._prepare(
            request, payload, params, encode, mode, num_choices, payload.wants_max_tokens
        )
        route = OpenAIRoute(
            kind,
            generation.rid,
            model,
            int(time.time()),
            num_top=params.logprobs,
            echoes=echoes,
            has_dllm=not context.options.disable_dllm_usage,
        )
        if mode is None:
            return await self._answer(
                request,
                generation,
                lambda replies, elapsed_s: openai_response(route, generation, replies, elapsed_s),
            )
        options = payload.stream_options
        has_usage = options is not None and bool(options.include_usage)
        frames = OpenAIFrames(
            route,
            generation,
            mode,
            has_usage=has_usage,
            has_running_usage=has_usage and bool(options.continuous_usage_stats),
        )
        return await self._stream(request, generation, frames)

    async def _prepare(
        self,
        request: Request,
        payload: GeneratingRequest,
        params: SamplingParams,
        prepare: Callable[[], Any],
        mode: StreamMode | None,
        num_choices: int,
        strict_max_tokens: bool,
    ) -> Generation:
        """Names and encodes a request; its id is live from here on, and not if this fails."""
        context, record = self._context, record_of(request.scope)
        timeout_s = requested_timeout_s(context, request)
        check_queue(context)
        rid = self._request_id(request, payload)
        context.live.claim(rid)
        record.rid = rid
        if isinstance(payload, (GenerateRequest, CompletionRequest)):
            record.prompt = payload.prompt
        else:
            record.prompt = payload.messages
        try:
            with context.encoder.counted():
                inputs = await self._encode(request, payload, prepare)
            if timeout_s is None and record.elapsed_s > _LONG_ENCODING_S:
                timeout_s = context.frontend.limits.request_timeout_s or None
            if timeout_s is not None:
                timeout_s = max(0.001, timeout_s - record.elapsed_s)
            generation = Generation.expand(
                rid=rid,
                inputs=inputs,
                params=params,
                num_choices=num_choices,
                stream_mode=mode,
                user=payload.user,
                created_time=time.time(),
                strict_max_tokens=strict_max_tokens,
                options=request_options(payload),
                timeout_s=timeout_s,
                info=context.info,
                has_tokens=not payload.is_echo_only,
            )
            context.check_can_run(generation.commands)
            context.live.start(generation)
        except BaseException:
            context.live.release(rid)
            raise
        record.generation = generation
        return generation

    async def _encode(
        self, request: Request, payload: GeneratingRequest, prepare: Callable[[], Any]
    ) -> Sequence[ServingInput]:
        """The inputs of a request. What may take long ends with its client and with its time."""
        encoder = self._context.encoder
        template = None
        if isinstance(payload, (ChatCompletionRequest, ResponsesRequest)):
            template = [payload.chat_template, payload.chat_template_kwargs]
        size = _num_chars(record_of(request.scope).prompt) + num_chars(template)
        is_brief = encoder.num_open <= _FEW_ENCODED and size <= SHORT_TEXT
        work = prepare() if is_brief else run_bounded(self._context, request, prepare)
        inputs: Sequence[ServingInput] = await work
        return inputs

    def _request_id(self, request: Request, payload: GeneratingRequest) -> str:
        given = payload.request_id
        if given is None:
            # A header comes with many proxies and clients: one of another form is not an error.
            header = request.headers.get("x-request-id", "")
            given = header if _RID.fullmatch(header) else None
        elif not _RID.fullmatch(given):
            raise ApiError(
                400,
                f"request_id: expected 1 to 64 of A-Z a-z 0-9 . _ -, got {shown(given)}",
                param="request_id",
            )
        if given is None:
            return str(self._context.frontend.new_request_id())
        return f"diffulex-{given}"

    async def _answer(
        self,
        request: Request,
        generation: Generation,
        body: Callable[[list[ServingReply], float], dict[str, Any]],
    ) -> Response:
        """A response in one piece."""
        context, record = self._context, record_of(request.scope)
        headers = {"X-Request-Id": generation.rid}
        try:
            replies = await run_while_connected(
                request.receive, lambda is_left: generation.collect(context.frontend, is_left)
            )
        except ClientLeftError as error:
            record.reason = "client_disconnected"
            return error_response(ApiError(CLIENT_CLOSED, str(error)), headers)
        except ApiError as error:
            record.reason = error.code
            return error_response(error, headers)
        finally:
            context.live.release(generation.rid)
        record.replies = replies
        return JSONBody(body(replies, record.elapsed_s), headers=headers)

    async def _stream(self, request: Request, generation: Generation, frames: _Frames) -> Response:
        """A stream. Its status is decided by the first event, if that comes in time."""
        context, record = self._context, record_of(request.scope)
        headers = {"X-Request-Id": generation.rid}
        flag = DisconnectFlag()
        merger = generation.open_streams(context.frontend, flag.is_set)
        pause_s = context.options.ping_interval or _FIRST_EVENT_S
        try:
            first = await run_while_connected(request.receive, lambda _: merger.peek(pause_s))
        except BaseException as error:
            context.live.release(generation.rid)
            await merger.aclose()
            if isinstance(error, ClientLeftError):
                record.reason = "client_disconnected"
                return error_response(ApiError(CLIENT_CLOSED, str(error)), headers)
            raise
        if first is not None and isinstance(first[1], ServingError):
            context.live.release(generation.rid)
            await merger.aclose()
            record.reason = first[1].code
            failure = ApiError.from_event(first[1], retry_after_s=context.retry_after_s)
            return error_response(failure, headers)

        def on_end(is_sent: bool) -> None:
            context.live.release(generation.rid)
            merger.cancel()  # the frames may never have started
            if not is_sent:
                flag.set()
                record.status, record.reason = CLIENT_CLOSED, "client_disconnected"

        body = self._frames(request, merger, frames)
        return EventStream(body, headers=headers, on_end=on_end)

    async def _frames(
        self, request: Request, merger: EventMerger, frames: _Frames
    ) -> AsyncGenerator[bytes, None]:
        record, interval_s = record_of(request.scope), self._context.options.ping_interval
        sent_at = time.monotonic()
        try:
            async for item in merger.events(interval_s or _FIRST_EVENT_S):
                # Also events may bring nothing to send, for example tokens without text.
                if interval_s and (item is None or time.monotonic() - sent_at >= interval_s):
                    yield PING
                    sent_at = time.monotonic()
                if item is None:
                    continue
                number, event = item
                if isinstance(event, ServingReply):
                    record.replies.append(event)
                elif isinstance(event, ServingError):
                    record.status, record.reason = event.http_status, event.code
                elif isinstance(event, ServingBufferSnapshot) and record.first_snapshot_s is None:
                    record.first_snapshot_s = record.elapsed_s
                if frame := frames.frames(number, event):
                    yield frame
                    sent_at = time.monotonic()
            if record.reason is None and (frame := frames.end(record.elapsed_s)):
                yield frame
            if frames.terminator:
                yield frames.terminator
        finally:
            await merger.aclose()


def _num_chars(prompt: Any) -> int:
    """Characters of a prompt, of prompts or of messages."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt[:1]):
        return sum(
            _num_chars(item.content if isinstance(item, ChatMessage) else item) for item in prompt
        )
    return 0


def generation_router(context: AppContext) -> APIRouter:
    """The routes that generate."""
    router, routes = APIRouter(route_class=BodyRoute), _GenerationRoutes(context)
    for path, endpoint, response, summary in (
        ("/generate", routes.generate, GenerateResponse, "Generate from a prompt"),
        (
            "/v1/chat/completions",
            routes.chat,
            ChatCompletionResponse,
            "Answer a conversation (OpenAI)",
        ),
        ("/v1/completions", routes.completions, CompletionResponse, "Continue prompts (OpenAI)"),
        ("/v1/responses", routes.responses, ResponsesResponse, "Answer an input (OpenAI)"),
    ):
        router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            response_model=None,
            responses=generation_responses(response),
            summary=summary,
            tags=["generation"],
        )
    router.add_api_route(
        "/v1/responses/{response_id}",
        routes.no_response,
        methods=["GET", "DELETE"],
        response_model=None,
        include_in_schema=False,
    )
    return router
