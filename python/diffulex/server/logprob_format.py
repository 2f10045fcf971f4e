# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in the two forms of the OpenAI API.

The engine gives one map per token: `token, logprob, bytes, step, confidence, top`. The value is
that of the forward in which the token took its final value; see docs/serving.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["chat_logprobs", "completion_logprobs"]

Records = Sequence[Mapping[str, Any]]


def _entry(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "token": record.get("token", ""),
        "logprob": record.get("logprob"),
        "bytes": record.get("bytes"),
    }


def chat_logprobs(records: Records | None) -> dict[str, Any] | None:
    """`choices[i].logprobs` of a chat completion."""
    if records is None:
        return None
    content = []
    for record in records:
        entry = _entry(record)
        entry["top_logprobs"] = [_entry(other) for other in record.get("top") or ()]
        entry["diffulex"] = {"step": record.get("step"), "confidence": record.get("confidence")}
        content.append(entry)
    return {"content": content}


def completion_logprobs(
    records: Records | None, *, num_top: int, offset: int = 0
) -> dict[str, Any] | None:
    """`choices[i].logprobs` of a text completion.

    Args:
        num_top: how many alternatives were asked for; 0 leaves them out.
        offset: characters of the choice's text before the first token.
    """
    if records is None:
        return None
    tokens = [str(record.get("token", "")) for record in records]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    top = [
        {str(other.get("token", "")): other.get("logprob") for other in record.get("top") or ()}
        for record in records
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [record.get("logprob") for record in records],
        "top_logprobs": top if num_top else None,
        "text_offset": offsets,
    }
