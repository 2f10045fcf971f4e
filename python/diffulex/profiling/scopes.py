# SPDX-License-Identifier: Apache-2.0
"""Named scopes, and the methods of an engine that they stand around.

Nothing of this costs an engine anything while nothing listens: the methods are the engine's own then.
A listener replaces them, on the objects of its engine alone, by ones that open a scope, and puts them
back when it ends.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

__all__ = [
    "Instrument",
    "Stage",
    "count_collector",
    "profile_scope",
    "profile_scopes_enabled",
    "record_function",
]

#: Opens the scope of a stage.
Opener = Callable[["Stage"], AbstractContextManager[object]]

_OFF: AbstractContextManager[object] = contextlib.nullcontext()
_lock = threading.Lock()
_num_collectors = 0


def count_collector(change: int) -> None:
    """A recording of this process begins (1) or ends (-1)."""
    global _num_collectors  # noqa: PLW0603 (recordings of a process share one profiler)
    with _lock:
        _num_collectors += change


def profile_scopes_enabled() -> bool:
    """Whether a recording of this process collects scopes."""
    return _num_collectors > 0


def record_function(name: str) -> AbstractContextManager[object]:
    """A scope `name` in recordings; nothing unless one collects."""
    if _num_collectors == 0:
        return _OFF
    import torch  # noqa: PLC0415 (loaded already: a recording is under way)

    return cast(
        "AbstractContextManager[object]",
        torch.profiler.record_function(name),
    )


profile_scope = record_function


class Stage(NamedTuple):
    """A method that is a stage of a step.

    Attributes:
        owner: of the method.
        method: its name.
        area: what the stage belongs to: `engine`, or the kind of decoding.
        name: of the stage.
    """

    owner: Any
    method: str
    area: str
    name: str

    @property
    def scope(self) -> str:
        """Its name in recordings."""
        return f"diffulex.{self.area}.{self.name}"


class Instrument:
    """Scopes around the stages of one engine, for as many listeners as there are.

    Args:
        stages: makes the list of them, when the first listener comes.
    """

    def __init__(self, stages: Callable[[], Iterable[Stage]]) -> None:
        self._stages = stages
        self._openers: tuple[Opener, ...] = ()
        self._wrapped: list[Stage] = []
        #: With which the stage is called whose scope is being opened.
        self.arguments: tuple[Any, ...] = ()

    @property
    def is_installed(self) -> bool:
        """Whether anything listens."""
        return bool(self._openers)

    def add(self, opener: Opener) -> None:
        """Opens the scopes of every stage by `opener` from now on. Between two steps."""
        if not self._openers:
            self._install()
        self._openers = (*self._openers, opener)

    def remove(self, opener: Opener) -> None:
        """Ends `add`; unknown openers are ignored."""
        self._openers = tuple(item for item in self._openers if item != opener)
        if not self._openers:
            self._uninstall()

    def clear(self) -> None:
        """Ends every `add`."""
        self._openers = ()
        self._uninstall()

    def _uninstall(self) -> None:
        for stage in self._wrapped:
            vars(stage.owner).pop(stage.method, None)
        self._wrapped.clear()

    def _install(self) -> None:
        for stage in self._stages():
            if stage.method in vars(stage.owner):
                continue  # a second stage of one method, or a method of the caller's own
            setattr(stage.owner, stage.method, self._around(stage))
            self._wrapped.append(stage)

    def _around(self, stage: Stage) -> Callable[..., Any]:
        method = getattr(stage.owner, stage.method)

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as scopes:
                for opener in self._openers:
                    self.arguments = args
                    scopes.enter_context(opener(stage))
                return method(*args, **kwargs)

        return run
