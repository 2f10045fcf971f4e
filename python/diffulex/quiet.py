# SPDX-License-Identifier: Apache-2.0
"""Keeps what native code and other packages write to standard error for the debug log."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING

from diffulex.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["quiet"]

logger = get_logger(__name__)

_STDERR = 2
#: Loggers that report harmless things as warnings.
_LOUD = ("executorch", "torchao", "coremltools", "torch.export", "torch.utils._pytree", "root")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Standard error of this process, native code included, goes to the debug log meanwhile.

    Warnings of Python are dropped. An exception passes as it is.
    """
    with _less_logging(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            saved = os.dup(_STDERR)
        except OSError:  # a process without standard error has nothing to keep quiet
            yield
            return
        with tempfile.TemporaryFile() as file:
            _flush()
            os.dup2(file.fileno(), _STDERR)
            try:
                yield
            finally:
                _flush()
                os.dup2(saved, _STDERR)
                os.close(saved)
                file.seek(0)
                for line in file.read().decode(errors="replace").splitlines():
                    if line.strip():
                        logger.debug("native: %s", line.strip())


def _flush() -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


@contextlib.contextmanager
def _less_logging() -> Iterator[None]:
    loggers = [logging.getLogger(None if name == "root" else name) for name in _LOUD]
    levels = [item.level for item in loggers]
    handlers = list(logging.root.handlers)
    for item in loggers:
        item.setLevel(logging.ERROR)
    try:
        yield
    finally:
        # logging.info() of a package gives the process a handler that repeats every later line.
        logging.root.handlers[:] = handlers
        for item, level in zip(loggers, levels, strict=True):
            item.setLevel(level)
