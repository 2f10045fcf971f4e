# SPDX-License-Identifier: Apache-2.0
"""A bound on what a chat template may do: templates are code of the checkpoint.

The sandbox they run in keeps them from files and objects, not from loops without an end or from
values without a bound.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
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
#: Characters and items of all values that operators make, one after the other.
_MOST_MADE = 1 << 32
#: Bits of a product or power; a sum grows by one at most.
_MOST_BITS = 1024
#: Numbers and items of the expressions that jinja2 evaluates when it compiles a template.
_MOST_CONSTANT = 1 << 22
_TEMPLATE_FILE = "<template>"
_JINJA = str(Path(jinja2.__file__).parent) + os.sep
_CONSTANT_FILES = frozenset(_JINJA + name for name in ("nodes.py", "filters.py"))
#: What makes values while a template runs: the operators and the two forms of ``~``.
_MAKERS = {
    _JINJA + "sandbox.py": frozenset({"call_binop"}),
    _JINJA + "runtime.py": frozenset({"str_join", "markup_join"}),
}
_FROM_STRING = jinja2.Environment.from_string.__code__


class _LimitError(BaseException):
    """Not an Exception: templates are compiled by code that turns any of those into nothing."""


def _check_size(size: int) -> None:
    if size > MOST_CHARS:
        raise _LimitError(f"it has a value or length above {MOST_CHARS}")


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise _LimitError(f"it has a value or length above 2**{_MOST_BITS}")


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        _check_size(len(left) + len(right))
    return left + right


def _multiply(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for items, count in ((left, right), (right, left)):
        if isinstance(items, (str, list, tuple)) and isinstance(count, int):
            _check_size(len(items) * count)
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
        _check_bits(left.bit_length() * right)
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    """A remainder, or a text with its conversions, each at most as long as its width or value."""
    if isinstance(left, str):
        values = right if isinstance(right, tuple) else (right,)
        if isinstance(right, Mapping):
            values = tuple(right.values())
        texts = [len(value) for value in values if isinstance(value, str)]
        widths = [abs(value) for value in values if isinstance(value, int)] if "*" in left else []
        # More digits than these are a width beyond the limit anyway.
        widths += [int(digits[:12]) for digits in re.findall(r"\d+", left)]
        _check_size(len(left) + left.count("%") * max(texts + widths, default=0))
    return left % right


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": _add,
    "*": _multiply,
    "**": _power,
    "%": _modulo,
}


def _bound_operators(environment: Any) -> None:
    """Lets the templates that a sandbox compiles look at operands before they compute."""
    plain_call = environment.call

    def call(context: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The numbers that a method of a text gets may be widths.
        if isinstance(getattr(target, "__self__", None), str):
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    _check_size(value)
        made = plain_call(context, target, *args, **kwargs)
        if isinstance(made, (str, list, tuple)):
            _check_size(len(made))
        return made

    environment.call = call
    environment.intercepted_binops = frozenset(_OPERATORS)
    environment.binop_table.update(_OPERATORS)


class _Watch:
    """Trace functions of one rendering; what they raise appears in the frame they look at."""

    def __init__(self) -> None:
        self._lines = 0
        self._chars = 0
        self._made = 0

    def tracer(self) -> Any:
        """For every call: lines count in templates alone, results in what makes values."""
        # Called for thousands of frames that do not matter: one look into a table each.
        made = self.made
        find = {
            _TEMPLATE_FILE: self.line,
            **dict.fromkeys(_CONSTANT_FILES, self.result),
            **dict.fromkeys(_MAKERS, made),
        }.get

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            code = frame.f_code
            if code is _FROM_STRING:
                _bound_operators(frame.f_locals["self"])
            local = find(code.co_filename)
            if local is made and code.co_name not in _MAKERS[code.co_filename]:
                return None
            return local

        return trace

    def made(self, frame: FrameType, event: str, argument: Any) -> Any:
        """For every result of an operator."""
        frame.f_trace_lines = False
        if event == "return" and isinstance(argument, (str, list, tuple)):
            _check_size(len(argument))
            self._made += len(argument)
            if self._made > _MOST_MADE:
                raise _LimitError(f"it makes more than {_MOST_MADE} characters and items")
        return self.made

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
        PromptError: a template takes too many steps, writes too much or makes too large a value.
    """
    before = sys.gettrace()
    sys.settrace(_Watch().tracer())
    try:
        yield
    except _LimitError as error:
        raise PromptError(f"chat template: it cannot be rendered: {error}") from None
    finally:
        sys.settrace(before)
