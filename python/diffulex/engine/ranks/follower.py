# SPDX-License-Identifier: Apache-2.0
"""A rank that has a part of the model and no scheduler: it runs the steps that it is told of.

Sampling is a function of records that all ranks merge alike, so each rank decides by itself what the
first one decides, and only the first one's output is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from diffulex.distributed.cuda_comm import CudaComm
from diffulex.engine.ranks.step_header import StepHeader, is_looked_at
from diffulex.profiling.config import ProfilerConfig
from diffulex.profiling.profiler import Profiler, Recorded
from diffulex.profiling.scopes import Instrument, Stage
from diffulex.registry import AutoModelRunner, AutoScheduler
from diffulex.runner.row_watch import FollowedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.distributed.comm import Comm
    from diffulex.nn.coupled import CoupledExperts
    from diffulex.runner.loop_steps import LoopEntry, LoopStep
    from diffulex.runner.model_runner import ModelRunner

__all__ = ["Follower", "HiddenDigest", "decisions"]


def decisions(ids: np.ndarray[Any, Any], flags: np.ndarray[Any, Any]) -> bytes:
    """What a step has decided, to compare ranks by: the ids of its blocks, then their flags."""
    return b"".join(np.ascontiguousarray(part).tobytes() for part in (ids, flags))


class HiddenDigest:
    """Digests of the hidden states of every 64th step that the host has planned, to compare ranks by.

    Args:
        runner: of this rank.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._num_steps, self._digest = 0, b""
        runner.on_hidden = self

    def __call__(self, hidden: Tensor) -> None:
        if is_looked_at(self._num_steps):
            values = hidden.contiguous().view(torch.uint8).cpu().numpy().tobytes()
            self._digest = hashlib.blake2b(values, digest_size=8).digest()
        self._num_steps += 1

    def take(self) -> bytes:
        """That of the last step; empty where it is not looked at."""
        digest, self._digest = self._digest, b""
        return digest


class Follower:
    """The worker of a rank other than the first.

    Args:
        config: of the engine.
        model: this rank's part.
        comm: with the other ranks, which make theirs at the same time.
    """

    def __init__(self, config: Config, model: Any, comm: Comm) -> None:
        model.comm = comm
        self._comm = comm
        self._config = config
        #: Where replicas share the experts.
        self._experts: CoupledExperts | None = None
        self._runner: ModelRunner = AutoModelRunner.get(config.decoding.decoding_strategy)(
            config, model
        )
        head = self._runner.row_watch.head
        assert head is not None
        self._rows = FollowedRows(head)
        self._runner.row_watch = cast("Any", self._rows)
        self._digest = HiddenDigest(self._runner) if config.parallel.check_ranks else None
        recordings = ProfilerConfig.of(config.kernel.profiler_config)
        # The first rank says when they begin and end.
        recordings = dataclasses.replace(recordings, delay_iterations=0, max_iterations=0)
        self._profiler = Profiler(recordings, Instrument(self._stages), rank=comm.rank)
        self._lost: str | None = None

    def _stages(self) -> list[Stage]:
        own = [Stage(self, method, "engine", "step") for method in ("execute", "follow")]
        return [*own, *self._runner.stages()]

    def start_recording(self, name: str) -> None:
        """Records the steps from here on; see `diffulex.profiling.profiler.OtherRanks`."""
        self._lost = None
        try:
            self._profiler.start(name)
        except RuntimeError as error:
            self._lost = str(error)

    def stop_recording(self) -> Recorded:
        """Ends it and writes its files."""
        try:
            return Recorded(tuple(self._profiler.stop()["files"]))
        except RuntimeError as error:
            return Recorded(error=self._lost or str(error))

    def couple(self, experts: CoupledExperts) -> None:
        """Has the experts of this rank take part in the forwards of other replicas."""
        self._experts = experts

    def expect(self, counts: Sequence[int]) -> None:
        """Rows of each replica in the next step."""
        assert self._experts is not None
        self._experts.expect(counts)

    @torch.inference_mode()
    def take_part(self, counts: Sequence[int]) -> None:
        """A forward in which other replicas have rows, so many, and this one none."""
        self.expect(counts)
        assert self._experts is not None
        self._experts.take_part()

    def num_pages(self) -> int:
        """Pages that this rank has memory for."""
        return self._runner.decide_num_pages()

    def start(self, num_pages: int, arenas: Sequence[Tensor]) -> None:
        """Allocates what the steps need.

        Args:
            num_pages: of every rank.
            arenas: where the first rank has its plans.
        """
        config = self._config.with_num_pages(num_pages)
        scheduler = AutoScheduler.create(config.decoding.decoding_strategy, config)
        self._runner.prepare(config, scheduler.options, arenas)
        self._profiler.listen(config.model.device)

    def execute(self, header: StepHeader) -> bytes | None:
        """Runs a step; what it has decided, if the configuration asks to compare that."""
        runner = self._runner
        if header.has_draws:
            runner.expect_draws()
        self._rows.is_active = header.is_watched
        runner.step_buffers.stage(header.arena, header.num_bytes)
        runner.graphs.is_padded(header.bucket)
        output = runner.execute(cast("Any", header))  # has what the runner asks of a plan
        if self._digest is None:
            return None
        num_blocks = header.num_blocks
        decided = decisions(output.write_ids[:num_blocks], output.flags[:num_blocks])
        return decided + self._digest.take()

    def follow(self, told: LoopEntry | LoopStep) -> bytes | None:
        """Enqueues a step of the loop; what it has decided, as `execute`."""
        runner = self._runner
        if told.variant.is_drawn:
            runner.expect_draws()
        place = runner.follow(told)
        if not self._config.parallel.check_ranks:
            return None
        assert runner.loop is not None
        return decisions(*runner.loop.decided(place))

    def check(self) -> None:
        """Raises PeerError where a step has waited for another rank in vain."""
        if isinstance(self._comm, CudaComm):
            self._comm.check()

    def close(self) -> None:
        """Waits for the device; nothing but the caller holds it afterwards."""
        self._profiler.close()
        del self._profiler
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)

    def evict(self, request_slots: Sequence[int]) -> None:
        """Drops what the sampler keeps of requests that left these slots."""
        self._runner.sampler.evict(request_slots)
