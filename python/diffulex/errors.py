# SPDX-License-Identifier: Apache-2.0
"""Exceptions a user of the package may meet, beyond Python's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffulex_ext import OutOfPagesError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DiffulexError",
    "OutOfPagesError",
    "PromptError",
]


class DiffulexError(Exception):
    """Base of the errors this package defines."""


class ConfigError(DiffulexError, ValueError):
    """A setting is unknown, out of range, unsupported or contradicts another one."""


class CheckpointError(DiffulexError, ValueError):
    """A model directory cannot be found, read or used."""


class PromptError(DiffulexError, ValueError):
    """A prompt cannot be served: empty, too long or with ids outside the vocabulary."""


def __getattr__(name: str) -> object:
    # The class belongs to the compiled module; importing it here would make `import diffulex`
    # load the shared library.
    if name == "OutOfPagesError":
        from diffulex_ext import OutOfPagesError  # noqa: PLC0415

        return OutOfPagesError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
