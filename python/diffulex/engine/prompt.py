# SPDX-License-Identifier: Apache-2.0
"""Prompts in their accepted forms, and what makes one inadmissible."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from diffulex.config.sampling_params import SamplingParams, choice_seed
from diffulex.errors import PromptError, SamplingParamsError

if TYPE_CHECKING:
    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.config import Config
    from diffulex.config.table import SamplerConfig

__all__ = [
    "Prompt",
    "PromptLimits",
    "encode_prompt",
    "prompt_too_long",
    "repeated",
    "split_prompts",
    "spread_params",
]

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, str]]"


def _is_int(value: object) -> bool:
    # numpy integers index like ints; bools do not mean token ids, and arrays have the method too.
    is_index = hasattr(value, "__index__") and not isinstance(value, bool)
    return is_index and getattr(value, "ndim", 0) == 0


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What an engine takes as a prompt; servers check by the same rules.

    Attributes:
        longest_whole_prompt: most tokens of a prompt where an exported program must hold it whole.
        refused_mask: the mask's id, where prompts may not have it: texts of clients may spell it.
    """

    max_model_len: int
    vocab_size: int
    longest_whole_prompt: int | None = None
    refused_mask: int | None = None

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises PromptError for token ids that are no prompt of this engine."""
        if not token_ids:
            raise PromptError("prompt: expected at least one token, got an empty prompt")
        if len(token_ids) >= self.max_model_len:
            raise prompt_too_long(self.max_model_len, str(len(token_ids)))
        whole = self.longest_whole_prompt
        if whole is not None and len(token_ids) > whole:
            raise PromptError(
                f"prompt: expected at most {whole} tokens, the rows of the exported program (diffulex"
                f" edge export --max-rows), got {len(token_ids)}",
                code="context_length_exceeded",
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            raise PromptError(
                f"prompt: expected token ids in [0, {self.vocab_size}),"
                f" got {low if low < 0 else high}",
                code="token_out_of_range",
            )
        if self.refused_mask is not None and self.refused_mask in token_ids:
            raise PromptError(
                f"prompt: expected no mask token, got id {self.refused_mask}"
                " (allow_mask_in_prompt takes it as a position to fill in)",
                code="mask_token_in_prompt",
            )


def prompt_too_long(max_model_len: int, got: str) -> PromptError:
    """The error for a prompt that leaves no room for an answer.

    Args:
        got: how many tokens it has.
    """
    return PromptError(
        f"prompt: expected at most {max_model_len - 1} tokens (max_model_len {max_model_len}),"
        f" got {got}",
        code="context_length_exceeded",
    )


def split_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts, made from a single prompt or a list.

    A list of integers is one prompt of token ids, a list of mappings is one chat.
    """
    if isinstance(prompts, str):
        return [prompts]
    is_scalar = getattr(prompts, "ndim", 1) == 0
    if isinstance(prompts, (bytes, Mapping)) or is_scalar or not isinstance(prompts, Iterable):
        raise PromptError(
            "prompts: expected a text, token ids, chat messages or a list of these,"
            f" got {prompts!r}"
        )
    items = list(prompts)
    if not items:
        raise PromptError("prompts: expected at least one prompt, got none")
    if _is_int(items[0]) or isinstance(items[0], Mapping):
        return [items]
    return items


def spread_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One SamplingParams per prompt.

    Raises:
        SamplingParamsError: a list of another length, or something else than parameters.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    is_list = isinstance(params, Sequence) and not isinstance(params, (str, bytes))
    if not is_list or not all(isinstance(item, SamplingParams) for item in params):
        raise SamplingParamsError(
            f"sampling_params: expected SamplingParams or a list of them, got {params!r}"
        )
    listed = list(params)
    if len(listed) != count:
        raise SamplingParamsError(f"sampling_params: expected one or {count}, got {len(listed)}")
    return listed


def repeated(
    work: Sequence[tuple[tuple[int, ...], SamplingParams]], n: int, sampler: SamplerConfig
) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Every prompt with its parameters `n` times in a row, each with its own seed.

    Raises:
        SamplingParamsError: `n` is no positive integer.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise SamplingParamsError(f"n: expected an integer of at least 1, got {n!r}")
    if n == 1:
        return list(work)
    result = []
    for token_ids, params in work:
        temperature = sampler.temperature if params.temperature is None else params.temperature
        # Without a seed those that draw have one each anyway; the others share the engine's.
        seed = sampler.seed if params.seed is None and not temperature else params.seed
        for choice in range(n):
            own = None if seed is None else choice_seed(seed, choice)
            result.append((token_ids, dataclasses.replace(params, seed=own)))
    return result


def encode_prompt(
    prompt: Prompt, config: Config, tokenizer: Tokenizer | None, use_chat_template: bool
) -> tuple[int, ...]:
    """Checked token ids of a prompt.

    Raises:
        PromptError: empty, too long, ids outside the vocabulary, or text without a tokenizer.
    """
    token_ids = _token_ids(prompt, tokenizer, use_chat_template)
    # The id of the mask is one like others in a prompt: its positions are never opened.
    limits = PromptLimits(
        config.scheduler.max_model_len, config.model.spec.vocab_size, config.longest_whole_prompt
    )
    limits.check(token_ids)
    return token_ids


def _token_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, use_chat_template: bool
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("prompt: expected token ids (the engine has no tokenizer), got text")
        if use_chat_template:
            return tuple(tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))
        return tuple(tokenizer.encode(prompt))
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise PromptError(f"prompt: expected a text or a list of token ids, got {prompt!r}")
    if getattr(prompt, "ndim", 1) != 1:
        shape = list(getattr(prompt, "shape", ()))
        raise PromptError(f"prompt: expected one dimension of token ids, got the shape {shape}")
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        if tokenizer is None:
            raise PromptError("prompt: expected token ids (the engine has no tokenizer), got chat")
        return tuple(tokenizer.apply_chat_template(cast("list[Mapping[str, str]]", items)))
    for item in items:
        if not _is_int(item):
            raise PromptError(f"prompt: expected a text or a list of token ids, got {item!r}")
    return tuple(int(cast("int", item)) for item in items)
