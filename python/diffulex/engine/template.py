# SPDX-License-Identifier: Apache-2.0
"""Infilling: answers of which a part is given."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from diffulex.errors import SamplingParamsError

if TYPE_CHECKING:
    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.config import Config
    from diffulex.config.sampling_params import SamplingParams

__all__ = ["split_masked_prompt", "template_token_ids"]

_MARK = re.compile(r"<mask(?::([0-9]+))?>")
_MAX_FREE = 1 << 16


def template_token_ids(text: str, tokenizer: Tokenizer) -> tuple[int | None, ...]:
    """A template for `SamplingParams.template_token_ids`, of a text with marks.

    `<mask>` is one free position, `<mask:8>` are eight; what is between them is fixed, each piece
    encoded on its own and without special tokens.

    Raises:
        SamplingParamsError: no mark, or one of 0 or more than 65,536 positions.
        PromptError: the text has code points that UTF-8 cannot hold.
    """
    pieces = _MARK.split(text)
    if len(pieces) == 1:
        raise SamplingParamsError(f"template: expected a <mask> or <mask:N> in it, got {text!r}")
    ids: list[int | None] = []
    for at, piece in enumerate(pieces):
        if at % 2:  # a mark: its number, if it has one
            ids += [None] * _count(piece)
        elif piece:
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return tuple(ids)


def _count(digits: str | None) -> int:
    if digits is None:
        return 1
    count = int(digits) if len(digits) < 8 else _MAX_FREE + 1
    if not 1 <= count <= _MAX_FREE:
        raise SamplingParamsError(
            f"template: expected 1 to {_MAX_FREE} positions in a mark, got <mask:{digits}>"
        )
    return count


def split_masked_prompt(
    token_ids: tuple[int, ...], params: SamplingParams, config: Config
) -> tuple[tuple[int, ...], SamplingParams]:
    """A prompt with masks, where `allow_mask_in_prompt` is set: what stands before the first mask,
    and parameters that make the rest the template of the answer. Every other prompt as it is.

    Raises:
        SamplingParamsError: a template is given as well, or nothing stands before the first mask.
    """
    mask = config.model.mask_token_id
    if not config.decoding.allow_mask_in_prompt or mask not in token_ids:
        return token_ids, params
    if params.template_token_ids:
        raise SamplingParamsError(
            "template_token_ids: expected none with masks in the prompt, got"
            f" {len(params.template_token_ids)} positions"
        )
    first = token_ids.index(mask)
    if first == 0:
        raise SamplingParamsError("prompt: expected a token before the first mask, got a mask")
    rest = tuple(None if token == mask else token for token in token_ids[first:])
    return token_ids[:first], dataclasses.replace(
        params,
        template_token_ids=rest,
        max_tokens=len(rest),
        min_tokens=min(params.min_tokens, len(rest)),
    )
