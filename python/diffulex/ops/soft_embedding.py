# SPDX-License-Identifier: Apache-2.0
"""Expected embedding of a softmax over the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.workspace import empty_workspace, soft_embedding_workspace_bytes

if TYPE_CHECKING:
    from torch import Tensor


@torch.no_grad()
def soft_embedding(
    logits: Tensor,
    lse: Tensor,
    embedding: Tensor,
    *,
    inv_temperature: Tensor | None = None,
    row_valid: Tensor | None = None,
    normalizer: float = 1.0,
    softcap: float = 0.0,
    vocab_limit: int = -1,
    vocab_start: int = 0,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """normalizer * sum_v p_v E[v] with p_v = exp(softcap(l_v) * inv_temperature - lse).

    Probabilities are rounded to the dtype of the table, sums are float32. Logits of NaN and -inf
    have probability 0.

    Args:
        logits: [R, V], raw (before soft-cap and temperature).
        lse: [R] float32, any stride: column LSE of `token_stats` for the same rows, temperatures
            and soft-cap.
        embedding: E [V, H].
        inv_temperature: [R] float32; 0 and None stand for 1.
        row_valid: [R] uint8 or bool; rows that are 0 give 0.
        vocab_limit: ids at or past it have probability 0; -1 = none.
        vocab_start: id of column 0 when logits and table are a vocabulary shard.
        out: [R, H] float32 to fill; None allocates it.
        workspace: scratch of `soft_embedding_workspace_bytes`; None allocates it.

    Returns:
        `out`.
    """
    num_rows, vocab_size = logits.shape
    if out is None:
        shape = (num_rows, embedding.shape[1])
        out = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if workspace is None:
        needed = soft_embedding_workspace_bytes(
            num_rows,
            vocab_size,
            embedding.shape[1],
            str(embedding.dtype).removeprefix("torch."),
            logits.device.type,
        )
        workspace = empty_workspace(needed, logits.device)
    torch.ops.diffulex.soft_embedding(
        logits,
        lse,
        inv_temperature,
        embedding,
        row_valid,
        out,
        workspace,
        normalizer=normalizer,
        softcap=softcap,
        vocab_limit=vocab_limit,
        vocab_start=vocab_start,
    )
    return out


@torch.no_grad()
def soft_embedding_reference(
    logits: Tensor,
    lse: Tensor,
    embedding: Tensor,
    *,
    inv_temperature: Tensor | None = None,
    row_valid: Tensor | None = None,
    normalizer: float = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    """Pure torch twin of `soft_embedding` for a whole vocabulary."""
    scores = logits.float().nan_to_num(-torch.inf, posinf=torch.finfo(torch.float32).max)
    if softcap > 0:
        scores = torch.where(scores == -torch.inf, scores, softcap * torch.tanh(scores / softcap))
    if inv_temperature is not None:
        factor = torch.where(inv_temperature == 0, 1.0, inv_temperature)
        scores = scores * factor[:, None]
    probabilities = (scores - lse[:, None]).exp().to(embedding.dtype)
    out = normalizer * (probabilities.float() @ embedding.float())
    return out if row_valid is None else torch.where(row_valid.bool()[:, None], out, 0.0)
