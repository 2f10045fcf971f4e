# SPDX-License-Identifier: Apache-2.0
"""Standard streams of a command: closed ones on entry, unwritable ones on exit."""

from __future__ import annotations

import contextlib
import io
import os
import sys

_NUM_STREAMS = 3


def open_standard_streams() -> None:
    """Makes the streams usable, whatever the caller closed.

    A closed error stream is replaced by nowhere, a closed input stays None. Characters that the
    output encoding lacks become question marks.

    Raises:
        OSError: standard output is closed.
    """
    for number in range(_NUM_STREAMS):
        # Files opened later must not land on the number of a standard stream.
        if not _is_open(number):
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the whole run)
    if sys.stdout is None:
        raise OSError("standard output: expected an open stream, got a closed one")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def close_standard_output() -> None:
    """Drops output that cannot be written: Python would complain about it again at exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
