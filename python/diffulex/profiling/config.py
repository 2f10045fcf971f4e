# SPDX-License-Identifier: Apache-2.0
"""Settings of a recording: the value of `profiler_config`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffulex.errors import ConfigError

__all__ = ["ProfilerConfig"]

_PROFILERS = (None, "torch")
_COUNTS = ("delay_iterations", "max_iterations")
_SWITCHES = ("record_shapes", "profile_memory", "with_stack", "with_modules", "use_cuda")


@dataclass(frozen=True, slots=True)
class ProfilerConfig:
    """How steps are recorded.

    Attributes:
        profiler: `torch`, or None: recordings are off.
        torch_profiler_dir: where the files go; absolute once checked.
        record_shapes: input shapes of every op.
        profile_memory: memory that ops allocate and free.
        with_stack: Python stacks of ops.
        with_modules: the module hierarchy of ops.
        use_cuda: record the device as well, where there is one.
        delay_iterations: steps to skip after the start.
        max_iterations: steps after which a recording ends by itself; 0: none.
        run_id: how the names of the files begin; None: date and time.

    Raises:
        ConfigError: a negative count, an unknown profiler, no directory.
    """

    profiler: str | None = None
    torch_profiler_dir: str = ""
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_modules: bool = False
    use_cuda: bool = True
    delay_iterations: int = 0
    max_iterations: int = 0
    run_id: str | None = None

    def __post_init__(self) -> None:
        if self.profiler not in _PROFILERS:
            raise _illegal("profiler", "torch or None", self.profiler)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _illegal(name, "True or False", getattr(self, name))
        for name in _COUNTS:
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise _illegal(name, "an int >= 0", count)
        if self.run_id is not None and not isinstance(self.run_id, str):
            raise _illegal("run_id", "a text or None", self.run_id)
        directory: object = self.torch_profiler_dir
        if not isinstance(directory, (str, os.PathLike)):
            raise _illegal("torch_profiler_dir", "a directory", directory)
        if self.profiler is not None and not os.fspath(directory):
            raise ConfigError("profiler_config: expected a torch_profiler_dir, got none")
        if os.fspath(directory):
            absolute = os.path.abspath(os.path.expanduser(os.fspath(directory)))
            object.__setattr__(self, "torch_profiler_dir", absolute)

    @classmethod
    def of(cls, value: object) -> ProfilerConfig:
        """The settings in a mapping or in the attributes of an object; None: off.

        A mapping with a directory and without `profiler` means torch's.

        Raises:
            ConfigError: as the constructor, and for an unknown key or another type.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        names = [item.name for item in dataclasses.fields(cls)]
        if not isinstance(value, Mapping):
            given = {name: getattr(value, name) for name in names if hasattr(value, name)}
            if not given:
                raise ConfigError(f"profiler_config: expected a mapping, got {value!r}")
            return cls(**given)
        unknown = sorted(str(key) for key in value if key not in names)
        if unknown:
            raise ConfigError(
                f"profiler_config: expected known keys ({', '.join(names)}), got"
                f" {', '.join(unknown)}"
            )
        return cls(**{"profiler": "torch", **value})

    @property
    def is_enabled(self) -> bool:
        """Whether recordings can be made."""
        return self.profiler is not None

    def as_dict(self) -> dict[str, Any]:
        """The settings by name."""
        return dataclasses.asdict(self)


def _illegal(name: str, expected: str, value: object) -> ConfigError:
    return ConfigError(f"profiler_config.{name}: expected {expected}, got {value!r}")
