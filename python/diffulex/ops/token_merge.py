# SPDX-License-Identifier: Apache-2.0
"""Input embeddings merged from several tokens.

Symbols: T rows, H hidden size, V vocabulary, K merged ids (at most 16). The descriptor of a row is
ids i_k, probabilities p_k and a residual r; E is the embedding table, M the mask token.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_NORM_EPSILON = 1e-6


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


@torch.no_grad()
def token_merge_embed_reference(
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
    """Pure torch twin of `token_merge_embed`."""
    for row in merge_mask.nonzero().flatten().tolist():
        terms = list(zip(topk_ids[row].tolist(), topk_probs[row].tolist(), strict=True))
        if merge_kind == MergeKind.DMAX_TOPK:
            terms.append((mask_token_id, float(residual_probs[row])))
        total = torch.zeros(hidden.shape[1], device=hidden.device)
        norms = 0.0
        for token_id, probability in terms:
            if token_id >= 0 and probability != 0.0:
                vector = embedding[token_id].float()
                total += probability * vector
                norms += probability * float(vector.norm())
        if merge_kind == MergeKind.ITER_SMOOTH_TOPK:
            total = hidden[row].float() + weight * total
        elif renormalize:
            total *= norms / (float(total.norm()) + _NORM_EPSILON)
        hidden[row] = total.to(hidden.dtype)
