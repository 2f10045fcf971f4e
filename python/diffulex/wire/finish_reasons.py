# SPDX-License-Identifier: Apache-2.0
"""Why a request ended, in the words of the engine and of the OpenAI API."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FINISH_REASONS", "openai_finish_reason"]

#: The engine's reason -> `stop`, `length`, `abort` or `error`. Answers over HTTP end with one of the
#: first two: what is aborted is not delivered, and what failed is an error.
FINISH_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "eos_token_generated": "stop",
        "stop": "stop",
        "max_new_tokens_reached": "length",
        "max_model_len_reached": "length",
        "max_nfe_reached": "length",
        "max_repetition_run_reached": "length",
        "aborted": "abort",
        "rejected": "error",
        "error": "error",
        # Engines that serve through diffulex.server without a reason, or with a custom one.
        "completed_without_reason": "stop",
        "unknown_postprocess_deactivate": "stop",
    }
)


def openai_finish_reason(reason: str | None) -> str:
    """`stop`, `length`, `abort` or `error` for the engine's reason; `stop` for none.

    Raises:
        ValueError: a reason that is not in FINISH_REASONS.
    """
    if not reason:
        return "stop"
    if reason not in FINISH_REASONS:
        known = ", ".join(FINISH_REASONS)
        raise ValueError(f"finish reason: expected one of {known}, got {reason!r}")
    return FINISH_REASONS[reason]
