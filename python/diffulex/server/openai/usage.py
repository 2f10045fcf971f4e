# SPDX-License-Identifier: Apache-2.0
"""The `usage` object: what a request cost, in tokens, forward evaluations and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffulex.wire.protocol import PromptInput, ServingInput, ServingReply

__all__ = ["num_prompt_tokens", "running_usage", "usage_of"]


def num_prompt_tokens(prompt: ServingInput) -> int:
    """Tokens of a prompt that the HTTP process encoded; 0 for others."""
    is_encoded = isinstance(prompt, PromptInput) and not isinstance(prompt.prompt, str)
    return len(prompt.prompt) if is_encoded else 0  # type: ignore[union-attr]


def _sum(replies: Sequence[ServingReply], name: str) -> Any:
    return sum(getattr(reply, name) or 0 for reply in replies)


def _longest(replies: Sequence[ServingReply], name: str) -> float | None:
    known = [value for reply in replies if (value := getattr(reply, name)) is not None]
    return max(known, default=None)


def _ratio(count: float, base: float) -> float | None:
    return count / base if base > 0 else None


def usage_of(
    replies: Sequence[ServingReply],
    prompts: Sequence[ServingInput],
    *,
    num_copies: int = 1,
    has_dllm: bool = True,
    elapsed_s: float | None = None,
) -> dict[str, Any]:
    """Totals of a response.

    Args:
        replies: the engine's answers, those of one prompt beside each other.
        prompts: the inputs; each has the same number of replies.
        num_copies: how often each reply was delivered (greedy answers are computed once).
        has_dllm: with what only a diffusion model has.
        elapsed_s: measured time, for replies that carry none.
    """
    per_prompt = len(replies) // max(len(prompts), 1) or 1
    first = replies[::per_prompt]
    prompt_tokens = sum(
        reply.prompt_tokens if reply.prompt_tokens is not None else num_prompt_tokens(prompt)
        for reply, prompt in zip(first, prompts)
    )
    completion_tokens = num_copies * sum(len(reply.token_ids) for reply in replies)
    usage = _token_counts(prompt_tokens, completion_tokens, _sum(first, "cached_tokens"))
    return usage | _dllm(replies, elapsed_s) if has_dllm else usage


def running_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The object while an answer is still growing."""
    return _token_counts(prompt_tokens, completion_tokens, 0)


def _token_counts(prompt_tokens: int, completion_tokens: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _dllm(replies: Sequence[ServingReply], elapsed_s: float | None) -> dict[str, Any]:
    nfe = _sum(replies, "nfe")
    tokens = sum(len(reply.token_ids) for reply in replies)
    decode_steps = _sum(replies, "decode_steps")
    decode_tokens = _sum(replies, "engine_decode_tokens")
    prefill_s = _sum(replies, "prefill_time_s")
    decode_s = _sum(replies, "engine_decode_time_s")
    e2e_s = _longest(replies, "e2e_time_s")
    return {
        "nfe": nfe,
        "dllm_prefill_steps": _sum(replies, "prefill_steps"),
        "dllm_decode_steps": decode_steps,
        "dllm_prefill_output_tokens": _sum(replies, "prefill_output_tokens"),
        "dllm_decode_output_tokens": decode_tokens,
        "prefill_time_s": prefill_s,
        "decode_time_s": decode_s,
        "e2e_time_s": elapsed_s if e2e_s is None else e2e_s,
        "queue_time_s": _longest(replies, "queue_time_s"),
        "ttft_s": _longest(replies, "ttft_s"),
        "tpf": _ratio(tokens, nfe),
        "decode_tpf": _ratio(decode_tokens, decode_steps),
        "decode_tps": _ratio(decode_tokens, decode_s),
        "e2e_tps": _ratio(tokens, prefill_s + decode_s),
        "dllm_time_semantics": "batch_step_wall",
    }
