# SPDX-License-Identifier: Apache-2.0
"""The executor of a replica that has some of the routed experts, and other replicas the rest.

Its scheduler, requests and cache are its own. Every forward is made by all replicas together, with their
own rows or with none, since each of them needs the experts of the others. Where a replica has several
ranks, ranks of one number exchange rows with each other; what the ranks of a replica make of its rows is
added up with the rest of the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from diffulex.distributed.cuda_comm import CudaRowComm
from diffulex.distributed.gloo_comm import GlooComm
from diffulex.distributed.layout import Sizes
from diffulex.distributed.legality import check_model_class, shard_of
from diffulex.distributed.lockstep import Lockstep
from diffulex.distributed.store import join_store, make_store, part_of_store
from diffulex.errors import ConfigError
from diffulex.nn.coupled import CoupledExperts
from diffulex.quantization.scheme import QuantizationPlan
from diffulex.registry import AutoModelForDiffusionLM
from diffulex.runner.local_executor import LocalExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.config.config import Config
    from diffulex.distributed.comm import RowComm
    from diffulex.distributed.coupling import Coupling
    from diffulex.likelihood.rows import ScoreBatch, Scored
    from diffulex_ext import _core

__all__ = [
    "CoupledExecutor",
    "RowLinks",
    "connect_rows",
    "couple_experts",
    "make_meeting_place",
]


def make_meeting_place(config: Config) -> Any:
    """The store where replicas that share the experts find each other; None where they share nothing.

    Raises:
        ConfigError: no replica can have a part of the model.
    """
    sizes, name = Sizes.of_weights(config.parallel), config.model.model_name
    if not sizes.is_coupled:
        return None
    check_model_class(name, AutoModelForDiffusionLM.get(name), sizes)
    return make_store(sizes.world, parallel=config.parallel)


class RowLinks(NamedTuple):
    """The exchange of one rank with those of its number in other replicas.

    Attributes:
        counts: on the host, of the first ranks, who agree on the next forward; None for others.
        rows: what the experts get.
    """

    counts: RowComm | None
    rows: RowComm


def connect_rows(coupling: Coupling, config: Config, own: int = 0) -> RowLinks:
    """The exchange of rank `own` of a replica, on the device that the configuration has; the others make
    theirs at the same time.

    Raises:
        RuntimeError: the others are not there in time; PeerError says who is missing.
    """
    parallel, sizes = config.parallel, Sizes.of_weights(config.parallel)
    connect_s = float(parallel.distributed_timeout_seconds)
    timeout_s = float(parallel.collective_timeout_seconds)
    is_on_cpu = config.model.device == "cpu"
    store = join_store(coupling.store, sizes.world, connect_s)
    where = coupling.replica, sizes.data
    on_host = None
    if own == 0 or is_on_cpu:
        on_host = GlooComm(*where, part_of_store(store, f"host {own}"), connect_s, timeout_s)
    rows: RowComm | None = on_host
    if not is_on_cpu:
        torch.cuda.set_device(config.model.device)  # for whatever names no device
        backend = parallel.distributed_backend
        store = part_of_store(store, f"rows {own}")
        rows = CudaRowComm(*where, store, connect_s, timeout_s, backend=backend)
    assert rows is not None
    return RowLinks(on_host if own == 0 else None, rows)


def couple_experts(config: Config, model: Any, rank: int, comm: RowComm) -> CoupledExperts:
    """Lets the experts of a rank's part of the model take part in the forwards of all replicas.

    Args:
        config: of one of them.
        model: connected with the other ranks of its replica, if there are some.
        rank: among those of all replicas.
        comm: with ranks of the same number.
    """
    parallel = config.parallel
    sizes = Sizes.of_weights(parallel)
    plan = QuantizationPlan.of(config.model)
    shard = shard_of(config.model.spec, sizes, parallel.moe_parallel_mode, rank, plan)
    dtype = getattr(torch, config.model.dtype)
    return CoupledExperts(model, shard, dtype, comm, parallel.moe_dispatcher_backend)


class CoupledExecutor(LocalExecutor):
    """See `diffulex.distributed.executor.Executor`. A step that fails is the end of all replicas: their
    exchanges cannot be known to be at one place any more.

    Args:
        links: of this rank.
        rank: its number among those of all replicas.
        others: what the next class is made of, where this one stands before another executor.
    """

    def __init__(self, links: RowLinks, rank: int, *others: Any) -> None:
        super().__init__(*others)
        assert links.counts is not None
        self._links, self._rank, self._num_ranks = links, rank, 0
        self._lockstep = Lockstep(links.counts)
        self._experts: CoupledExperts | None = None

    def load(self, config: Config, model: Any) -> None:
        super().load(config, model)
        self._num_ranks = Sizes.of_weights(config.parallel).world
        self._experts = couple_experts(config, model, self._rank, self._links.rows)

    def execute(self, plan: _core.StepPlan) -> None:
        self._expect(self._agree(plan.num_rows, has_more=True))
        super().execute(plan)

    def collect(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        output = super().collect(plan)
        if isinstance(self._links.rows, CudaRowComm):
            self._links.rows.check()
        return output

    def _agree(self, num_rows: int, *, has_more: bool) -> tuple[int, ...]:
        return self._lockstep.agree(num_rows, has_more=has_more)

    def _expect(self, counts: Sequence[int]) -> None:
        """Rows of each replica in the next forward, of this rank and those with which it shares them."""
        assert self._experts is not None
        self._experts.expect(counts)

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

    def _take_part(self, has_more: bool) -> bool:
        counts = self._agree(0, has_more=has_more)
        if not any(counts):
            return False
        self._enter(counts)
        return True

    @torch.inference_mode()
    def _enter(self, counts: Sequence[int]) -> None:
        """A forward that others have rows in."""
        assert self._experts is not None
        self._experts.expect(counts)  # followers are told so with the forward
        self._experts.take_part()

    def score(self, batch: ScoreBatch) -> Scored:
        self._refuse("score")

    def update_weights(self, new: object, begin: object) -> int:
        self._refuse("update_weights")

    def load_adapter(self, directory: object, begin: object) -> int:
        self._refuse("load_lora")

    def unload_adapter(self, begin: object) -> int:
        self._refuse("unload_lora")

    def _refuse(self, name: str) -> NoReturn:
        raise ConfigError(f"{name}: expected expert_parallel_size 1, got {self._num_ranks}")
