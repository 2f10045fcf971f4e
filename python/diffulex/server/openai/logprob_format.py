# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in the two forms of the OpenAI API.

The engine gives one map per token: `token, logprob, bytes, text_offset, step, confidence, top`. The
value is that of the forward in which the token took its final value; see docs/serving.md. All bytes
together are the text of the answer: special tokens that it leaves out have none.
"""

from __future__ import annotations

import itertools
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
    top = [
        {str(other.get("token", "")): other.get("logprob") for other in record.get("top") or ()}
        for record in records
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [record.get("logprob") for record in records],
        "top_logprobs": top if num_top else None,
        "text_offset": [offset + start for start in _starts(records)],
    }


def _starts(records: Records) -> list[int]:
    """Characters between the first token and each."""
    if not records:
        return []
    first = records[0].get("text_offset")
    if first is not None:
        return [int(record["text_offset"]) - int(first) for record in records]
    lengths = (len(str(record.get("token", ""))) for record in records)  # of another engine
    return [0, *itertools.accumulate(lengths)][: len(records)]
