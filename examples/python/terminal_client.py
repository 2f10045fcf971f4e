# SPDX-License-Identifier: Apache-2.0
"""Talks to a Diffulex server from a terminal and shows the blocks while they are denoised.

    diffulex serve
    python examples/python/terminal_client.py "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?"

Without a question it converses; Ctrl-C stops an answer, /quit or Ctrl-D ends. --record saves the
last answer in the format of the page at /ui, --replay shows such a file again. Only the standard
library is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import sys
import time
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MASK = "▨"
_HELP = "/threshold X, /history on|off, /quit"
# Shape and colour: underlined is final, reversed is new, plain may still change.
_STYLES = {"mask": "\x1b[2m", "draft": "\x1b[36m", "new": "\x1b[7;33m", "final": "\x1b[4;32m"}
_RESET = "\x1b[0m"


class ServerError(Exception):
    """The server refused or failed."""


class Client:
    """The routes of a server that this program uses."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._texts: dict[int, str] = {}

    def _open(self, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data, headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(_message(error.read(), error.code)) from error
        except urllib.error.URLError as error:
            raise ServerError(f"{self._url}: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self._url}: {error}") from error

    def model(self) -> str:
        """Name of the first model."""
        with self._open("v1/models") as answer:
            return str(json.load(answer)["data"][0]["id"])

    def info(self) -> dict[str, Any]:
        """Block size, strategy and the rest of what the server says of itself."""
        with self._open("server_info") as answer:
            result: dict[str, Any] = json.load(answer)
        return result

    def texts(self, ids: list[int]) -> list[str]:
        """Text of each id by itself; every id is asked for once."""
        missing = sorted({token for token in ids if token not in self._texts})
        if missing:
            body = {"tokens": missing, "return_token_strs": True}
            with self._open("detokenize", body) as answer:
                self._texts.update(zip(missing, json.load(answer)["token_strs"], strict=True))
        return [self._texts[token] for token in ids]

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Frames of a stream; closing the iterator closes the connection, which ends the request."""
        with self._open("v1/chat/completions", body) as lines:
            for line in _until_lost(lines):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                frame = json.loads(data)
                if "error" in frame:
                    raise ServerError(str(frame["error"]["message"]))
                yield frame
        raise ServerError("the stream ended before [DONE]: the connection was lost")


def _until_lost(lines: Any) -> Iterator[bytes]:
    """The lines of an answer; a broken connection is the end of them."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        yield from lines


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"


@dataclass
class Recording:
    """Snapshots of one answer, in the format that the page saves."""

    meta: dict[str, Any]
    frames: list[dict[str, Any]] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    text: str = ""
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    prompt_len: int = 0
    mask_token_id: int | None = None
    dropped: int = 0
    edits: int = 0
    block_starts: list[list[int]] = field(default_factory=list)  # [block id, start]

    def push(self, snapshot: dict[str, Any], seconds: float) -> None:
        """Adds a snapshot: it replaces the draft from its offset to the end."""
        offset, ids = snapshot["token_offset"], snapshot["token_ids"]
        self.mask_token_id = snapshot.get("mask_token_id")
        self.prompt_len = snapshot["absolute_start"] - offset
        before = self.draft[offset : offset + len(ids)]
        self.edits += sum(
            old not in (new, self.mask_token_id) for old, new in zip(before, ids, strict=False)
        )
        self.draft[offset:] = ids
        blocks = [
            {**block, "start": max(0, block["start"] - self.prompt_len),
             "end": block["end"] - self.prompt_len}
            for block in snapshot.get("blocks") or ()
        ]  # fmt: skip
        # A snapshot names only the part of a block that its span covers.
        starts = dict(map(tuple, self.block_starts))
        for block in blocks:
            starts[block["id"]] = min(block["start"], starts.get(block["id"], block["start"]))
        self.block_starts = [[block_id, start] for block_id, start in starts.items()]
        self.frames.append(
            {
                "t": 1e3 * seconds, "nfe": snapshot["nfe"], "offset": offset, "ids": ids,
                "committed": snapshot.get("committed", offset),
                "conf": snapshot.get("confidences"), "blocks": blocks or None,
                "edits": self.edits, "tps": snapshot.get("engine_decode_tps"),
            }
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Writes the file that the page and `--replay` read."""
        data = {"format": "diffulex-recording", "version": 1, **vars(self)}
        path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Reads such a file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            kind = (data.pop("format", None), data.pop("version", None))
            if kind != ("diffulex-recording", 1):
                raise ServerError(f"{path}: expected a recording of version 1, got {kind}")
            recording = cls(**data)
        except (ValueError, AttributeError, TypeError) as error:
            raise ServerError(f"{path}: expected a recording, got {error}") from error
        for frame in recording.frames:
            # The page starts with masks before it knows their id.
            frame["ids"] = [recording.mask_token_id if x is None else x for x in frame["ids"]]
        return recording


class Painter:
    """Draws drafts: in a terminal in place, else one line per step."""

    def __init__(self, *, is_terminal: bool, has_color: bool) -> None:
        self._is_terminal = is_terminal
        self._has_color = has_color
        self._num_lines = 0
        self._before: list[int] = []

    def draw(self, recording: Recording, draft: list[int], committed: int, head: str) -> None:
        """Shows a draft under a line of numbers."""
        lines = [head]
        starts = sorted({0, *(start for _, start in recording.block_starts)})
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(draft)], strict=True)):
            if start < len(draft):
                cells = self._cells(recording, draft, range(start, min(end, len(draft))), committed)
                lines.append(f"{number + 1:>3} │{cells}")
        self._before = list(draft)
        if not self._is_terminal:
            print(f"{head} │" + " │".join(line.split("│", 1)[1] for line in lines[1:]))
            return
        size = shutil.get_terminal_size()
        # What is above the screen cannot be redrawn: the last blocks are what moves.
        lines = [head, *lines[1:][-(size.lines - 3) :]]
        self.clear()
        for line in lines:
            print(_fit(line, size.columns - 1))
        sys.stdout.flush()
        self._num_lines = len(lines)

    def clear(self) -> None:
        """Takes the last drawing away."""
        if self._is_terminal and self._num_lines:
            sys.stdout.write(f"\x1b[{self._num_lines}A\x1b[J")
        self._num_lines = 0

    def _cells(
        self, recording: Recording, draft: list[int], positions: range, committed: int
    ) -> str:
        parts = []
        for position in positions:
            token = draft[position]
            old = self._before[position] if position < len(self._before) else None
            style, text = "draft", recording.texts.get(str(token), "…")
            if token == recording.mask_token_id:
                style, text = "mask", _MASK
            elif token != old:
                style = "new"
            elif position < committed:
                style = "final"
            text = text.replace("\n", "↵").replace("\t", "⇥")
            text = "".join(char if char.isprintable() else "�" for char in text)
            parts.append(f"{_STYLES[style]}{text}{_RESET}" if self._has_color else text)
        return "".join(parts)


def _fit(line: str, columns: int) -> str:
    """The line cut to the width of the terminal; escape sequences take none."""
    kept, width, index = [], 0, 0
    while index < len(line):
        if line[index] == "\x1b":
            end = line.index("m", index) + 1
            kept.append(line[index:end])
            index = end
            continue
        char = line[index]
        width += 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if width > columns:
            return "".join(kept) + _RESET
        kept.append(char)
        index += 1
    return "".join(kept)


def _numbers(frame: dict[str, Any], draft: list[int], mask: int | None) -> str:
    decided = len(draft) - draft.count(mask) if mask is not None else len(draft)
    nfe = frame["nfe"]
    rate = f"{decided / nfe:.1f}" if nfe else "no"
    return f"forward {nfe}, {decided} of {len(draft)} decided, {rate} per forward"


def answer(
    client: Client, body: dict[str, Any], recording: Recording, painter: Painter
) -> Recording:
    """Streams one answer and draws it; KeyboardInterrupt stops it on the server, too."""
    started = time.monotonic()
    with contextlib.closing(client.chat(body)) as frames:
        try:
            for frame in frames:
                _take(client, recording, frame, time.monotonic() - started, painter)
        except KeyboardInterrupt:
            recording.finish_reason = "stopped"
    painter.clear()
    return recording


def _take(
    client: Client, recording: Recording, frame: dict[str, Any], seconds: float, painter: Painter
) -> None:
    if frame.get("event") == "buffer_snapshot":
        recording.push(frame, seconds)
        last = recording.frames[-1]
        texts = client.texts(last["ids"])
        recording.texts.update(zip(map(str, last["ids"]), texts, strict=True))
        head = _numbers(last, recording.draft, recording.mask_token_id)
        painter.draw(recording, recording.draft, last["committed"], head)
    for choice in frame.get("choices") or ():
        recording.text += choice.get("delta", {}).get("content") or ""
        recording.finish_reason = choice.get("finish_reason") or recording.finish_reason
    if frame.get("usage"):
        recording.usage = frame["usage"]
        recording.meta["endTime"] = 1e3 * seconds


def replay(recording: Recording, painter: Painter, steps_per_second: float) -> None:
    """Shows a recording again, step by step."""
    for frame in recording.frames:
        # Before its span a draft is committed, and so the same as in the end.
        draft = [*recording.draft[: frame["offset"]], *frame["ids"]]
        head = _numbers(frame, draft, recording.mask_token_id)
        painter.draw(recording, draft, frame["committed"], head)
        time.sleep(1 / steps_per_second)
    painter.clear()


def summary(recording: Recording) -> str:
    """One line of numbers about a finished answer."""
    usage = recording.usage
    if not usage:
        return f"[{recording.finish_reason or 'unfinished'}]"
    seconds = recording.meta.get("endTime", 0) / 1e3
    return (
        f"[{usage['completion_tokens']} tokens, {usage.get('nfe', '?')} forwards, "
        f"{usage.get('tpf') or 0:.2f} per forward, {seconds:.2f} s, "
        f"{recording.edits} edits, {recording.finish_reason}]"
    )


class Conversation:
    """Questions and answers with one server."""

    def __init__(self, options: argparse.Namespace, painter: Painter) -> None:
        self._client = Client(options.url, options.api_key)
        self._options = options
        self._painter = painter
        self._model = self._client.model()
        self._turns: list[dict[str, str]] = []

    def ask(self, question: str) -> None:
        """One turn, from question to summary."""
        options = self._options
        turn = {"role": "user", "content": question}
        system = [{"role": "system", "content": options.system}] if options.system else []
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [*system, *(self._turns if options.history else []), turn],
            "stream": True,
            "stream_mode": "both",
            "stream_options": {"include_usage": True},
            "denoise_detail": True,
            "temperature": options.temperature,
        }
        for name in ("max_tokens", "max_nfe", "seed", "stop"):
            if getattr(options, name) is not None:
                body[name] = getattr(options, name)
        if options.threshold is not None:
            body["decoding"] = {"accept_threshold": options.threshold}
        meta = {"model": self._model, "question": question, "request": body}
        recording = answer(self._client, body, Recording(meta), self._painter)
        print(recording.text)
        print(summary(recording), file=sys.stderr)
        if recording.finish_reason != "stopped":
            self._turns += [turn, {"role": "assistant", "content": recording.text}]
        if options.record is not None:
            recording.save(options.record)

    def run(self) -> None:
        """Reads questions and commands until the end of input."""
        print(f"{self._model} at {self._options.url}; {_HELP}", file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line == "/quit":
                return
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self.ask(line)
            except ServerError as error:
                print(f"error: {error}", file=sys.stderr)

    def _command(self, line: str) -> None:
        name, _, value = line.partition(" ")
        if name == "/threshold" and _is_share(value):
            self._options.threshold = float(value)
        elif name == "/history" and value in ("on", "off"):
            self._options.history = value == "on"
        else:
            raise ServerError(f"expected {_HELP}, got {line!r}")


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", help="asked once; default: a conversation")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default=os.environ.get("DIFFULEX_API_KEY"))
    parser.add_argument("--system", help="system message")
    parser.add_argument("--history", action="store_true", help="send the earlier turns along")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--max-nfe", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", help="ends the answer; may be repeated")
    parser.add_argument("--threshold", type=float, help="acceptance: 1 is careful, 0 is fast")
    parser.add_argument("--record", type=Path, metavar="FILE", help="save the last answer")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="show a saved answer")
    parser.add_argument("--speed", type=float, default=5.0, help="steps per second of a replay")
    options = parser.parse_args()
    if not options.speed > 0:
        parser.error(f"--speed: expected more than 0, got {options.speed}")
    is_terminal = sys.stdout.isatty()
    painter = Painter(
        is_terminal=is_terminal, has_color=is_terminal and "NO_COLOR" not in os.environ
    )
    try:
        if options.replay is not None:
            recording = Recording.load(options.replay)
            replay(recording, painter, options.speed)
            print(recording.text)
            print(summary(recording), file=sys.stderr)
        elif options.question:
            Conversation(options, painter).ask(options.question)
        else:
            Conversation(options, painter).run()
    except (ServerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
