# SPDX-License-Identifier: Apache-2.0
"""The recordings of an engine: behind `Diffulex.start_profile` and /start_profile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from diffulex.env import get_flag
from diffulex.profiling.config import ProfilerConfig
from diffulex.profiling.nvtx_ranges import NvtxRanges, nvtx_package
from diffulex.profiling.scopes import Instrument, Stage, record_function
from diffulex.profiling.session import TorchProfileSession
from diffulex.profiling.stage_timer import CudaStageTimer

__all__ = ["OtherRanks", "Profiler", "Recorded"]


class Recorded(NamedTuple):
    """The recording of another rank: its files, or why it has none."""

    files: tuple[str, ...] = ()
    error: str | None = None


class OtherRanks(Protocol):
    """Those that share the model of an engine with its own process."""

    def start_recording(self, name: str) -> None:
        """Has each of them record its steps; the names of the files begin with `name`."""

    def stop_recording(self) -> Sequence[Recorded]:
        """Waits until they have written what they have recorded; in the order of the ranks from 1 on."""


class Profiler:
    """Records steps on request.

    The engine and the worker in its process are two components of one recording. Other ranks record the
    same steps, each in its own process.

    Args:
        config: `profiler_config`; None: recordings are off.
        instrument: has the stages of the engine.
        others: None: there are no other ranks.
        rank: of this process; from 1 on it has no engine.

    Raises:
        ConfigError: the configuration is wrong.
    """

    def __init__(
        self,
        config: object,
        instrument: Instrument,
        others: OtherRanks | None = None,
        rank: int = 0,
    ) -> None:
        self.config = ProfilerConfig.of(config)
        self._instrument = instrument
        runner = TorchProfileSession("model_runner", rank, self.config)
        self._engine = runner if rank else TorchProfileSession("engine", None, self.config)
        self._sessions = (runner,) if rank else (self._engine, runner)
        self._rank, self._others = rank, others
        self._are_others_told = False
        self._recorded: Sequence[Recorded] = ()
        self._timer: CudaStageTimer | None = None
        self._ranges: NvtxRanges | None = None
        #: A recording was started, and nothing has asked for its files yet.
        self._is_pending = False

    def listen(self, device: str) -> None:
        """Puts scopes around the stages for what the environment asks for.

        Args:
            device: of the engine.

        Raises:
            ConfigError: it asks for what is not here.
        """
        if get_flag("DIFFULEX_NVTX"):
            self._instrument.add(NvtxRanges(self._instrument))
        self._timer = CudaStageTimer.of_environment(device, self._rank)
        if self._timer is not None:
            self._instrument.add(self._timer)

    def start(self, prefix: str | None = None, max_iterations: int | None = None) -> dict[str, Any]:
        """Starts a recording.

        Raises:
            RuntimeError: recordings are off, or one is under way.
        """
        if self.is_active:
            raise RuntimeError("profiler: expected no recording under way, got one")
        for session in self._sessions:
            session.start(prefix, max_iterations)
        self._is_pending = True
        self._instrument.add(_scope)
        if self._has_ranges:
            self._ranges = NvtxRanges(self._instrument)
            self._instrument.add(self._ranges)
        self._recorded = ()
        self._tell_others()
        return {"directory": self.config.torch_profiler_dir}

    @property
    def is_active(self) -> bool:
        """Whether a recording was started and has not ended."""
        return self._engine.active

    def before_step(self, plan: object) -> None:
        """Nothing: recordings begin and end between steps."""

    def after_step(self) -> None:
        """A step is over: begins a delayed recording, ends one that is long enough."""
        if not self.is_active:
            return
        is_running = self._engine.running
        # Whoever begins first owns the recording.
        for session in _last_first(self._sessions) if is_running else self._sessions:
            session.step()
            if self._engine.stopped:
                self._end()
        self._tell_others()

    def _tell_others(self) -> None:
        """They record what the engine does."""
        is_running = self._engine.running
        if self._others is not None and is_running != self._are_others_told:
            self._are_others_told = is_running
            if is_running:
                self._others.start_recording(self._engine.run_id)
            else:
                self._recorded = self._others.stop_recording()

    def stop(self) -> dict[str, Any]:
        """Ends the recording, unless it has ended by itself, and says where its files are.

        Raises:
            RuntimeError: there is none, or its files could not be written.
        """
        if not self._is_pending:
            raise RuntimeError("profiler: expected a recording under way, got none")
        self._is_pending = False
        self._end()
        errors = [f"rank {r}: {it.error}" for r, it in enumerate(self._recorded, 1) if it.error]
        if self._engine.error is not None or errors:
            error = self._engine.error or errors[0]
            raise RuntimeError(f"profiler: the recording is lost: {error}")
        files = self._engine.files
        others = [path for item in self._recorded for path in item.files]
        trace = files.get("trace.json")
        return {
            "trace": None if trace is None else str(trace),
            "files": [*map(str, files.values()), *others],
            "steps": self._engine.active_steps,
        }

    def close(self) -> None:
        """Ends a recording that is still running."""
        self._end()
        if self._timer is not None:
            self._timer.close()
        self._instrument.clear()

    def _end(self) -> None:
        for session in _last_first(self._sessions):
            session.stop()
        self._tell_others()
        self._remove()

    @property
    def _has_ranges(self) -> bool:
        """Whether a recording comes with ranges, which DIFFULEX_NVTX makes all the time."""
        import torch  # noqa: PLC0415 (slow to import)

        can = torch.cuda.is_available() and nvtx_package() is not None
        return can and not get_flag("DIFFULEX_NVTX")

    def _remove(self) -> None:
        """Takes the scopes of a recording away."""
        self._instrument.remove(_scope)
        if self._ranges is not None:
            self._instrument.remove(self._ranges)
            self._ranges = None


def _last_first(sessions: Sequence[TorchProfileSession]) -> Sequence[TorchProfileSession]:
    """The owner of the recording last: it writes the files of all."""
    return sessions[::-1]


def _scope(stage: Stage) -> AbstractContextManager[object]:
    return record_function(stage.scope)
