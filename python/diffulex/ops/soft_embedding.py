# SPDX-License-Identifier: Apache-2.0
"""Expected embedding of a softmax over the vocabulary."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from diffulex.ops.fakes import FLAGS, FLOAT32, FLOATS, FakeArguments, fake
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


@fake("soft_embedding")
def _soft_embedding(
    arguments: FakeArguments, logits: Tensor, embedding: Tensor, normalizer: float, softcap: float
) -> None:
    arguments.check("logits", FLOATS, (None, None))
    num_rows, vocab_size = logits.shape
    arguments.check("lse", FLOAT32, (num_rows,))
    arguments.check("inv_temperature", FLOAT32, (num_rows,))
    arguments.check("embedding", FLOATS, (vocab_size, None))
    arguments.check("row_valid", FLAGS, (num_rows,))
    arguments.check("out", FLOAT32, (num_rows, embedding.shape[1]))
    arguments.require("normalizer", math.isfinite(normalizer), "a finite number", normalizer)
    arguments.require(
        "softcap", math.isfinite(softcap) and softcap >= 0, "a finite number >= 0", softcap
    )
    arguments.at_least("vocab_limit", -1)
    arguments.at_least("vocab_start", 0)
