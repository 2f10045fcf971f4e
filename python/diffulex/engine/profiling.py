# SPDX-License-Identifier: Apache-2.0
"""The torch profiler behind /start_profile and /stop_profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffulex.errors import ConfigError
from diffulex.log import get_logger

__all__ = ["Profiler"]

logger = get_logger(__name__)

_KEYS = frozenset(
    {
        "profiler",
        "torch_profiler_dir",
        "record_shapes",
        "profile_memory",
        "with_stack",
        "delay_iterations",
        "max_iterations",
    }
)


class Profiler:
    """Records steps on request and writes one trace file per recording.

    Args:
        config: `torch_profiler_dir` and, optionally, `record_shapes`, `profile_memory`,
            `with_stack`, `delay_iterations` (steps to skip first) and `max_iterations` (0: no
            limit); None: profiling is off.

    Raises:
        ConfigError: an unknown key, or no directory.
    """

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        self._config = None if config is None else dict(config)
        self._profile: Any = None
        self._prefix = ""
        self._delay = self._left = 0
        self._is_recording = False
        if self._config is None:
            return
        unknown = sorted(set(self._config) - _KEYS)
        if unknown:
            raise ConfigError(f"profiler_config: expected known keys, got {', '.join(unknown)}")
        if not self._config.get("torch_profiler_dir"):
            raise ConfigError("profiler_config: expected a torch_profiler_dir, got none")

    def start(self, prefix: str | None) -> dict[str, Any]:
        """Starts a recording.

        Raises:
            RuntimeError: profiling is off, or a recording is under way.
        """
        import torch  # noqa: PLC0415 (slow to import)

        config = self._config
        if config is None:
            raise RuntimeError("profiler: expected a server with --profiler torch, got one without")
        if self._profile is not None:
            raise RuntimeError("profiler: expected no recording under way, got one")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            record_shapes=bool(config.get("record_shapes")),
            profile_memory=bool(config.get("profile_memory")),
            with_stack=bool(config.get("with_stack")),
        )
        self._prefix = Path(prefix).name if prefix else "diffulex"
        self._delay = int(config.get("delay_iterations") or 0)
        self._left = int(config.get("max_iterations") or 0) or -1
        if self._delay == 0:
            try:
                self._begin()
            except BaseException:
                self._profile = None
                raise
        return {"directory": str(config["torch_profiler_dir"])}

    def count_step(self) -> None:
        """A step is over: begins a delayed recording, ends one that is long enough.

        A recording that fails ends; that is no reason for the step to fail.
        """
        if self._profile is not None:
            self._guard(self._advance)

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:
            logger.exception("profiler: the recording is lost")
            self._profile, self._is_recording = None, False

    def _advance(self) -> None:
        if not self._is_recording:
            self._delay -= 1
            if self._delay <= 0:
                self._begin()
            return
        self._left -= 1
        if self._left == 0:
            self.stop()

    def stop(self) -> dict[str, Any]:
        """Ends the recording and writes its file.

        Raises:
            RuntimeError: there is none.
        """
        if self._profile is None:
            raise RuntimeError("profiler: expected a recording under way, got none")
        profile, self._profile = self._profile, None
        if not self._is_recording:
            return {"trace": None}
        self._is_recording = False
        profile.stop()
        assert self._config is not None
        directory = Path(self._config["torch_profiler_dir"])
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self._prefix}-{time.time_ns()}.json"
        profile.export_chrome_trace(str(path))
        logger.info("profile written: %s", path)
        return {"trace": str(path)}

    def close(self) -> None:
        """Ends a recording that is still running."""
        if self._profile is not None:
            self._guard(self.stop)

    def _begin(self) -> None:
        self._profile.start()
        self._is_recording = True
