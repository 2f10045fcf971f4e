# SPDX-License-Identifier: Apache-2.0
"""Recordings by torch's profiler.

A process has one torch profiler at most: a second one would take over silently, and both would be lost.
Sessions that record at the same time share it. The first owns the recording and writes it; the names
of the others' files point to the owner's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from diffulex.env import get_flag
from diffulex.log import get_logger
from diffulex.profiling.config import ProfilerConfig
from diffulex.profiling.export import SUFFIXES, export_recording
from diffulex.profiling.scopes import count_collector

__all__ = ["TorchProfileSession"]

logger = get_logger(__name__)

_lock = threading.Lock()
_owner: TorchProfileSession | None = None


class TorchProfileSession:
    """Recordings of one component of a process, one after another.

    Args:
        component: part of the names of the files, such as `engine`.
        rank: likewise; None: the component has no ranks.
        config: a `ProfilerConfig`, a mapping of its fields, or None: off.

    Attributes:
        enabled: the configuration names a profiler.
        active: a recording was started and has not ended.
        running: it collects; not so during the delay.
        stopped: the last recording has ended.
        steps: steps since the start.
        active_steps: those that the recording collected.
        profiled_steps: those that all recordings of this session collected.
        files: of the last recording, by suffix.
        error: why the last recording has no files.

    Raises:
        ConfigError: the configuration is wrong.
    """

    def __init__(self, component: str, rank: int | None = None, config: object = None) -> None:
        self.config = ProfilerConfig.of(config)
        self.enabled = self.config.is_enabled
        self.active = self.running = self.stopped = False
        self.steps = self.active_steps = self.profiled_steps = 0
        self.files: dict[str, Path] = {}
        self.error: str | None = None
        self._name = component if rank is None else f"{component}.rank{rank}"
        self._run_id, self._is_named = "", False
        self._max_steps = 0
        self._profile: Any = None
        #: Sessions that share the recording of this one.
        self._guests: list[TorchProfileSession] = []

    @property
    def run_id(self) -> str:
        """How the names of the files begin."""
        return self._run_id

    def start(self, prefix: str | None = None, max_iterations: int | None = None) -> None:
        """Starts a recording; ignored while one is active.

        Args:
            prefix: how the names of this recording's files begin, instead of `run_id`.
            max_iterations: steps of this recording, instead of the configured number.

        Raises:
            RuntimeError: the session is disabled, or torch's profiler cannot begin.
        """
        if not self.enabled:
            raise RuntimeError(
                "profiler: expected profiler_config (a server: --profiler torch), got none"
            )
        if self.active:
            return
        given = prefix or self.config.run_id
        self._run_id = Path(given).name if given else time.strftime("%Y%m%d_%H%M%S")
        self._is_named = bool(given)
        count = self.config.max_iterations if max_iterations is None else max_iterations
        self._max_steps = count
        self.steps = self.active_steps = 0
        self.files, self.error = {}, None
        self.active, self.stopped = True, False
        if self.config.delay_iterations == 0:
            try:
                self._begin()
            except BaseException:
                self.active = False
                raise

    def step(self) -> None:
        """A step of the engine is over: begins a delayed recording, ends one that is long enough.

        A recording that fails ends with a message; that is no reason for the step to fail.
        """
        if not self.active:
            return
        self.steps += 1
        if self.running:
            self.active_steps += 1
            self.profiled_steps += 1
            if self.active_steps == self._max_steps:
                self.stop()
        elif self.steps >= self.config.delay_iterations:
            try:
                self._begin()
            except Exception as error:
                logger.exception("profiler: the recording is lost")
                self.error = str(error)
                self.active, self.stopped = False, True

    def stop(self) -> None:
        """Ends the recording and writes its files; nothing without one.

        What cannot be written is a warning, and `error` says why.
        """
        if not self.active:
            return
        self.active, self.stopped = False, True
        if not self.running:
            return  # it ended before its first step
        self.running = False
        count_collector(-1)
        if self._profile is None:
            return  # the owner writes
        self._end()

    def _begin(self) -> None:
        global _owner  # noqa: PLW0603 (a process has one torch profiler)
        with _lock:
            if _owner is None:
                self._profile = _started(self.config)
                _owner = self
            else:
                _owner._guests.append(self)
        self.running = True
        count_collector(1)

    def _end(self) -> None:
        """The owner's stop."""
        global _owner  # noqa: PLW0603
        profile, self._profile = self._profile, None
        guests, self._guests = self._guests, []
        with _lock:
            _owner = None
        folder = Path(self.config.torch_profiler_dir)
        run_id = self._run_id
        try:
            _stop(profile, self.config)
            folder.mkdir(parents=True, exist_ok=True)
            run_id = _free_run_id(folder, self._run_id, self._name)
            self.files = export_recording(profile, folder / f"{run_id}.{self._name}", self.config)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            logger.warning("profiler: the recording is lost: %s", self.error)
            with contextlib.suppress(OSError):
                path = folder / f"{run_id}.{self._name}.error.txt"
                path.write_text(f"{self.error}\n", encoding="utf-8")
        for guest in guests:
            guest._point_to(self, run_id)

    def _point_to(self, owner: TorchProfileSession, run_id: str) -> None:
        """Names the files of the recording that this session shared."""
        self.error = owner.error
        # The clock goes on while torch's profiler begins: its time names one recording, not two.
        is_same = self._run_id == owner._run_id or not self._is_named
        own_run = run_id if is_same else self._run_id
        folder = Path(self.config.torch_profiler_dir)
        for suffix, target in owner.files.items():
            link = folder / f"{own_run}.{self._name}.{suffix}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(os.path.relpath(target, folder))
            except OSError as error:
                logger.warning("profiler: %s: %s", link, error)
            else:
                self.files[suffix] = link


def _has_cuda(config: ProfilerConfig) -> bool:
    import torch  # noqa: PLC0415 (slow to import)

    # Nsight holds the counters of the device while it captures.
    return config.use_cuda and torch.cuda.is_available() and not _is_capturing()


def _is_capturing() -> bool:
    """Whether recordings mark the range that Nsight captures."""
    return get_flag("DIFFULEX_CUDA_PROFILER_API")


def _started(config: ProfilerConfig) -> Any:
    """A running profiler of torch."""
    import torch  # noqa: PLC0415 (slow to import)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if _has_cuda(config):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = torch.profiler.profile(
        activities=activities,
        record_shapes=config.record_shapes,
        profile_memory=config.profile_memory,
        with_stack=config.with_stack,
        with_modules=config.with_modules,
    )
    profile.start()
    if _is_capturing() and torch.cuda.is_available():
        torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
    return profile


def _stop(profile: Any, config: ProfilerConfig) -> None:
    import torch  # noqa: PLC0415 (slow to import)

    if torch.cuda.is_available():
        if _has_cuda(config):
            torch.cuda.synchronize()  # what is enqueued belongs to the recorded steps
        if _is_capturing():
            torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]
    profile.stop()


def _free_run_id(folder: Path, run_id: str, name: str) -> str:
    """`run_id`, or one with a number after it: no recording replaces another."""
    candidate, count = run_id, 1
    while any((folder / f"{candidate}.{name}.{suffix}").exists() for suffix in SUFFIXES):
        count += 1
        candidate = f"{run_id}-{count}"
    return candidate
