# SPDX-License-Identifier: Apache-2.0
"""Expected embedding of a softmax over the vocabulary."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from diffulex.ops.fakes import FLAGS, FLOAT32, FLOATS, FakeArguments, fake
from diffulex.ops.settled import asks_for_invariance
from diffulex.ops.workspace import empty_workspace, soft_embedding_workspace_bytes

if TYPE_CHECKING:
    from torch import Tensor

#: Columns that a chunk of the vocabulary is a multiple of.
_UNIT = 64


@torch.no_grad()
def soft_probabilities(
    logits: Tensor,
    lse: Tensor,
    *,
    inv_temperature: Tensor | None = None,
    row_valid: Tensor | None = None,
    softcap: float = 0.0,
    vocab_limit: int = -1,
    vocab_start: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """The probabilities p_v of `soft_embedding`, whose arguments these are.

    Returns:
        `out` [R, V] float32, float16 or bfloat16, in whose dtype they are; None allocates float32.
    """
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    torch.ops.diffulex.soft_probabilities(
        logits,
        lse,
        inv_temperature,
        row_valid,
        out,
        softcap=softcap,
        vocab_limit=vocab_limit,
        vocab_start=vocab_start,
    )
    return out


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
    have probability 0. On CUDA the product with a table of 16 bits is that of the vendor's library,
    whose order of sums depends on the number of rows; inside `batch_invariant` it is our own.

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
    needed = soft_embedding_workspace_bytes(
        num_rows,
        vocab_size,
        embedding.shape[1],
        str(embedding.dtype).removeprefix("torch."),
        logits.device.type,
    )
    if workspace is None:
        workspace = empty_workspace(needed, logits.device)
    if _is_by_library(logits, embedding, out, workspace, needed) and math.isfinite(normalizer):
        assert workspace is not None
        columns = _chunk_columns(num_rows, vocab_size, needed // embedding.element_size())
        held = workspace.view(embedding.dtype)[: num_rows * columns].view(num_rows, columns)
        for start in range(0, vocab_size, columns):
            table = embedding[start : start + columns]
            part = held[:, : table.size(0)]
            soft_probabilities(
                logits[:, start : start + columns],
                lse,
                inv_temperature=inv_temperature,
                row_valid=row_valid,
                softcap=softcap,
                vocab_limit=vocab_limit,
                vocab_start=vocab_start + start,
                out=part,
            )
            if start == 0:
                torch.mm(part, table, out_dtype=torch.float32, out=out)
            else:
                torch.addmm(out, part, table, out_dtype=torch.float32, out=out)
        out.mul_(normalizer)
        return out if row_valid is None else out.masked_fill_((row_valid == 0)[:, None], 0.0)
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


def _is_by_library(
    logits: Tensor, embedding: Tensor, out: Tensor, workspace: Tensor | None, needed: int
) -> bool:
    """Whether the vendor's library multiplies probabilities with a table; what our own product refuses is
    left to it, and so is what it takes alone."""
    if not embedding.is_cuda or embedding.element_size() != 2 or logits.numel() == 0:
        return False
    if workspace is None or workspace.nbytes < needed or asks_for_invariance():
        return False
    shape = (logits.shape[0], embedding.shape[1])
    has_shapes = embedding.shape[0] == logits.shape[1] and tuple(out.shape) == shape
    return has_shapes and out.dtype == torch.float32 and out.is_contiguous()


def _chunk_columns(num_rows: int, vocab_size: int, room: int) -> int:
    """Columns of a chunk of the vocabulary, of whose probabilities there is room for so many; nearly the
    same in all chunks."""
    most = room // (num_rows * _UNIT) * _UNIT
    num_chunks = -(-vocab_size // most)
    return -(-vocab_size // (num_chunks * _UNIT)) * _UNIT


@fake("soft_probabilities")
def _soft_probabilities(
    arguments: FakeArguments, logits: Tensor, out: Tensor, softcap: float
) -> None:
    _check_softmax(arguments, logits, softcap)
    arguments.check("out", FLOATS, tuple(logits.shape))


@fake("soft_embedding")
def _soft_embedding(
    arguments: FakeArguments, logits: Tensor, embedding: Tensor, normalizer: float, softcap: float
) -> None:
    _check_softmax(arguments, logits, softcap)
    num_rows, vocab_size = logits.shape
    arguments.check("embedding", FLOATS, (vocab_size, None))
    arguments.check("out", FLOAT32, (num_rows, embedding.shape[1]))
    arguments.require("normalizer", math.isfinite(normalizer), "a finite number", normalizer)


def _check_softmax(arguments: FakeArguments, logits: Tensor, softcap: float) -> None:
    arguments.check("logits", FLOATS, (None, None))
    num_rows = logits.shape[0]
    arguments.check("lse", FLOAT32, (num_rows,))
    arguments.check("inv_temperature", FLOAT32, (num_rows,))
    arguments.check("row_valid", FLAGS, (num_rows,))
    arguments.require(
        "softcap", math.isfinite(softcap) and softcap >= 0, "a finite number >= 0", softcap
    )
    arguments.at_least("vocab_limit", -1)
    arguments.at_least("vocab_start", 0)
