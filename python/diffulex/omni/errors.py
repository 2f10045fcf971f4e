# SPDX-License-Identifier: Apache-2.0
"""Errors of the image engine."""

from __future__ import annotations

from diffulex.errors import CheckpointError, ConfigError, DiffulexError

__all__ = [
    "EngineDeadError",
    "ModelLoadError",
    "OmniError",
    "QueueFull",
    "RequestAborted",
    "RequestError",
    "RequestTimeout",
    "UnsupportedFeatureError",
    "UnsupportedModelError",
    "WorkerDeadError",
    "WorkerError",
]


class OmniError(DiffulexError):
    """Base of the errors of the image engine."""


class RequestError(OmniError, ValueError):
    """A request cannot be served as it is; the engine stays usable."""


class RequestAborted(OmniError):  # noqa: N818 (a request that ends as asked is no error)
    """A request was stopped by its callback; the engine stays usable."""


class UnsupportedModelError(OmniError, ConfigError):
    """No pipeline is registered for the model."""


class UnsupportedFeatureError(OmniError, ConfigError):
    """The model's pipeline cannot do what a setting or a request asks for."""


class ModelLoadError(OmniError, CheckpointError):
    """A model's files are missing, incomplete or do not fit its classes."""


class RequestTimeout(OmniError):  # noqa: N818 (as its neighbours)
    """A request took longer than its `timeout_s`, or `request_timeout_s`, and was stopped."""

    @classmethod
    def after(cls, seconds: float, name: str) -> RequestTimeout:
        """The error of a limit of so many seconds."""
        return cls(f"request: expected an end within {seconds:g} s ({name}), got none")


class QueueFull(OmniError):  # noqa: N818
    """As many requests wait as `max_queue_size` allows."""


class WorkerError(OmniError):
    """A request failed in the workers in a way that none of the other errors describes.

    The workers stay usable. Attributes: `rank`, `kind` (name of the exception), `trace` (its text).
    """

    def __init__(
        self, message: str = "", *, rank: int = 0, kind: str = "", trace: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.trace = trace


class WorkerDeadError(OmniError):
    """A worker process is gone or out of step: all are ended. `restart` of the engine starts new ones.

    Attributes: `rank`, and `exitcode` where the process has ended by itself.
    """

    def __init__(self, message: str = "", *, rank: int = 0, exitcode: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode


#: Its documented name.
EngineDeadError = WorkerDeadError
