# SPDX-License-Identifier: Apache-2.0
"""Turns what a client sent into the input of a command, away from the event loop.

With a tokenizer on the frontend the command carries token ids, checked against the limits of the
model; without one it carries the text or the messages, and the backend does the same.

A text that cannot fit is not encoded: its length tells, or else the tokens of its pieces, which are
counted until they are too many. Long texts have separate threads, where the pieces of several
take turns, so that a short one never waits for them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from diffulex.checkpoint.tokenizer import RENDERER_ARGUMENTS
from diffulex.config.sampling_params import SamplingParams
from diffulex.server.http.api_errors import ApiError
from diffulex.server.openai.field_types import TEMPLATE_FIELDS
from diffulex.server.openai.request_schema import MAX_DECODED
from diffulex.serving.admission import AdmissionError, AdmissionLimits, prompt_too_long
from diffulex.wire.protocol import ChatInput, PromptInput, ServingInput

if TYPE_CHECKING:
    from diffulex.server.http.app_frontend import AppFrontend, AppTokenizer

__all__ = ["ChatOptions", "PromptEncoder", "num_chars"]

T = TypeVar("T")

#: Texts up to so many characters, or tokens, are encoded on the thread for short ones.
SHORT_TEXT = 4 << 10
# Most texts have fewer characters per token: one of more is counted in pieces first.
_USUAL_CHARS_PER_TOKEN = 8
_PIECE_CHARS = 16 << 10
# A cut may part what would have been one token; no tokenizer makes more out of it.
_TOKENS_PER_CUT = 16


def num_chars(value: Any) -> int:
    """Characters of the texts in a JSON value, and one for every value in it."""
    count, open_values = 0, [value]
    while open_values:
        item = open_values.pop()
        count += 1
        if isinstance(item, str):
            count += len(item)
        elif isinstance(item, dict):
            open_values.extend(item)
            open_values.extend(item.values())
        elif isinstance(item, list):
            open_values.extend(item)
    return count


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
        for name in RENDERER_ARGUMENTS:
            if name in self.variables:
                raise ApiError(
                    400,
                    f"chat_template_kwargs.{name}: expected a variable of the template, got an"
                    " argument of its renderer",
                    param="chat_template_kwargs",
                )
        if request.continue_final_message:
            self.variables["continue_final_message"] = True
        if wants_prompt is False or request.continue_final_message:
            self.variables["add_generation_prompt"] = False
        if request.chat_template is not None:
            self.variables["chat_template"] = request.chat_template


class PromptEncoder:
    """Encodes short texts on one thread and long ones on others.

    Args:
        frontend: where the tokenizer and the facts about the model are looked up.
    """

    def __init__(self, frontend: AppFrontend) -> None:
        self._frontend = frontend
        self._short: ThreadPoolExecutor | None = None
        self._long: ThreadPoolExecutor | None = None
        self._limits_source: Mapping[str, Any] | None = None
        self._known_limits: AdmissionLimits | None = None
        #: Requests that wait for a thread or are encoded.
        self.num_open = 0

    def close(self) -> None:
        """Ends the threads; a later call starts others."""
        for pool in (self._short, self._long):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        self._short = self._long = None

    @property
    def tokenizer(self) -> AppTokenizer | None:
        """The tokenizer of the frontend, or None."""
        return self._frontend.tokenizer

    @property
    def known_tokenizer(self) -> AppTokenizer:
        """The tokenizer, for callers that know that there is one."""
        assert self.tokenizer is not None
        return self.tokenizer

    @property
    def info(self) -> Mapping[str, Any]:
        """What the backend said about itself; empty before it is ready."""
        return self._frontend.info

    @property
    def max_chars(self) -> int | None:
        """The most characters that a text of `max_model_len` tokens may have, since no token has
        more than `max_token_chars`; None where one of them is not known."""
        longest, tokenizer = self.info.get("max_model_len"), self.tokenizer
        if longest is None or tokenizer is None:
            return None
        per_token = tokenizer.max_token_chars
        return None if per_token is None else int(longest * per_token)

    @property
    def max_listed(self) -> int:
        """Token ids that the routes of the tokenizer take or give: texts may be put together from
        several answers, so they are more than a short model has."""
        return max(MAX_DECODED, int(self.info.get("max_model_len") or 0))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request while it is encoded."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    async def run(
        self, function: Callable[..., T], *arguments: Any, size: int = 0, **keywords: Any
    ) -> T:
        """The result of a call on a thread of the tokenizer.

        Args:
            size: characters or tokens it is about.

        Raises:
            ApiError: 400, the tokenizer or the template rejects the input.
        """

        def call() -> T:
            return function(*arguments, **keywords)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool(size), call)
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    def _pool(self, size: int) -> ThreadPoolExecutor:
        if size <= SHORT_TEXT:
            if self._short is None:
                self._short = ThreadPoolExecutor(1, thread_name_prefix="diffulex-tokenizer")
            return self._short
        if self._long is None:
            num_threads = min(4, max(1, (os.cpu_count() or 1) // 2))
            self._long = ThreadPoolExecutor(num_threads, thread_name_prefix="diffulex-long-texts")
        return self._long

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
            self.tokenizer.has_chat_template or "chat_template" in options.variables
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

    async def encode_text(
        self, text: str, *, add_special_tokens: bool, is_prompt: bool = True
    ) -> list[int]:
        """Token ids of a text.

        Args:
            is_prompt: it is to be answered, so its tokens have to fit; others are at most as many
                as `/detokenize` takes.

        Raises:
            ApiError: 400, it is too long.
        """
        self._check_chars(len(text))
        await self._check_pieces(text, is_prompt)
        encode = self.known_tokenizer.encode
        ids = await self.run(encode, text, add_special_tokens=add_special_tokens, size=len(text))
        if not is_prompt and len(ids) > self.max_listed:
            raise self._too_many(len(ids), is_prompt)
        return list(ids)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        options: ChatOptions,
        *,
        is_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation; `is_prompt` and errors as for `encode_text`."""
        tokenizer = self.known_tokenizer

        def encode() -> str | list[int]:
            text: str = tokenizer.render_chat(messages, **options.variables)
            if len(text) > SHORT_TEXT:
                return text
            self._check_chars(len(text))
            return list(tokenizer.encode(text, add_special_tokens=False))

        # A template may leave out much of what it is given, so only its result is measured.
        size = sum(len(message["content"]) for message in messages) + num_chars(options.variables)
        found = await self.run(encode, size=size)
        if isinstance(found, str):
            return await self.encode_text(found, add_special_tokens=False, is_prompt=is_prompt)
        return found

    def _check_chars(self, num_chars: int) -> None:
        most, per_token = self.max_chars, self.known_tokenizer.max_token_chars
        if most is not None and per_token is not None and num_chars > most:
            num_tokens = -(-num_chars // per_token)
            raise _refused(prompt_too_long(self.info["max_model_len"], f"at least {num_tokens}"))

    def _too_many(self, num_tokens: int, is_prompt: bool) -> ApiError:
        if is_prompt:
            longest = self.info["max_model_len"]
            return _refused(prompt_too_long(longest, f"at least {num_tokens}"))
        return ApiError(
            400,
            f"prompt: expected at most {self.max_listed} tokens, got at least {num_tokens}",
            code="context_length_exceeded",
            param="prompt",
        )

    async def _check_pieces(self, text: str, is_prompt: bool) -> None:
        """Counts tokens of a long text piece by piece, until they are too many."""
        longest = self.info.get("max_model_len") if is_prompt else self.max_listed
        if longest is None or len(text) <= max(SHORT_TEXT, longest * _USUAL_CHARS_PER_TOKEN):
            return
        encode, num_tokens = self.known_tokenizer.encode, 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            ids = await self.run(encode, piece, add_special_tokens=False, size=len(text))
            num_tokens += len(ids) - _TOKENS_PER_CUT
            if num_tokens >= longest + (not is_prompt):
                raise self._too_many(num_tokens, is_prompt)

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
            raise _refused(error) from error

    def num_template(self, prompt: ServingInput, params: SamplingParams) -> int:
        """Tokens of a prompt from its first mask on, where these may be: the template of the answer."""
        limits = self._limits()
        if limits is None or not isinstance(prompt, PromptInput) or isinstance(prompt.prompt, str):
            return 0
        return len(prompt.prompt) - limits.lengths(prompt.prompt, params)[0]

    def _limits(self) -> AdmissionLimits | None:
        info = self.info
        if info is not self._limits_source:
            self._limits_source = info
            try:
                self._known_limits = AdmissionLimits.from_info(info)
            except TypeError:  # a frontend that tells less
                self._known_limits = None
        return self._known_limits


def _refused(error: AdmissionError) -> ApiError:
    return ApiError(error.http_status, str(error), code=error.code, param=error.param)
