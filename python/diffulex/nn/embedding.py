# SPDX-License-Identifier: Apache-2.0
"""Token embedding and output head, which may share one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from diffulex.checkpoint.slices import WeightSlice
from diffulex.nn.linear import MatrixProduct
from diffulex.nn.partition import WHOLE

if TYPE_CHECKING:
    from diffulex.nn.partition import Partition


class TokenEmbedding(nn.Module):
    """Rows of a [V, H] table by token id.

    Of a table that is cut by its vocabulary a rank knows its own ids; rows of others are zero, so that
    the sum over the ranks is the embedding.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        partition: Partition = WHOLE,
    ) -> None:
        super().__init__()
        self._shape = vocab_size, hidden_size
        self._is_cut = partition.shard.size > 1
        #: Ids of this rank.
        self.stored_rows = partition.rows(vocab_size)
        num_rows = self.stored_rows.stop - self.stored_rows.start
        table = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A new tensor [T, H] for ids [T]."""
        if not self._is_cut:
            return functional.embedding(input_ids, self.weight)
        rows = input_ids - self.stored_rows.start
        is_other = (rows < 0) | (rows >= self.weight.size(0))
        own = functional.embedding(rows.masked_fill(is_other, 0), self.weight)
        return own.masked_fill_(is_other[:, None], 0)

    def slices(self, name: str) -> dict[str, WeightSlice]:
        """What the layer has of the stored table `name`."""
        return {name: WeightSlice(self._shape, (self.stored_rows,), slice(0, self._shape[1]))}


class OutputHead(MatrixProduct):
    """Logits of hidden rows; `tie` makes it use the table of an embedding."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        partition: Partition = WHOLE,
    ) -> None:
        #: Ids of this rank.
        self.stored_rows = partition.rows(vocab_size)
        num_rows = self.stored_rows.stop - self.stored_rows.start
        super().__init__(hidden_size, num_rows, dtype=dtype, device=device)
        self._shape = vocab_size, hidden_size

    def tie(self, embedding: TokenEmbedding) -> None:
        """Releases the own matrix and shares the rows of `embedding`, which stay row-major.

        Raises:
            ValueError: the embedding has not all ids of the head.
        """
        own, table = self.stored_rows, embedding.stored_rows
        if not table.start <= own.start < own.stop <= table.stop:
            raise ValueError(f"OutputHead.tie: expected an embedding of the ids {own}, got {table}")
        if own == table:
            self.share(embedding.weight)
            return
        rows = embedding.weight[own.start - table.start : own.stop - table.start]
        self.share(nn.Parameter(rows, requires_grad=False))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] for hidden [n, H]; the columns of this rank's ids."""
        return self.multiply(hidden)

    def slices(self, name: str) -> dict[str, WeightSlice]:
        """What the layer has of the stored matrix `name`."""
        return {name: WeightSlice(self._shape, (self.stored_rows,), slice(0, self._shape[1]))}
