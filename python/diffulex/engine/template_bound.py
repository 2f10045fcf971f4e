# SPDX-License-Identifier: Apache-2.0
"""A bound on what a chat template may do: templates are code of the checkpoint.

The sandbox they run in keeps them from files and objects, not from loops without an end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2

from diffulex.errors import PromptError

__all__ = ["MOST_CHARS", "bounded_rendering"]

#: Lines of a template; long conversations take some thousands.
_MOST_LINES = 1_000_000
#: Characters of a rendered conversation and of every text on the way to it.
MOST_CHARS = 1 << 26
#: Numbers and items of the expressions that jinja2 evaluates when it compiles a template.
_MOST_CONSTANT = 1 << 22
_TEMPLATE_FILE = "<template>"
_JINJA = str(Path(jinja2.__file__).parent) + os.sep
_CONSTANT_FILES = frozenset(_JINJA + name for name in ("nodes.py", "filters.py"))


class _LimitError(BaseException):
    """Not an Exception: templates are compiled by code that turns any of those into nothing."""


class _Watch:
    """Trace functions of one rendering; what they raise appears in the frame they look at."""

    def __init__(self) -> None:
        self._lines = 0
        self._chars = 0

    def tracer(self) -> Any:
        """For every call: lines count in templates alone, results in what evaluates constants."""
        # Called for thousands of frames that do not matter: one look into a table each.
        find = {_TEMPLATE_FILE: self.line, **dict.fromkeys(_CONSTANT_FILES, self.result)}.get
        return lambda frame, event, argument: find(frame.f_code.co_filename)

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        """For every line of a template, and for every piece of text that it hands out."""
        self._lines += 1
        if self._lines > _MOST_LINES:
            raise _LimitError(f"it takes more than {_MOST_LINES} steps")
        if event == "return" and isinstance(argument, str):
            self._chars += len(argument)
            if self._chars > MOST_CHARS:
                raise _LimitError(f"it writes more than {MOST_CHARS} characters")
        return self.line

    def result(self, frame: FrameType, event: str, argument: Any) -> Any:
        """For every result of a filter and of an expression of constants."""
        frame.f_trace_lines = False
        if event == "return":
            is_long = isinstance(argument, (str, list, tuple)) and len(argument) > _MOST_CONSTANT
            if is_long or (isinstance(argument, int) and abs(argument) > _MOST_CONSTANT):
                raise _LimitError(f"it has a value or length above {_MOST_CONSTANT}")
        return self.result


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """A block in which this thread renders templates.

    Steps and sizes are counted rather than seconds, so that every machine accepts the same
    conversations.

    Raises:
        PromptError: a template takes too many steps or writes too much.
    """
    before = sys.gettrace()
    sys.settrace(_Watch().tracer())
    try:
        yield
    except _LimitError as error:
        raise PromptError(f"chat template: it cannot be rendered: {error}") from None
    finally:
        sys.settrace(before)
