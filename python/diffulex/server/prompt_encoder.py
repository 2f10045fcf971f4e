# SPDX-License-Identifier: Apache-2.0
"""Turns what a client sent into the input of a command, away from the event loop.

With a tokenizer on the frontend the command carries token ids, checked against the limits of the
model; without one it carries the text or the messages, and the backend does the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from diffulex.engine.admission import AdmissionError, AdmissionLimits
from diffulex.sampling_params import SamplingParams
from diffulex.server.api_errors import ApiError
from diffulex.server.protocol import ChatInput, PromptInput, ServingInput
from diffulex.server.request_schema import TEMPLATE_FIELDS

__all__ = ["ChatOptions", "PromptEncoder"]

T = TypeVar("T")


class ChatOptions:
    """How a conversation is rendered.

    Args:
        request: any body with the fields of the chat template.
        is_template_trusted: whether a request may bring a template.

    Raises:
        ApiError: 400, the fields contradict each other or are not allowed.
    """

    def __init__(self, request: Any, *, is_template_trusted: bool) -> None:
        wants_prompt = request.add_generation_prompt
        if wants_prompt and request.continue_final_message:
            raise ApiError(
                400,
                "continue_final_message: expected add_generation_prompt=false with it, got true",
                param="continue_final_message",
            )
        if request.chat_template is not None and not is_template_trusted:
            raise ApiError(
                400,
                "chat_template: expected none, since this server does not run templates of"
                " requests (--trust-request-chat-template), got one",
                param="chat_template",
            )
        self.variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
        for name in TEMPLATE_FIELDS:
            if name in self.variables:
                raise ApiError(
                    400,
                    f"chat_template_kwargs.{name}: expected it beside chat_template_kwargs,"
                    " got it inside",
                    param="chat_template_kwargs",
                )
        if request.continue_final_message:
            self.variables["continue_final_message"] = True
        if wants_prompt is False or request.continue_final_message:
            self.variables["add_generation_prompt"] = False
        if request.chat_template is not None:
            self.variables["chat_template"] = request.chat_template


class PromptEncoder:
    """Tokenises on one thread of its own: tokenizers are not safe to use from several.

    Args:
        frontend: where the tokenizer and the facts about the model are looked up.
    """

    def __init__(self, frontend: Any) -> None:
        self._frontend = frontend
        self._thread: ThreadPoolExecutor | None = None
        self._limits_source: Mapping[str, Any] | None = None
        self._known_limits: AdmissionLimits | None = None

    def close(self) -> None:
        """Ends the thread; a later call starts another one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the frontend, or None."""
        return getattr(self._frontend, "tokenizer", None)

    @property
    def info(self) -> Mapping[str, Any]:
        """What the backend said about itself; empty before it is ready."""
        return getattr(self._frontend, "info", None) or {}

    async def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """The result of a call on the tokenizer's thread.

        Raises:
            ApiError: 400, the tokenizer or the template rejects the input.
        """

        def call() -> T:
            return function(*arguments, **keywords)

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="diffulex-tokenizer")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    async def prompt(self, prompt: str | list[int], *, add_special_tokens: bool) -> ServingInput:
        """The input for a text or for token ids."""
        if not isinstance(prompt, str):
            return PromptInput(prompt)
        if self.tokenizer is None:
            return PromptInput(prompt, add_special_tokens=add_special_tokens)
        return PromptInput(await self.encode_text(prompt, add_special_tokens=add_special_tokens))

    async def chat(
        self, messages: Sequence[Mapping[str, str]], options: ChatOptions
    ) -> ServingInput:
        """The input for a conversation."""
        plain = [dict(message) for message in messages]
        # Without a template the backend has a plain rendering.
        has_template = self.tokenizer is not None and (
            getattr(self.tokenizer, "has_chat_template", True)
            or "chat_template" in options.variables
        )
        if not has_template:
            if options.variables:
                name = next(iter(options.variables))
                raise ApiError(
                    400,
                    f"{name}: expected a server with a chat template, got one without",
                    param=name,
                )
            return ChatInput(plain)
        return PromptInput(await self.encode_chat(plain, options))

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        encode = self.tokenizer.encode
        return list(await self.run(encode, text, add_special_tokens=add_special_tokens))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, str]], options: ChatOptions
    ) -> list[int]:
        """Token ids of a conversation."""
        tokenizer = self.tokenizer

        def encode() -> list[int]:
            text = tokenizer.render_chat(messages, **options.variables)
            return list(tokenizer.encode(text, add_special_tokens=False))

        return await self.run(encode)

    def check(self, prompt: ServingInput, params: SamplingParams, *, is_strict: bool) -> None:
        """Refuses what the engine would refuse, by the same rules.

        What is not encoded yet, and requests before the engine has reported, are left to it.

        Args:
            is_strict: `max_tokens` is what the client asked for, so it must fit.

        Raises:
            ApiError: 400, the request can never be served.
        """
        if not isinstance(prompt, PromptInput) or isinstance(prompt.prompt, str):
            return
        limits = self._limits()
        if limits is None:
            return
        try:
            limits.check(prompt.prompt, params, is_strict=is_strict)
        except AdmissionError as error:
            raise ApiError(
                error.http_status, str(error), code=error.code, param=error.param
            ) from error

    def _limits(self) -> AdmissionLimits | None:
        info = self.info
        if info is not self._limits_source:
            self._limits_source = info
            try:
                self._known_limits = AdmissionLimits.from_info(info)
            except TypeError:  # a frontend that tells less
                self._known_limits = None
        return self._known_limits
