# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the embedding mixes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.registry import FLOAT32, FLOATS, INT64, register

if TYPE_CHECKING:
    from torch import Tensor

_FLAGS = (torch.uint8, torch.bool)
_MAX_TOP_K = 16


def _check_descriptors(
    arguments: FakeArguments,
    num_rows: int,
    merge_mask: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    residual_probs: Tensor,
) -> None:
    arguments.tensor("merge_mask", merge_mask, _FLAGS, (num_rows,))
    arguments.tensor("topk_ids", topk_ids, INT64, (num_rows, None))
    top_k = topk_ids.shape[1]
    arguments.require("topk_ids", 1 <= top_k <= _MAX_TOP_K, f"1 to {_MAX_TOP_K} columns", top_k)
    arguments.tensor("topk_probs", topk_probs, FLOAT32, (num_rows, top_k))
    arguments.tensor("residual_probs", residual_probs, FLOAT32, (num_rows,))


def _check_kind(arguments: FakeArguments, merge_kind: int) -> None:
    arguments.choice("merge_kind", merge_kind, 1)


def _check_weight(arguments: FakeArguments, weight: float) -> None:
    arguments.require("weight", math.isfinite(weight), "a finite number", weight)


@register("token_merge_embed")
def _token_merge_embed(
    hidden: Tensor,
    embedding: Tensor,
    merge_mask: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    residual_probs: Tensor,
    *,
    mask_token_id: int,
    merge_kind: int,
    renormalize: bool,
    weight: float,
) -> None:
    arguments = FakeArguments("token_merge_embed", hidden)
    _check_kind(arguments, merge_kind)
    _check_weight(arguments, weight)
    arguments.tensor("hidden", hidden, FLOATS, (None, None))
    num_rows, width = hidden.shape
    arguments.tensor("embedding", embedding, (hidden.dtype,), (None, width))
    _check_descriptors(arguments, num_rows, merge_mask, topk_ids, topk_probs, residual_probs)
    if merge_kind == 0:
        vocab_size = embedding.shape[0]
        arguments.require("mask_token_id", mask_token_id >= 0, "a value >= 0", mask_token_id)
        arguments.require(
            "mask_token_id",
            mask_token_id < vocab_size,
            f"a value in [0, {vocab_size})",
            mask_token_id,
        )


@register("token_merge_partial")
def _token_merge_partial(
    embedding: Tensor,
    merge_mask: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    residual_probs: Tensor,
    partial: Tensor,
    *,
    mask_token_id: int,
    merge_kind: int,
    vocab_start: int,
) -> None:
    arguments = FakeArguments("token_merge_partial", embedding)
    _check_kind(arguments, merge_kind)
    arguments.at_least("vocab_start", vocab_start, 0)
    if merge_kind == 0:
        arguments.at_least("mask_token_id", mask_token_id, 0)
    arguments.tensor("embedding", embedding, FLOATS, (None, None))
    arguments.tensor("partial", partial, FLOAT32, (None, embedding.shape[1] + 1))
    _check_descriptors(
        arguments, partial.shape[0], merge_mask, topk_ids, topk_probs, residual_probs
    )


@register("token_merge_finalize")
def _token_merge_finalize(
    partial: Tensor,
    merge_mask: Tensor,
    hidden: Tensor,
    *,
    merge_kind: int,
    renormalize: bool,
    weight: float,
) -> None:
    arguments = FakeArguments("token_merge_finalize", partial)
    _check_kind(arguments, merge_kind)
    _check_weight(arguments, weight)
    arguments.tensor("hidden", hidden, FLOATS, (None, None))
    num_rows, width = hidden.shape
    arguments.tensor("partial", partial, FLOAT32, (num_rows, width + 1))
    arguments.tensor("merge_mask", merge_mask, _FLAGS, (num_rows,))


@register("soft_embedding")
def _soft_embedding(
    logits: Tensor,
    lse: Tensor,
    inv_temperature: Tensor | None,
    embedding: Tensor,
    row_valid: Tensor | None,
    out: Tensor,
    workspace: Tensor | None,
    *,
    normalizer: float,
    softcap: float = 0.0,
    vocab_limit: int = -1,
    vocab_start: int = 0,
) -> None:
    arguments = FakeArguments("soft_embedding", logits)
    arguments.tensor("logits", logits, FLOATS, (None, None))
    num_rows, vocab_size = logits.shape
    arguments.tensor("lse", lse, FLOAT32, (num_rows,))
    arguments.optional("inv_temperature", inv_temperature, FLOAT32, (num_rows,))
    arguments.tensor("embedding", embedding, FLOATS, (vocab_size, None))
    arguments.optional("row_valid", row_valid, _FLAGS, (num_rows,))
    arguments.tensor("out", out, FLOAT32, (num_rows, embedding.shape[1]))
    arguments.workspace(workspace)
    arguments.require("normalizer", math.isfinite(normalizer), "a finite number", normalizer)
    arguments.require(
        "softcap", math.isfinite(softcap) and softcap >= 0, "a finite number >= 0", softcap
    )
    arguments.at_least("vocab_limit", vocab_limit, -1)
    arguments.at_least("vocab_start", vocab_start, 0)
