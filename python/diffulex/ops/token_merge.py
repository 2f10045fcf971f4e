# SPDX-License-Identifier: Apache-2.0
"""Input embeddings merged from several tokens.

Symbols: T rows, H hidden size, V vocabulary, K merged ids (at most 16). The descriptor of a row is
ids i_k, probabilities p_k and a residual r; E is the embedding table, M the mask token.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from diffulex.ops.fakes import FLAGS, FLOAT32, FLOATS, INT64, FakeArguments, fake

if TYPE_CHECKING:
    from torch import Tensor


class MergeKind(IntEnum):
    """How a descriptor becomes an embedding.

    DMAX_TOPK: s = sum p_k E[i_k] + r E[M], optionally rescaled to the mean norm of its parts.
    ITER_SMOOTH_TOPK: hidden + weight * sum p_k E[i_k].
    """

    DMAX_TOPK = 0
    ITER_SMOOTH_TOPK = 1


@torch.no_grad()
def token_merge_embed(
    hidden: Tensor,
    embedding: Tensor,
    merge_mask: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    residual_probs: Tensor,
    *,
    mask_token_id: int,
    merge_kind: int = MergeKind.DMAX_TOPK,
    renormalize: bool = False,
    weight: float = 1.0,
) -> None:
    """Replaces in `hidden` the rows that have a descriptor; the others are not touched.

    Args:
        hidden: [T, H], holds E[input id] of every row.
        embedding: E [V, H] of the same dtype.
        merge_mask: [T] uint8 or bool, rows with a descriptor.
        topk_ids: [T, K] int64; negative ids and probabilities of 0 are skipped.
        topk_probs: [T, K] float32.
        residual_probs: [T] float32.
        renormalize: DMAX_TOPK only: scales s by (sum p_k |E[i_k]| + r |E[M]|) / (|s| + 1e-6).
        weight: ITER_SMOOTH_TOPK only.
    """
    torch.ops.diffulex.token_merge_embed(
        hidden,
        embedding,
        merge_mask,
        topk_ids,
        topk_probs,
        residual_probs,
        mask_token_id=mask_token_id,
        merge_kind=int(merge_kind),
        renormalize=renormalize,
        weight=weight,
    )


@torch.no_grad()
def token_merge_partial(
    embedding: Tensor,
    merge_mask: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    residual_probs: Tensor,
    *,
    mask_token_id: int,
    merge_kind: int = MergeKind.DMAX_TOPK,
    vocab_start: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """[T, H + 1] float32: the sums over one vocabulary shard and its part of the norms.

    `embedding` holds the table rows from `vocab_start` on. Add the results of all shards and give
    them to `token_merge_finalize`. Rows without a descriptor are 0.
    """
    if out is None:
        shape = (merge_mask.shape[0], embedding.shape[1] + 1)
        out = torch.empty(shape, dtype=torch.float32, device=embedding.device)
    torch.ops.diffulex.token_merge_partial(
        embedding,
        merge_mask,
        topk_ids,
        topk_probs,
        residual_probs,
        out,
        mask_token_id=mask_token_id,
        merge_kind=int(merge_kind),
        vocab_start=vocab_start,
    )
    return out


@torch.no_grad()
def token_merge_finalize(
    partial: Tensor,
    merge_mask: Tensor,
    hidden: Tensor,
    *,
    merge_kind: int = MergeKind.DMAX_TOPK,
    renormalize: bool = False,
    weight: float = 1.0,
) -> None:
    """Writes the merged embeddings of added partials to `hidden`, as `token_merge_embed` does."""
    torch.ops.diffulex.token_merge_finalize(
        partial,
        merge_mask,
        hidden,
        merge_kind=int(merge_kind),
        renormalize=renormalize,
        weight=weight,
    )


_MAX_TOP_K = 16


def _check_descriptors(arguments: FakeArguments, num_rows: int, topk_ids: Tensor) -> None:
    arguments.check("merge_mask", FLAGS, (num_rows,))
    arguments.check("topk_ids", INT64, (num_rows, None))
    top_k = topk_ids.shape[1]
    arguments.require("topk_ids", 1 <= top_k <= _MAX_TOP_K, f"1 to {_MAX_TOP_K} columns", top_k)
    arguments.check("topk_probs", FLOAT32, (num_rows, top_k))
    arguments.check("residual_probs", FLOAT32, (num_rows,))


def _check_weight(arguments: FakeArguments, weight: float) -> None:
    arguments.require("weight", math.isfinite(weight), "a finite number", weight)


@fake("token_merge_embed")
def _token_merge_embed(
    arguments: FakeArguments,
    hidden: Tensor,
    embedding: Tensor,
    topk_ids: Tensor,
    mask_token_id: int,
    merge_kind: int,
    weight: float,
) -> None:
    arguments.choice("merge_kind", 1)
    _check_weight(arguments, weight)
    arguments.check("hidden", FLOATS, (None, None))
    num_rows, width = hidden.shape
    arguments.check("embedding", (hidden.dtype,), (None, width))
    _check_descriptors(arguments, num_rows, topk_ids)
    if merge_kind == 0:
        vocab_size = embedding.shape[0]
        arguments.require("mask_token_id", mask_token_id >= 0, "a value >= 0", mask_token_id)
        arguments.require(
            "mask_token_id",
            mask_token_id < vocab_size,
            f"a value in [0, {vocab_size})",
            mask_token_id,
        )


@fake("token_merge_partial")
def _token_merge_partial(
    arguments: FakeArguments, embedding: Tensor, topk_ids: Tensor, partial: Tensor, merge_kind: int
) -> None:
    arguments.choice("merge_kind", 1)
    arguments.at_least("vocab_start", 0)
    if merge_kind == 0:
        arguments.at_least("mask_token_id", 0)
    arguments.check("embedding", FLOATS, (None, None))
    arguments.check("partial", FLOAT32, (None, embedding.shape[1] + 1))
    _check_descriptors(arguments, partial.shape[0], topk_ids)


@fake("token_merge_finalize")
def _token_merge_finalize(arguments: FakeArguments, hidden: Tensor, weight: float) -> None:
    arguments.choice("merge_kind", 1)
    _check_weight(arguments, weight)
    arguments.check("hidden", FLOATS, (None, None))
    num_rows, width = hidden.shape
    arguments.check("partial", FLOAT32, (num_rows, width + 1))
    arguments.check("merge_mask", FLAGS, (num_rows,))
