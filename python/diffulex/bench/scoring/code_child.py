# SPDX-License-Identifier: Apache-2.0
"""The child that runs one program against its tests; started as a file, imports nothing of ours.

It reads a job as JSON from the standard input: ``nonce``, ``code``, ``tests`` (statements, or pairs of
input and expected output with ``method`` stdio). The verdict goes to the file descriptor of its first
argument (the others are folders of installed packages), one line that starts with the nonce, so that a program which prints or writes at random cannot
forge one. One that searches this interpreter's memory can: the tests measure models, not attackers.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from types import CodeType
from typing import Any


def run_test(namespace: dict[str, Any], test: str) -> str | None:
    """Runs one test; the reason of its failure, or None."""
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), namespace)
    except BaseException as error:
        return reason_of(error)
    return None


def reason_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, AssertionError):
        return "assertion"
    if isinstance(error, SyntaxError):
        return "syntax"
    return "exception"


def run_function(job: dict[str, Any]) -> str | None:
    namespace: dict[str, Any] = {"__name__": "candidate"}
    try:
        program = compile(job["code"], "<candidate>", "exec", dont_inherit=True)
    except BaseException as error:
        return reason_of(error)
    try:
        exec(program, namespace)
    except BaseException as error:
        return reason_of(error)
    reasons = (run_test(namespace, test) for test in job["tests"])
    return next((reason for reason in reasons if reason is not None), None)


def run_stdio(job: dict[str, Any]) -> str | None:
    try:
        program = compile(job["code"], "<candidate>", "exec", dont_inherit=True)
    except BaseException as error:
        return reason_of(error)
    outcomes = (run_pair(program, pair) for pair in job["tests"])
    return next((reason for reason in outcomes if reason is not None), None)


def run_pair(program: CodeType, pair: Sequence[str]) -> str | None:
    """Runs a program on one input and compares what it prints, word by word.

    Files take the places of the descriptors, as a shell has them: a program may read and write by
    number, and find the buffers of the streams.
    """
    kept = [os.dup(number) for number in (0, 1)]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(pair[0].encode())
        given.seek(0)
        os.dup2(given.fileno(), 0)
        os.dup2(printed.fileno(), 1)
        try:
            reason = run_with_streams(program)
        finally:
            for number, copy in enumerate(kept):
                os.dup2(copy, number)
                os.close(copy)
        if reason is not None:
            return reason
        printed.seek(0)
        words = printed.read().decode(errors="replace").split()
    return None if words == pair[1].split() else "assertion"


def run_with_streams(program: CodeType) -> str | None:
    real = sys.stdout
    with open(0, encoding="utf-8", closefd=False) as sys.stdin:
        buffer = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
        sys.stdout = output = io.TextIOWrapper(buffer, encoding="utf-8")
        try:
            exec(program, {"__name__": "__main__"})
        except SystemExit:
            pass  # how many programs of this kind end; what they printed is what counts
        except BaseException as error:
            return reason_of(error)
        finally:
            for stream in (sys.stdout, output, real):
                flush(stream)
            sys.stdout = real
    return None


def flush(stream: Any) -> None:
    """Writes what a stream holds; a program may have closed it, or put something else there."""
    with contextlib.suppress(Exception):
        stream.flush()


def main() -> None:
    verdict = int(sys.argv[1])
    sys.path += sys.argv[2:]
    job = json.loads(sys.stdin.buffer.read())
    nonce = job.pop("nonce")
    sys.stdin = io.StringIO("")
    pid = os.getpid()
    reason = run_stdio(job) if job["method"] == "stdio" else run_function(job)
    if os.getpid() != pid:  # a copy the program made of itself
        os._exit(1)
    flush(sys.stdout)
    os.write(verdict, (nonce + " " + (reason or "pass") + "\n").encode())
    os._exit(0)


if __name__ == "__main__":
    main()
