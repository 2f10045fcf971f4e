# SPDX-License-Identifier: Apache-2.0
"""How requests and operations of the frontend fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffulex.wire.messages import ServingError

__all__ = ["BackendUnavailable", "ClientDisconnected", "OperationFailed", "RequestFailed"]


class ClientDisconnected(RuntimeError):  # noqa: N818 (a documented name)
    """The client is gone; its request has been aborted."""


class RequestFailed(RuntimeError):  # noqa: N818
    """A request ended with an error event, which is `error`."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(error.message)
        self.error = error


class OperationFailed(RuntimeError):  # noqa: N818
    """The backend refused an operation."""


class BackendUnavailable(RuntimeError):  # noqa: N818
    """There is no backend to ask."""
