# SPDX-License-Identifier: Apache-2.0
"""Completion of commands and flags in a shell."""

from __future__ import annotations

import argparse

__all__ = ["script"]


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The text that a shell reads to complete what `parser` takes.

    Args:
        parser: of the whole command line.
        shell: `bash`, `zsh` or `tcsh`.
    """
    import shtab  # noqa: PLC0415 (only this command needs it)

    return str(shtab.complete(parser, shell=shell))
