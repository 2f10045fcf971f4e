# SPDX-License-Identifier: Apache-2.0
"""Stop texts that are a single special token of the tokenizer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffulex.config.sampling_params import SamplingParams

__all__ = ["special_stops"]


def special_stops(tokenizer: Any, params: SamplingParams) -> tuple[SamplingParams, dict[int, str]]:
    """Parameters in which such stop texts are stop ids as well, and the texts by id.

    Special tokens may not be in the text that is searched, so the text alone would not end there.
    """
    if not params.stop or tokenizer is None:
        return params, {}
    backend = getattr(tokenizer, "backend", tokenizer)
    added: Any = getattr(backend, "get_added_vocab", dict)()
    found = {added[text]: text for text in params.stop if text in added}
    if not found:
        return params, {}
    stop_ids = dict.fromkeys((*params.stop_token_ids, *found))
    return dataclasses.replace(params, stop_token_ids=tuple(stop_ids)), found
