# SPDX-License-Identifier: Apache-2.0
"""Runs programs that a model wrote, each in a child with bounded time, memory, files and processes.

The child has a minimal environment, an empty directory, an interpreter in isolated mode and its own
session; `diffulex.bench.scoring.confinement` says what else it gives up.
"""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffulex.bench.scoring.confinement import confine, end_user
from diffulex.errors import ConfigError

__all__ = ["CodeJob", "Verdict", "check_imports", "run_job", "run_jobs"]

_CHILD = Path(__file__).with_name("code_child.py")
_MAX_OUTPUT = 8 << 10
#: The interpreter itself, with a small margin; not charged to the program.
_START_SECONDS = 2.0
_IMPORT_SECONDS = 30.0
#: What the launcher may take to end what it started.
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CodeJob:
    """A program and its tests.

    Attributes:
        code: the program.
        tests: statements that raise where the program is wrong, or pairs of input and output.
        method: ``function`` or ``stdio``.
        seconds: time for the program and all tests.
    """

    code: str
    tests: tuple[Any, ...]
    method: str = "function"
    seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a job: ``pass``, ``invalid_item``, or why it failed (``exit``, ``timeout``,
    ``memory``, ``assertion``, ``syntax``, ``exception``), and what it printed."""

    reason: str
    stdout: str = ""
    stderr: str = ""

    @property
    def is_passed(self) -> bool:
        return self.reason == "pass"


def run_job(job: CodeJob, slot: int = 0) -> Verdict:
    """Runs one program to its verdict.

    Args:
        job: the program; without tests it is ``invalid_item`` and nothing is run.
        slot: no two jobs at one time have the same.

    Raises:
        ConfigError: the child cannot be confined here.
    """
    if not job.tests:
        return Verdict("invalid_item")
    folder = Path(tempfile.mkdtemp(prefix="diffulex-code-"))
    try:
        return _run_in(folder, job, slot)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(folder: Path, job: CodeJob, slot: int) -> Verdict:
    reading, writing = os.pipe()
    nonce = secrets.token_hex(16)
    # The child's text travels with the command: another user need not be able to read this package.
    source = _CHILD.read_text(encoding="utf-8")
    child = confine(folder, ("-c", source, str(writing)), job.seconds, slot)
    process = subprocess.Popen(
        child.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        pass_fds=(writing,),
        start_new_session=True,
    )
    os.close(writing)
    request = {"nonce": nonce, "code": job.code, "tests": job.tests, "method": job.method}
    try:
        is_over, texts = _converse(process, reading, json.dumps(request).encode(), job.seconds)
    finally:
        _end(process, child.uid)
        os.close(reading)
    reason = _reason(texts["verdict"], nonce, is_over, process.returncode)
    return Verdict(reason, texts["stdout"], texts["stderr"])


def _converse(
    process: subprocess.Popen[bytes], reading: int, request: bytes, seconds: float
) -> tuple[bool, dict[str, str]]:
    """Sends the job and collects what comes back; whether the child ended in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(request)
        process.stdin.close()
    limit = time.monotonic() + seconds + _START_SECONDS
    kept = {"stdout": b"", "stderr": b"", "verdict": b""}
    with selectors.DefaultSelector() as selector:
        pipes = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr"}
        pipes[reading] = "verdict"
        for pipe, name in pipes.items():
            selector.register(pipe, selectors.EVENT_READ, name)
        # The verdict's pipe closes with the child and all its copies; what it printed may wait.
        while pipes and not kept["verdict"].endswith(b"\n"):
            remaining = limit - time.monotonic()
            events = selector.select(remaining) if remaining > 0 else []
            if not events:
                return False, _texts(kept)
            for key, _ in events:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fd)
                    del pipes[key.fd]
                kept[key.data] = (kept[key.data] + data)[:_MAX_OUTPUT]
    return True, _texts(kept)


def _texts(kept: Mapping[str, bytes]) -> dict[str, str]:
    return {name: data.decode(errors="replace") for name, data in kept.items()}


def _end(process: subprocess.Popen[bytes], uid: int | None) -> None:
    """Ends the child with everything it started, also in other sessions."""
    process.terminate()  # the launcher ends its children before itself
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    if uid is not None:
        end_user(uid)


def _reason(verdict: str, nonce: str, is_over: bool, code: int | None) -> str:
    words = verdict.splitlines()[-1].split() if verdict.strip() else []
    if len(words) == 2 and words[0] == nonce:
        return words[1]
    if not is_over or code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return "timeout"
    return "exit"


def _imported(test: str) -> set[str]:
    """Packages that a test imports before anything else is done."""
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names} - {"", *sys.stdlib_module_names}


def check_imports(jobs: Iterable[CodeJob]) -> None:
    """Raises ConfigError where tests import a package that a confined program cannot."""
    functions = [job for job in jobs if job.method == "function"]
    for name in sorted(
        {name for job in functions for test in job.tests for name in _imported(test)}
    ):
        if not run_job(CodeJob("", (f"import {name}",), seconds=_IMPORT_SECONDS)).is_passed:
            raise ConfigError(
                f"code worker: expected the package {name}, which the tests import, got none that a"
                " confined program can import"
            )


def run_jobs(jobs: Sequence[CodeJob]) -> list[Verdict]:
    """The verdicts of many programs, in order, a few at a time.

    Raises:
        ConfigError: as for `run_job` and `check_imports`.
    """
    check_imports(jobs)
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    free = list(range(workers))

    def run(job: CodeJob) -> Verdict:
        slot = free.pop()
        try:
            return run_job(job, slot)
        finally:
            free.append(slot)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, jobs))
