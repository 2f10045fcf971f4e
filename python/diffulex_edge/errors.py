# SPDX-License-Identifier: Apache-2.0
"""Errors of the edge export and of its programs, and what the runtime's error numbers mean."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING

from diffulex.errors import ConfigError, DiffulexError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["EdgeError", "ProgramError", "native_reason", "require"]

#: Meaning of the runtime's error numbers, in a user's words.
_NATIVE = {
    0x10: "an input of a shape that the program does not take",
    0x12: "an input of another type, or a value outside its range",
    0x14: "an operator that this runtime lacks (quantised embeddings need its quantised kernels)",
    0x20: "a backend that this machine lacks",
    0x22: "no access to the file",
    0x23: "a file that is no program",
}
_NUMBER = re.compile(r"(?:error|0x)[^0-9a-fx]*(?:0x)?([0-9a-f]{1,3})\b", re.IGNORECASE)


class EdgeError(DiffulexError):
    """Something went wrong on the way to a program or with one."""


class ProgramError(EdgeError):
    """A program is damaged, foreign, or computes something else than its model."""


def native_reason(error: BaseException) -> str:
    """One line for an exception of the native runtime, with its number explained."""
    text = " ".join(str(error).split())
    for found in _NUMBER.finditer(text):
        number = int(found[1], 16)
        if number in _NATIVE:
            return f"{_NATIVE[number]} (error 0x{number:x})"
    return text or type(error).__name__


def require(package: str, *, why: str = "edge") -> ModuleType:
    """Imports an optional package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise ConfigError(
            f"{why}: expected the package {name} (pip install '.[edge]' in the source directory), got none"
        ) from error
