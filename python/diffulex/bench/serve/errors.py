# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between the load generator and an endpoint."""

from __future__ import annotations

from diffulex.errors import DiffulexError

__all__ = ["EndpointError", "RequestError"]


class EndpointError(DiffulexError):
    """The endpoint cannot be measured: it is down, or refuses what is asked."""


class RequestError(Exception):
    """One request failed.

    Attributes:
        kind: class of the failure, for counting: `connect`, `timeout`, `protocol`, `truncated`,
            `stream_error` or `http_<status>`.
        status: HTTP status, None without an answer.
        retry_after_s: what the server asked for, if it did.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.retry_after_s = retry_after_s
