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
        model: a rank's part, on its device. Ranks that have other experts of the same rows add up their
            results with those of the rest of the layer.
        shard: which part.
        dtype: of hidden states.
        comm: with ranks that have other rows, each of them one of those that share a replica.
        backend: `allgather` or `naive`; see docs/distributed.md.

    Raises:
        ConfigError: no module of the model has experts that it knows.
    """

    def __init__(
        self, model: Any, shard: Shard, dtype: torch.dtype, comm: RowComm, backend: str
    ) -> None:
        spec: ModelSpec = model.spec
        device = next(model.parameters()).device
        self._nothing = torch.empty(0, spec.hidden_size, dtype=dtype, device=device)
        self._blocks = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        if not self._blocks:
            raise ConfigError(
                "expert_parallel_size: expected 1 for a model without modules of RoutedExperts"
                f" (diffulex.nn.experts), got {comm.size}"
            )
        self._dispatch: RowDispatch = GatheredDispatch(comm)
        if backend == "naive":
            self._dispatch = CountedDispatch(comm, _owners(spec, shard, comm.size).to(device))
        for block in self._blocks:
            block.dispatch = self._dispatch

    def expect(self, counts: Sequence[int]) -> None:
        """Rows of each rank in the next forward."""
        self._dispatch.counts = counts

    def take_part(self) -> None:
        """The forward of a rank that has no rows in it."""
        for block in self._blocks:
            block.take_part(self._nothing)


def _owners(spec: ModelSpec, shard: Shard, num_replicas: int) -> torch.Tensor:
    """[E] int64: the replica whose rank of this number has each expert; -1: ranks of other numbers."""
    assert spec.moe is not None
    own, moe = expert_shard(spec, shard), spec.moe
    owners = torch.full((moe.num_experts,), -1, dtype=torch.int64)
    for replica in range(num_replicas):
        other = own._replace(rank=replica * shard.size + shard.rank)
        numbers = other.experts(moe.num_experts, is_interleaved=moe.n_group > 1)
        owners[list(numbers)] = replica
    return owners
