# SPDX-License-Identifier: Apache-2.0
"""Exceptions a user of the package may meet, beyond Python's own."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DiffulexError",
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
    """A prompt cannot be served: empty, too long or with ids outside the vocabulary."""


class SamplingParamsError(DiffulexError, ValueError):
    """A parameter of a request is out of range or of another type."""


class UnknownParameterError(SamplingParamsError, TypeError):
    """A request has no parameter of this name."""


class OutOfPagesError(DiffulexError, RuntimeError):
    """The page pool could never hold a request, whatever else runs."""
