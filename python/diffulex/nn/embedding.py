# SPDX-License-Identifier: Apache-2.0
"""Token embedding and output head, which may share one matrix."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from diffulex.nn.linear import MatrixProduct


class TokenEmbedding(nn.Module):
    """Rows of a [V, H] table by token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        table = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A new tensor [T, H] for ids [T]."""
        return functional.embedding(input_ids, self.weight)


class OutputHead(MatrixProduct):
    """Logits of hidden rows; `tie` makes it use the table of an embedding."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(hidden_size, vocab_size, dtype=dtype, device=device)

    def tie(self, embedding: TokenEmbedding) -> None:
        """Releases the own matrix and shares the one of `embedding`, which stays row-major."""
        self.share(embedding.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] for hidden [n, H]."""
        return self.multiply(hidden)
