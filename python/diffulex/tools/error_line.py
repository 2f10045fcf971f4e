# SPDX-License-Identifier: Apache-2.0
"""The one line of a failure, and the exit code that goes with it."""

from __future__ import annotations

import errno
import sys

from diffulex.errors import OutOfPagesError

__all__ = ["USER_ERROR", "report_error"]

#: Exit code of what the user can change.
USER_ERROR = 2
_WRITE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EBADF)


def report_error(error: Exception) -> int:
    """Prints one line; 2 for what the user can change, 1 for the rest."""
    text = str(error)
    if isinstance(error, OSError) and error.errno in _WRITE_ERRORS and not error.filename:
        text = f"standard output: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        text = f"expected the package {package} (pip install {package}), got none"
    text = " ".join(text.split()) or type(error).__name__
    print(f"error: {text}", file=sys.stderr)
    is_user_error = isinstance(error, (ValueError, NotImplementedError, OutOfPagesError))
    return USER_ERROR if is_user_error else 1
