# SPDX-License-Identifier: Apache-2.0
"""What the frontend makes of a command before it is sent."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from diffulex.serving.frontend_state import FrontendLimits, FrontendReqState, ServerState
from diffulex.wire.protocol import ChatInput, PromptInput, ServingError, ServingGenerate

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["num_tokens", "prepared", "refusal_of"]

# Why a request is refused in a state: message and code.
_REFUSING = {
    ServerState.STARTING: ("the engine is loading", "starting"),
    ServerState.DRAINING: ("the server is shutting down", "draining"),
    ServerState.STOPPED: ("the server is shutting down", "server_shutdown"),
    ServerState.DEAD: ("the engine process is gone", "engine_dead"),
    ServerState.UNRESPONSIVE: ("the engine process gives no sign of life", "engine_unresponsive"),
}


def prepared(command: ServingGenerate, limits: FrontendLimits, generation: int) -> ServingGenerate:
    """The command of this generation, without what msgpack cannot hold, with the server's limits."""
    changes: dict[str, Any] = {"generation": generation}
    if command.queue_timeout_s is None and limits.queue_timeout_s > 0:
        changes["queue_timeout_s"] = limits.queue_timeout_s
    value = command.input
    if isinstance(value, PromptInput) and isinstance(value.prompt, str):
        changes["input"] = dataclasses.replace(value, prompt=_encodable(value.prompt))
    elif isinstance(value, ChatInput):
        messages = [{k: _encodable(v) for k, v in item.items()} for item in value.messages]
        changes["input"] = ChatInput(messages)
    stop = command.sampling_params.stop
    if any(_encodable(text) != text for text in stop):
        changes["sampling_params"] = dataclasses.replace(
            command.sampling_params, stop=tuple(_encodable(text) for text in stop)
        )
    if command.user is not None:
        changes["user"] = _encodable(command.user)
    return dataclasses.replace(command, **changes)


def refusal_of(
    command: ServingGenerate,
    state: ServerState,
    limits: FrontendLimits,
    max_inflight: int,
    inflight: Collection[FrontendReqState],
) -> ServingError | None:
    """Why a request is not even sent.

    Args:
        max_inflight: requests at a time, where `limits` limits them.
        inflight: those there are.
    """
    rid = command.rid
    if state in _REFUSING:
        message, code = _REFUSING[state]
        return ServingError(rid, message, code, 503, retryable=True)
    if limits.max_queue_size > 0 and len(inflight) >= max_inflight:
        text = f"expected at most {max_inflight} requests in flight"
        return ServingError(rid, text, "queue_full", 429, retryable=True)
    if limits.max_queued_tokens > 0:
        wanted = sum(item.num_tokens for item in inflight) + num_tokens(command)
        if wanted > limits.max_queued_tokens:
            text = f"expected at most {limits.max_queued_tokens} tokens in flight, got {wanted}"
            return ServingError(rid, text, "queue_full", 429, retryable=True)
    return None


def num_tokens(command: ServingGenerate) -> int:
    """What a request counts; a text that is not tokenised yet counts a token per 4 characters."""
    value = command.input
    if isinstance(value, ChatInput):
        num_prompt = sum(len(item["content"]) for item in value.messages) // 4
    elif isinstance(value.prompt, str):
        num_prompt = len(value.prompt) // 4
    else:
        num_prompt = len(value.prompt)
    return num_prompt + command.sampling_params.max_tokens


def _encodable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot hold, replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text
