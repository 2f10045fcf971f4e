# SPDX-License-Identifier: Apache-2.0
"""The executor of a replica that has some of the routed experts, and other replicas the rest.

Its scheduler, requests and cache are its own. Every forward is made by all replicas together, with their
own rows or with none, since each of them needs the experts of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from diffulex.distributed.gloo_comm import GlooComm
from diffulex.distributed.layout import Sizes
from diffulex.distributed.legality import check_model_class, shard_of
from diffulex.distributed.lockstep import Lockstep
from diffulex.distributed.store import make_store
from diffulex.errors import ConfigError
from diffulex.nn.coupled import CoupledExperts
from diffulex.registry import AutoModelForDiffusionLM
from diffulex.runner.local_executor import LocalExecutor

if TYPE_CHECKING:
    from diffulex.config.config import Config
    from diffulex.distributed.comm import RowComm
    from diffulex.likelihood.rows import ScoreBatch, Scored
    from diffulex_ext import _core

__all__ = ["CoupledExecutor", "Coupling", "make_meeting_place"]


def make_meeting_place(config: Config) -> Any:
    """The store where replicas that share the experts find each other; None where they share nothing.

    Raises:
        ConfigError: no replica can have a part of the model.
    """
    sizes, name = Sizes.of_weights(config.parallel), config.model.model_name
    if not sizes.is_coupled:
        return None
    check_model_class(name, AutoModelForDiffusionLM.get(name), sizes)
    return make_store(sizes.world)


class Coupling(NamedTuple):
    """Where a replica finds those with which it shares the experts.

    Attributes:
        rank: of the replica.
        store: host and port of `diffulex.distributed.store.make_store`.
    """

    rank: int
    store: tuple[str, int]

    def connect(self, config: Config) -> GlooComm:
        """The exchange with the others, which make theirs at the same time.

        Raises:
            RuntimeError: the others are not there in time.
        """
        parallel = config.parallel
        return GlooComm(
            self.rank,
            Sizes.of_weights(parallel).world,
            self.store,
            float(parallel.distributed_timeout_seconds),
            float(parallel.collective_timeout_seconds),
        )


class CoupledExecutor(LocalExecutor):
    """See `diffulex.distributed.executor.Executor`. A step that fails is the end of all replicas: their
    exchanges cannot be known to be at one place any more.

    Args:
        comm: with the other replicas.
    """

    def __init__(self, comm: RowComm) -> None:
        super().__init__()
        self._comm = comm
        self._lockstep = Lockstep(comm)
        self._experts: CoupledExperts | None = None

    def load(self, config: Config, model: Any) -> None:
        parallel = config.parallel
        sizes, rank = Sizes.of_weights(parallel), self._comm.rank
        shard = shard_of(config.model.spec, sizes, parallel.moe_parallel_mode, rank)
        backend = parallel.moe_dispatcher_backend
        dtype = getattr(torch, config.model.dtype)
        self._experts = CoupledExperts(model, shard, dtype, self._comm, backend)
        super().load(config, model)

    def execute(self, plan: _core.StepPlan) -> None:
        assert self._experts is not None
        self._experts.expect(self._lockstep.agree(plan.num_rows, has_more=True))
        super().execute(plan)

    def call(self, number: int) -> None:
        self._lockstep.call(number)

    @property
    def is_called(self) -> bool:
        return self._lockstep.is_called

    def rest(self, *, has_more: bool) -> None:
        if self.is_called:
            self._take_part(has_more)

    def stand_aside(self, *, has_more: bool) -> bool:
        """Takes part in a forward of others, if they have one, while this engine's requests wait.

        Args:
            has_more: there are requests, for which the others must stay awake.

        Returns:
            Whether another one had rows.
        """
        return self._take_part(has_more)

    @torch.inference_mode()
    def _take_part(self, has_more: bool) -> bool:
        counts = self._lockstep.agree(0, has_more=has_more)
        if not any(counts):
            return False
        assert self._experts is not None
        self._experts.expect(counts)
        self._experts.take_part()
        return True

    def score(self, batch: ScoreBatch) -> Scored:
        self._refuse("score")

    def update_weights(self, new: object, begin: object) -> int:
        self._refuse("update_weights")

    def load_adapter(self, directory: object, begin: object) -> int:
        self._refuse("load_lora")

    def unload_adapter(self, begin: object) -> int:
        self._refuse("unload_lora")

    def _refuse(self, name: str) -> NoReturn:
        raise ConfigError(f"{name}: expected expert_parallel_size 1, got {self._comm.size}")
