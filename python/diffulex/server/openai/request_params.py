# SPDX-License-Identifier: Apache-2.0
"""What the body of a request asks of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from diffulex.config.sampling_params import (
    SamplingParams,
    decoding_arguments,
    greedy_if_tiny,
)
from diffulex.server.http.api_errors import ApiError
from diffulex.server.openai.request_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    Decoding,
    GenerateRequest,
    SamplingFields,
)
from diffulex.server.openai.responses_schema import ResponsesRequest
from diffulex.wire.protocol import RequestOptions

__all__ = [
    "Bounds",
    "GeneratingRequest",
    "check_trajectory",
    "request_options",
    "sampling_params_from_request",
]

#: Least and largest value by name.
Bounds = Mapping[str, tuple[float, float]]
#: Bodies of the routes that generate.
GeneratingRequest = GenerateRequest | ChatCompletionRequest | CompletionRequest | ResponsesRequest


def request_options(payload: SamplingFields) -> RequestOptions:
    """What a request asks of its events."""
    names = [item.name for item in dataclasses.fields(RequestOptions)]
    return RequestOptions(**{name: getattr(payload, name) for name in names})


def sampling_params_from_request(
    payload: GeneratingRequest,
    *,
    default_max_tokens: int | None = None,
    bounds: Bounds | None = None,
    max_trajectory_tokens: int | None = None,
) -> SamplingParams:
    """The engine's parameters for a request.

    Args:
        payload: the body of any generating route.
        default_max_tokens: for requests that do not say; None takes the default of the route.
        bounds: least and largest value that a request may set, by name of `decoding`.
        max_trajectory_tokens: most tokens of an answer whose trajectory is kept; None: any number.

    Raises:
        ApiError: 400, a value is outside its range.
    """
    limit = payload.wanted_max_tokens
    if limit is None:
        limit = default_max_tokens
    if limit is None:
        limit = type(payload).model_fields["max_tokens"].default
    template = tuple(payload.template_token_ids or ())
    if template and not payload.wants_max_tokens:
        limit = len(template)
    temperature = 1.0 if payload.temperature is None else payload.temperature
    decoding = payload.decoding
    try:
        params = SamplingParams(
            temperature=greedy_if_tiny(temperature),
            max_tokens=limit,
            max_nfe=payload.max_nfe,
            max_repetition_run=payload.max_repetition_run,
            ignore_eos=payload.ignore_eos,
            seed=payload.seed,
            stop=tuple(payload.stop),
            stop_token_ids=tuple(payload.stop_token_ids or ()),
            include_stop_str_in_output=payload.include_stop_str_in_output,
            min_tokens=payload.min_tokens or 0,
            template_token_ids=template,
            top_p=payload.top_p,
            top_k=payload.top_k,
            min_p=payload.min_p,
            skip_special_tokens=payload.skip_special_tokens,
            logprobs=_num_logprobs(payload),
            return_trajectory=payload.return_trajectory or "none",  # type: ignore[arg-type]
            **_decoding(decoding, bounds or {}),
        )
    except ValueError as error:
        raise ApiError.from_value_error(error) from error
    if max_trajectory_tokens is not None:
        check_trajectory(params, max_trajectory_tokens)
    return params


def check_trajectory(params: SamplingParams, most: int, num_template: int = 0) -> None:
    """It grows with the answer and with every step, and is kept until the answer is sent.

    Args:
        params: of the request.
        most: tokens of an answer whose trajectory is kept.
        num_template: length of an answer that the prompt gives, by its masks, and not `max_tokens`.

    Raises:
        ApiError: 400, the answer may be longer and its trajectory is asked for.
    """
    limit = num_template or params.max_tokens
    if params.return_trajectory != "none" and limit > most:
        name = "the prompt from its first mask on" if num_template else "max_tokens"
        raise ApiError(
            400,
            f"return_trajectory: expected {name} to be at most {most} with it"
            f" (--max-trajectory-tokens), got {limit}",
            param="return_trajectory",
        )


def _decoding(decoding: Decoding | None, bounds: Bounds) -> dict[str, Any]:
    if decoding is None:
        return {}
    given = dict(decoding_arguments(decoding.model_dump(exclude_none=True)))
    for name, (low, high) in bounds.items():
        value: Any = given.get(name)
        if value is not None and not low <= value <= high:
            raise ApiError(
                400,
                f"decoding.{name}: expected a number in [{low:g}, {high:g}], got {value:g}",
                param=f"decoding.{name}",
            )
    return given


def _num_logprobs(payload: GeneratingRequest) -> int | None:
    """How many alternatives per token are wanted; None: no log-probabilities at all."""
    if isinstance(payload, ChatCompletionRequest):
        if payload.top_logprobs and not payload.logprobs:
            raise ApiError(
                400,
                f"top_logprobs: expected logprobs=true with it, got {payload.logprobs!r}",
                param="top_logprobs",
            )
        return (payload.top_logprobs or 0) if payload.logprobs else None
    return payload.logprobs
