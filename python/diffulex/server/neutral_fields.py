# SPDX-License-Identifier: Apache-2.0
"""Fields of the OpenAI API that block diffusion cannot honour: accepted only when they ask nothing.

Refusing them here, with the name of the field, keeps them from becoming an engine error later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffulex.server.api_errors import ApiError
from diffulex.server.request_schema import ChatCompletionRequest, CompletionRequest

__all__ = ["check_supported"]

# What each field may be without meaning anything, and the test for it.
_NEUTRAL: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "frequency_penalty": ("0", lambda value: value == 0),
    "presence_penalty": ("0", lambda value: value == 0),
    "repetition_penalty": ("1", lambda value: value == 1),
    "logit_bias": ("{}", lambda value: value == {}),
    "suffix": ("null", lambda _: False),
    "tools": ("[]", lambda value: value == []),
    "functions": ("[]", lambda value: value == []),
    "tool_choice": ("none or auto", lambda value: value in ("none", "auto")),
    "function_call": ("none or auto", lambda value: value in ("none", "auto")),
    "response_format": (
        '{"type": "text"}',
        lambda value: isinstance(value, dict) and value.get("type") == "text",
    ),
    "use_beam_search": ("false", lambda value: value is False),
    "prompt_logprobs": ("null", lambda _: False),
    "structured_outputs": ("null", lambda _: False),
}
_PROMPT_LOGPROBS = (
    "log-probabilities of a prompt do not exist for a block-diffusion model: it has no"
    " left-to-right factorisation; a likelihood takes a Monte-Carlo likelihood estimator, which"
    " is not part of the server"
)


def check_supported(payload: ChatCompletionRequest | CompletionRequest) -> None:
    """Refuses what would change the answer and is not implemented.

    Raises:
        ApiError: 400 with the name of the field.
    """
    extra = payload.model_extra or {}
    for name, (neutral, is_neutral) in _NEUTRAL.items():
        value = getattr(payload, name, extra.get(name))
        if value is not None and not is_neutral(value):
            if name == "prompt_logprobs":
                raise _refused(name, _PROMPT_LOGPROBS)
            raise _refused(
                name, f"expected {neutral}, other values are not supported, got {value!r}"
            )
    for name, value in extra.items():
        if name.startswith("guided_") and value is not None:
            raise _refused(name, f"expected null, guided decoding is not supported, got {value!r}")
    num_choices = payload.n or 1
    best_of = getattr(payload, "best_of", extra.get("best_of"))
    # Of chat requests it may be of any type.
    is_served = type(best_of) is int and 1 <= best_of <= num_choices
    if best_of is not None and not is_served:
        raise _refused("best_of", f"expected at most n={num_choices}, got {best_of!r}")
    if isinstance(payload, ChatCompletionRequest):
        return
    if payload.echo and payload.logprobs is not None:
        raise _refused("echo", f"expected no logprobs with it, got both: {_PROMPT_LOGPROBS}")


def _refused(name: str, reason: str) -> ApiError:
    text = reason if len(reason) <= 400 else reason[:397] + "..."
    return ApiError(400, f"{name}: {text}", param=name)
