# SPDX-License-Identifier: Apache-2.0
"""Fields of the OpenAI API that block diffusion cannot honour: accepted only when they ask nothing.

Refusing them here, with the name of the field, keeps them from becoming an engine error later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diffulex.server.http.api_errors import ApiError, shown
from diffulex.server.openai.request_schema import (
    TOOL_CHOICES,
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
)
from diffulex.server.openai.responses_schema import ResponsesRequest

__all__ = ["check_responses", "check_supported"]

# What each field may be without meaning anything, and the test for it.
_NEUTRAL: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "frequency_penalty": ("0", lambda value: value == 0),
    "presence_penalty": ("0", lambda value: value == 0),
    "repetition_penalty": ("1", lambda value: value == 1),
    "logit_bias": ("{}", lambda value: value == {}),
    "suffix": ('""', lambda value: value == ""),
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


def _is_without_reasoning(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("effort") not in ("none", None):
        return False
    return all(item is None for name, item in value.items() if name != "effort")


def _is_plain_text(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("verbosity") not in ("medium", None):
        return False
    form = value.get("format")
    return form is None or (isinstance(form, dict) and form.get("type") == "text")


# Fields of the Responses API, and fields of the other routes that it has not.
_RESPONSES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "background": ("false", lambda value: value is False),
    "conversation": ("null", lambda _: False),
    "context_management": ("[]", lambda value: value == []),
    "moderation": ("null", lambda _: False),
    "previous_response_id": (
        "null, since this server keeps no responses (send the earlier turns in input)",
        lambda _: False,
    ),
    "prompt": ("null (the text goes into input)", lambda _: False),
    "reasoning": ("no effort", _is_without_reasoning),
    "text": ('{"format": {"type": "text"}}', _is_plain_text),
    "truncation": ("disabled", lambda value: value == "disabled"),
    "max_tokens": ("null (max_output_tokens is the name here)", lambda _: False),
    "max_completion_tokens": ("null (max_output_tokens is the name here)", lambda _: False),
    "messages": ("null (input is the name here)", lambda _: False),
    "logprobs": ("null (include has message.output_text.logprobs)", lambda value: value is False),
    "n": ("1", lambda value: value == 1),
}


def check_supported(payload: ChatCompletionRequest | CompletionRequest) -> None:
    """Refuses what would change the answer and is not implemented.

    Raises:
        ApiError: 400 with the name of the field.
    """
    _check(payload, _NEUTRAL)
    num_choices = payload.n or 1
    best_of = _value(payload, "best_of")
    # Of chat requests it may be of any type.
    is_served = type(best_of) is int and 1 <= best_of <= num_choices
    if best_of is not None and not is_served:
        raise _refused("best_of", f"expected at most n={num_choices}, got {shown(best_of)}")
    if isinstance(payload, ChatCompletionRequest):
        _check_roles(payload)
        return
    if payload.max_tokens == 0 and not payload.echo:
        raise ApiError(
            400, "max_tokens: expected at least 1 without echo, got 0", param="max_tokens"
        )
    if payload.echo and payload.logprobs is not None:
        raise _refused("echo", f"expected no logprobs with it, got both: {_PROMPT_LOGPROBS}")


def _check_roles(payload: ChatCompletionRequest) -> None:
    for index, message in enumerate(payload.messages):
        if message.role in ("tool", "function"):
            raise ApiError(
                400,
                f"messages.{index}.role: expected system, developer, user or assistant, since"
                f" tools are not supported, got {message.role!r}",
                param=f"messages.{index}.role",
            )


def check_responses(payload: ResponsesRequest) -> None:
    """As `check_supported`, for the Responses API."""
    _check(payload, {**_RESPONSES, **_NEUTRAL, "best_of": ("1", lambda value: value == 1)})
    if payload.top_logprobs and payload.logprobs is None:
        raise _refused(
            "top_logprobs",
            f"expected message.output_text.logprobs in include with it, got {shown(payload.include)}",
        )


def _check(
    payload: SamplingFields, neutral_values: Mapping[str, tuple[str, Callable[[Any], bool]]]
) -> None:
    asked_nothing = {tools for choice, tools in TOOL_CHOICES if _value(payload, choice) == "none"}
    for name, (neutral, is_neutral) in neutral_values.items():
        value = _value(payload, name)
        if value is None or is_neutral(value):
            continue
        if name in asked_nothing and isinstance(value, list):
            continue
        if name == "prompt_logprobs":
            raise _refused(name, _PROMPT_LOGPROBS)
        raise _refused(
            name, f"expected {neutral}, other values are not supported, got {shown(value, 100)}"
        )
    for name, value in (payload.model_extra or {}).items():
        if name.startswith("guided_") and value is not None:
            raise _refused(
                name, f"expected null, guided decoding is not supported, got {shown(value, 100)}"
            )


def _value(payload: SamplingFields, name: str) -> Any:
    """A field as the client sent it, also one that the body has not."""
    is_declared = name in type(payload).model_fields
    return getattr(payload, name) if is_declared else (payload.model_extra or {}).get(name)


def _refused(name: str, reason: str) -> ApiError:
    text = reason if len(reason) <= 400 else reason[:397] + "..."
    return ApiError(400, f"{name}: {text}", param=name)
