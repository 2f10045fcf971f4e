# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a command imports what it needs: one line and 130, whatever it hits."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from diffulex.interruption import ending_at_once

#: Sends SIGINT to its own process as soon as a module is looked for, and loses what follows, as modules
#: in C that import others do.
INTERRUPTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass
module = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
sys.meta_path.insert(0, Finder())
from diffulex.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("diffulex.tools.cli", ["--help"]),
        ("diffulex.tools.request_flags", ["generate", "--help"]),
        ("shtab", ["completion", "bash"]),
        ("numpy", ["generate", "Ben has 8 coins."]),
        ("numpy", ["doctor"]),
        ("numpy", ["eval", "--limit", "4"]),
        ("numpy", ["verify", "demo"]),
    ],
)
def test_an_import_is_not_survived(module: str, words: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTING, module, *words],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "interrupted\n"


def test_the_handler_is_that_of_before_again() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ending_at_once():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with ending_at_once():  # somebody has decided what it does
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_it_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def enter() -> None:
        with ending_at_once():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
