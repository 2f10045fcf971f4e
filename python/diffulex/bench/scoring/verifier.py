# SPDX-License-Identifier: Apache-2.0
"""Symbolic equality by the package math-verify, in a process that can be ended.

Parsing what a model wrote may take for ever; a thread cannot be ended, a process can.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import select
import subprocess
import sys
from pathlib import Path

__all__ = ["math_backend", "verify"]

_CHILD = Path(__file__).with_name("verifier_child.py")
_SECONDS = 5.0
_START_SECONDS = 60.0
_children: list[subprocess.Popen[str]] = []


def math_backend() -> str:
    """What compares answers whose normalised texts differ: ``math-verify`` or ``normalize`` alone."""
    return "math-verify" if importlib.util.find_spec("math_verify") else "normalize"


def _ask(child: subprocess.Popen[str], pair: tuple[str, str], seconds: float) -> bool | None:
    """The answer of a child; None if there is none in time."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(pair) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    if not select.select([child.stdout], [], [], seconds)[0]:
        return None
    line = child.stdout.readline()
    return bool(json.loads(line)) if line else None


def _start() -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the program that asks
    )
    if _ask(child, ("1", "1"), _START_SECONDS) is None:
        child.kill()
        child.wait()
        raise RuntimeError("math-verify: expected its process to start, got no answer from it")
    return child


def _stop() -> None:
    while _children:
        child = _children.pop()
        child.kill()
        child.communicate()


atexit.register(_stop)


def verify(gold: str, predicted: str) -> bool:
    """Whether the two are the same value; False without the package, and after five seconds.

    Raises:
        RuntimeError: the package is there and cannot be used.
    """
    if math_backend() == "normalize":
        return False
    if not _children:
        _children.append(_start())
    answer = _ask(_children[0], (gold, predicted), _SECONDS)
    if answer is None:
        _stop()
    return bool(answer)
