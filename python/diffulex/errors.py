# SPDX-License-Identifier: Apache-2.0
"""Exceptions a user of the package may meet, beyond Python's own."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DiffulexError",
    "EngineDeadError",
    "OutOfPagesError",
    "PromptError",
    "SamplingParamsError",
    "UnknownParameterError",
]


class DiffulexError(Exception):
    """Base of the errors this package defines."""


class ConfigError(DiffulexError, ValueError):
    """A setting is unknown, out of range, unsupported or contradicts another one."""


class CheckpointError(DiffulexError, ValueError):
    """A model directory cannot be found, read or used."""


class PromptError(DiffulexError, ValueError):
    """A prompt cannot be served: empty, too long or with ids outside the vocabulary.

    Attributes:
        code: what clients of a server read.
    """

    def __init__(self, message: str = "", *, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class SamplingParamsError(DiffulexError, ValueError):
    """A parameter of a request is out of range or of another type."""


class UnknownParameterError(SamplingParamsError, TypeError):
    """A request has no parameter of this name."""


class EngineDeadError(DiffulexError, RuntimeError):
    """An engine, or the last process of one, is gone; every later call raises it as well.

    Attributes:
        cause: why.
        rank: of the process that died; of several replicas the number of the last one.
        pid: its process id.
        device: where it ran.
        last_lines: what it last wrote to its standard error.
        is_hearsay: an exchange with another process failed, of which that one may know the cause.
    """

    def __init__(
        self,
        cause: str,
        *,
        rank: int = 0,
        pid: int | None = None,
        device: str = "",
        last_lines: tuple[str, ...] = (),
        is_hearsay: bool = False,
    ) -> None:
        super().__init__(cause)
        self.cause = cause
        self.rank = rank
        self.pid = pid
        self.device = device
        self.last_lines = last_lines
        self.is_hearsay = is_hearsay


class OutOfPagesError(DiffulexError, RuntimeError):
    """The page pool could never hold a request, whatever else runs."""
