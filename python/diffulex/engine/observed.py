# SPDX-License-Identifier: Apache-2.0
"""What an engine tells about its steps: records, recordings, stages."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from diffulex.distributed.layout import describe_ranks
from diffulex.profiling.profiler import Profiler
from diffulex.profiling.ring import StepRing, StepTimes
from diffulex.profiling.scopes import Instrument, Stage

if TYPE_CHECKING:
    import numpy as np

    from diffulex.config.config import Config
    from diffulex.distributed.executor import Executor, Prepared
    from diffulex.engine.step_loop import StepLoop
    from diffulex.profiling.memory import MemoryReport

__all__ = ["Observed"]


class Observed:
    """Part of `Diffulex`."""

    config: Config
    _executor: Executor
    _loop: StepLoop
    #: None for several replicas.
    _prepared: Prepared | None = None
    #: None: no records are kept.
    _ring: StepRing | None = None

    def _observe(self, config: Config, executor: Executor) -> None:
        """Sets up what listens to the steps, before the executor loads."""
        # The engine holds its profiler: without a cycle, one that is dropped goes at once.
        engine = weakref.ref(self)

        def stages() -> list[Stage]:
            held = engine()
            return [] if held is None else held._stages()

        ranks = weakref.proxy(executor)  # which may hold the profiler
        self._profiler = Profiler(config.kernel.profiler_config, Instrument(stages), ranks)
        if config.kernel.profiler_config is not None:
            executor.observer = self._profiler
        self._ring = StepRing.of(config.kernel.step_records)
        executor.times = None if self._ring is None else StepTimes()

    @property
    def prepared(self) -> Prepared:
        """What the engine made for its steps: graphs, and which kernel each op takes.

        Raises:
            RuntimeError: it is several replicas.
        """
        if self._prepared is None:
            raise RuntimeError("prepared: expected data_parallel_size 1, got several replicas")
        return self._prepared

    def parallel_info(self) -> dict[str, Any]:
        """How the model is spread over processes and devices; also after `close`.

        Returns:
            `tensor_parallel_size`, `data_parallel_size` and `expert_parallel_size`; their `layout`
            (docs/distributed.md); `executor`: local (no other process), mp or ray; and of each of `ranks` its
            `rank`, `replica` and `device` (None where Ray chooses it), and the ranks, itself among them, that
            have parts of the same weights (`tensor_group`) and of the same experts (`expert_group`).
        """
        return describe_ranks(self.config.parallel, self.config.model.device)

    def memory_report(self) -> MemoryReport:
        """Where the memory of the engine is now; RuntimeError after `close`."""
        self._loop.check_open()
        return self._executor.memory()

    def step_stats(self, last_n: int | None = None) -> np.ndarray[Any, np.dtype[np.void]]:
        """Records of the last steps, the oldest first; from any thread, also after `close`.

        Args:
            last_n: at most so many; None: all that are kept, which `step_records` says.

        Returns:
            A structured array with the fields of `diffulex.profiling.STEP_DTYPE`.

        Raises:
            ValueError: a negative number.
            RuntimeError: `step_records` is 0.
        """
        ring = self._ring
        if ring is None:
            raise RuntimeError("Diffulex.step_stats: expected step_records above 0, got 0")
        return ring.last(last_n)

    def start_profile(
        self, prefix: str | None = None, *, max_iterations: int | None = None
    ) -> dict[str, Any]:
        """Starts a recording of steps by torch's profiler, which `profiler_config` sets up.

        Args:
            prefix: how the names of the files begin, instead of its `run_id`.
            max_iterations: steps of this recording, instead of its `max_iterations`.

        Raises:
            RuntimeError: there is no `profiler_config`, or a recording is under way.
        """
        self._loop.check_open()
        return self._profiler.start(prefix, max_iterations)

    @property
    def is_profiling(self) -> bool:
        """Whether a recording is under way."""
        return self._profiler.is_active

    def stop_profile(self) -> dict[str, Any]:
        """Ends the recording, unless it ended by itself, and returns where its files are.

        Returns:
            `trace` (None where no step was recorded), `files`, and the number of `steps`.

        Raises:
            RuntimeError: there is no recording, or its files could not be written.
        """
        return self._profiler.stop()

    def _stages(self) -> list[Stage]:
        """What a listener may put scopes around."""
        own = (("generate", "generate"), ("_encode", "tokenizer_encode"))
        return [
            *(Stage(self, method, "engine", name) for method, name in own),
            *self._loop.stages(),
            *self._executor.stages(),
        ]
