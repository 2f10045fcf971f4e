# SPDX-License-Identifier: Apache-2.0
"""What makes a serving request inadmissible, decided before it is enqueued.

Imports neither torch nor the compiled module: the HTTP process checks with the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from diffulex.engine.prompt import PromptLimits
from diffulex.engine.prompt import prompt_too_long as _prompt_too_long
from diffulex.errors import PromptError

if TYPE_CHECKING:
    from diffulex.config.sampling_params import SamplingParams

__all__ = ["AdmissionError", "AdmissionLimits", "prompt_too_long"]


class AdmissionError(ValueError):
    """A request that can never be served.

    Attributes:
        code: what the client reads.
        http_status: 400 unless it is the engine's fault.
        param: the field that is wrong, where there is one.
    """

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None):
        super().__init__(message)
        self.code = code
        self.http_status = 400
        self.param = param


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits of an engine, as the backend reports them when it is ready.

    Attributes:
        mask_token_id: None where there is none.
        allows_mask_in_prompt: a prompt goes on as the template of its answer from the first mask on.
        is_prefill_chunked: a prompt may be longer than a batch.
        longest_whole_prompt: as in `PromptLimits`.
    """

    max_model_len: int
    vocab_size: int
    block_size: int
    buffer_size: int
    page_size: int
    num_pages: int
    max_num_batched_tokens: int
    mask_token_id: int | None = None
    allows_mask_in_prompt: bool = False
    is_prefill_chunked: bool = False
    longest_whole_prompt: int | None = None

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> AdmissionLimits:
        """Limits from the readiness report; unknown keys are ignored."""
        return cls(**{item.name: info[item.name] for item in fields(cls) if item.name in info})

    def check(self, prompt: Sequence[int], params: SamplingParams, *, is_strict: bool) -> None:
        """Raises `AdmissionError` for a request that can never be served.

        Args:
            prompt: token ids.
            params: of the request.
            is_strict: `max_tokens` must fit as it is, rather than be cut.
        """
        self._check_prompt(prompt)
        self._check_params(params)
        num_prompt, num_output = self.lengths(prompt, params)
        longest, num_template = self.max_model_len, len(prompt) - num_prompt
        if is_strict and num_template > params.max_tokens:
            raise AdmissionError(
                f"max_tokens: expected at least {num_template}, the tokens of the prompt from its"
                f" first mask on, got {params.max_tokens}",
                param="max_tokens",
            )
        if is_strict and not num_template and num_prompt + params.max_tokens > longest:
            raise AdmissionError(
                f"max_tokens: expected prompt and max_tokens to be at most {longest} tokens"
                f" together, got {num_prompt} and {params.max_tokens}{_window(longest)}",
                code="context_length_exceeded",
                param="max_tokens",
            )
        self._check_capacity(num_prompt, num_output)

    def lengths(self, prompt: Sequence[int], params: SamplingParams) -> tuple[int, int]:
        """Tokens of the prompt, and most of its answer: of a prompt with masks, where these may be,
        what stands before the first of them, and the rest."""
        num_prompt, mask = len(prompt), self.mask_token_id
        if self.allows_mask_in_prompt and mask is not None and mask in prompt:
            first = prompt.index(mask)
            return first, num_prompt - first
        return num_prompt, min(params.max_tokens, self.max_model_len - num_prompt)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        longest = self.max_model_len
        try:
            PromptLimits(
                longest,
                self.vocab_size,
                self.longest_whole_prompt,
                refused_mask=None if self.allows_mask_in_prompt else self.mask_token_id,
            ).check(prompt)
        except PromptError as error:
            raise _refused(error, longest if len(prompt) >= longest else None) from error

    def _check_params(self, params: SamplingParams) -> None:
        if params.top_p is not None and not 0 < params.top_p <= 1:
            raise AdmissionError(
                f"top_p: expected a number in (0, 1], got {params.top_p}", param="top_p"
            )
        if params.top_k is not None and params.top_k < -1:
            raise AdmissionError(
                f"top_k: expected -1, 0 or a positive integer, got {params.top_k}", param="top_k"
            )
        for token_id in params.stop_token_ids:
            if token_id >= self.vocab_size:
                raise AdmissionError(
                    f"stop_token_ids: expected ids in [0, {self.vocab_size}), got {token_id}",
                    param="stop_token_ids",
                )

    def _check_capacity(self, num_prompt: int, num_output: int) -> None:
        padded = -(-num_prompt // self.block_size) * self.block_size
        rows = padded + self.buffer_size * self.block_size
        if not self.is_prefill_chunked and rows > self.max_num_batched_tokens:
            raise AdmissionError(
                f"prompt: expected at most {self.max_num_batched_tokens} rows in a batch"
                f" (max_num_batched_tokens), got {rows}: {num_prompt} prompt tokens, padded to"
                f" whole blocks, and {self.buffer_size} blocks of {self.block_size}",
                code="context_length_exceeded",
                param="prompt",
            )
        num_pages = -(-(num_prompt + num_output) // self.page_size)
        if num_pages > self.num_pages:
            raise AdmissionError(
                f"prompt: expected prompt and answer to fit into {self.num_pages} pages of"
                f" {self.page_size} tokens, got {num_prompt} and {num_output} tokens",
                code="kv_capacity",
                param="prompt",
            )


def prompt_too_long(max_model_len: int, got: str) -> AdmissionError:
    """The error for a prompt that leaves no room for an answer.

    Args:
        got: how many tokens it has.
    """
    return _refused(_prompt_too_long(max_model_len, got), max_model_len)


def _refused(error: PromptError, window: int | None) -> AdmissionError:
    """The engine's error as one of serving; `window`: the length of the model, if it is too short."""
    text = str(error) if window is None else f"{error}{_window(window)}"
    return AdmissionError(text, code=error.code, param="prompt")


def _window(max_model_len: int) -> str:
    """What frameworks recognise the error by: they read the message, not the code."""
    text = f"This model's maximum context length is {max_model_len} tokens"
    return f" (context_length_exceeded: {text})"
