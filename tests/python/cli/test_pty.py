# SPDX-License-Identifier: Apache-2.0
"""The command line on a terminal: denoising frames and Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time

import pytest

from diffulex.checkpoint.resolve import demo_dir
from diffulex.engine.terminal import MASK_CHAR

pytestmark = pytest.mark.skipif(
    not (demo_dir() / "model.safetensors").is_file(), reason="the bundled model is not in this tree"
)

QUESTION = (
    "Tom has 3 bags with 4 marbles each. Then he buys 5 more marbles. "
    "How many marbles does Tom have now?"
)
NEW = "\x1b[1;32m"
CTRL_C = b"\x03"


class Terminal:
    """A command whose three standard streams are one terminal."""

    def __init__(self, *arguments: str) -> None:
        self.text = ""
        self._main, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "diffulex", *arguments],
            stdin=other, stdout=other, stderr=other, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (no threads)
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm", "PYTHONUTF8": "1"},
        )  # fmt: skip
        os.close(other)

    def read_until(self, text: str, seconds: float = 90.0) -> str:
        """What was shown up to the next `text`, which must come."""
        return self._read(lambda: text in self.text, seconds, text)

    def read_all(self) -> str:
        return self._read(lambda: False, 30.0, "")

    def _read(self, is_done, seconds: float, text: str) -> str:
        data, limit = b"", time.monotonic() + seconds
        self.text = ""
        while not is_done():
            left = limit - time.monotonic()
            assert left > 0, f"expected {text!r} on the terminal, got {self.text!r}"
            if not select.select([self._main], [], [], left)[0]:
                continue
            try:
                piece = os.read(self._main, 4096)
            except OSError:
                piece = b""  # the other end is closed
            if not piece:
                assert not text, f"expected {text!r} on the terminal, got {self.text!r}"
                break
            data += piece
            self.text = data.decode(errors="ignore")
        return self.text

    def write(self, data: bytes) -> None:
        os.write(self._main, data)

    def close(self) -> int:
        if self.process.poll() is None:
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        os.close(self._main)
        return self.process.wait()


def test_masks_come_first_and_new_tokens_are_highlighted():
    terminal = Terminal("generate", "--show-denoising", "--frame-delay", "0.01", QUESTION)
    text = terminal.read_all()
    assert terminal.close() == 0
    assert MASK_CHAR in text
    assert NEW in text
    assert text.index(MASK_CHAR) < text.index(NEW)
    # A block of masks is shown, then its tokens as new, and only then they settle.
    assert MASK_CHAR * 8 in text
    frames = text.split("\x1b[J")
    assert any(NEW + "3*4=12" in frame for frame in frames), text
    assert "#### 17" in frames[-1] or text.rstrip().find("#### 17") > 0


def test_interrupted_answer_returns_to_the_prompt_and_the_prompt_ends():
    terminal = Terminal("chat", "--show-denoising", "--frame-delay", "5")
    terminal.read_until("> ")
    terminal.write(QUESTION.encode() + b"\n")
    terminal.read_until(MASK_CHAR)
    terminal.write(CTRL_C)
    shown = terminal.read_until("> ")
    assert "interrupted\r\n" in shown
    assert "Traceback" not in shown
    # The prompt appears before the line editor listens.
    time.sleep(0.5)
    terminal.write(CTRL_C)
    assert "interrupted" in terminal.read_all()
    assert terminal.close() == 130


def test_interrupted_generation_ends_the_line():
    terminal = Terminal("generate", "--show-denoising", "--frame-delay", "5", QUESTION)
    terminal.read_until(MASK_CHAR)
    terminal.write(CTRL_C)
    shown = terminal.read_all()
    assert shown.endswith("\r\ninterrupted\r\n"), shown
    assert terminal.close() == 130


def test_a_line_says_what_takes_so_long_and_goes_when_it_is_there():
    terminal = Terminal("generate", QUESTION)
    text = terminal.read_all()
    assert terminal.close() == 0
    assert text.startswith("loading demo ...")
    before, _, after = text.partition("\r\x1b[K")
    assert "#### 17" in after
    assert "loading" not in after
    assert "#### 17" not in before
