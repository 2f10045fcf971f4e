# SPDX-License-Identifier: Apache-2.0
"""The experts of a model that other engines have the rest of: each engine has rows of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from diffulex.distributed.legality import expert_shard
from diffulex.errors import ConfigError
from diffulex.nn.dispatch import CountedDispatch, GatheredDispatch
from diffulex.nn.experts import RoutedExperts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.distributed.comm import RowComm
    from diffulex.distributed.shard import Shard
    from diffulex.families.spec import ModelSpec
    from diffulex.nn.dispatch import RowDispatch

__all__ = ["CoupledExperts"]


class CoupledExperts:
    """Lets the experts of a model take part in the forwards of others.

    Args:
        model: a rank's part.
        shard: which part.
        dtype: of hidden states.
        comm: with the other ranks.
        backend: `allgather` or `naive`; see docs/distributed.md.

    Raises:
        ConfigError: no module of the model has experts that it knows.
    """

    def __init__(
        self, model: Any, shard: Shard, dtype: torch.dtype, comm: RowComm, backend: str
    ) -> None:
        spec: ModelSpec = model.spec
        self._nothing = torch.empty(0, spec.hidden_size, dtype=dtype)
        self._blocks = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        if not self._blocks:
            raise ConfigError(
                "expert_parallel_size: expected 1 for a model without modules of RoutedExperts"
                f" (diffulex.nn.experts), got {comm.size}"
            )
        self._dispatch: RowDispatch = GatheredDispatch(comm)
        if backend == "naive":
            self._dispatch = CountedDispatch(comm, _owners(spec, shard))
        for block in self._blocks:
            block.dispatch = self._dispatch

    def expect(self, counts: Sequence[int]) -> None:
        """Rows of each rank in the next forward."""
        self._dispatch.counts = counts

    def take_part(self) -> None:
        """The forward of a rank that has no rows in it."""
        for block in self._blocks:
            block.take_part(self._nothing)


def _owners(spec: ModelSpec, shard: Shard) -> torch.Tensor:
    """[E] int64: the rank that has each expert."""
    assert spec.moe is not None
    own, moe = expert_shard(spec, shard), spec.moe
    owners = torch.empty(moe.num_experts, dtype=torch.int64)
    for rank in range(own.size):
        numbers = own._replace(rank=rank).experts(moe.num_experts, is_interleaved=moe.n_group > 1)
        owners[list(numbers)] = rank
    return owners
