# SPDX-License-Identifier: Apache-2.0
"""The log of a benchmark program."""

from __future__ import annotations

import logging

from diffulex.log import configure, get_logger

__all__ = ["get_logger", "setup_logger"]


def setup_logger(
    name: str = "diffulex.bench", level: str = "info", log_file: str | None = None
) -> logging.Logger:
    """Sends the package's log to standard error, and to a file if one is named.

    Raises:
        ConfigError: an unknown level.
    """
    configure(level=level, file=log_file)
    return get_logger(name)
