# SPDX-License-Identifier: Apache-2.0
"""How examples/python/terminal_client.py takes what goes wrong: one line, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "python" / "terminal_client.py"


class _BrokenServer(BaseHTTPRequestHandler):
    """Knows its model, and breaks off in the middle of every answer."""

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "broken"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        question = self.rfile.read(int(self.headers["Content-Length"]))
        if b"silent" in question:
            return  # the connection ends without an answer
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n')


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _BrokenServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        input=text, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("question", ["silent", "broken off"])
def test_lost_connections_are_one_line(url: str, question: str) -> None:
    done = run("--url", url, question)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_conversation_survives_them(url: str) -> None:
    done = run("--url", url, text="silent\nbroken off\n/quit\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == 2


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"format": "diffulex-recording", "version": 2}',
        '{"format": "diffulex-recording", "version": 1}',
    ],
)
def test_files_that_are_no_recordings(tmp_path: Path, content: str) -> None:
    path = tmp_path / "recording.json"
    path.write_text(content, encoding="utf-8")
    done = run("--replay", str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {path}: expected a recording")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("speed", ["0", "-1", "nan"])
def test_replays_go_forwards(speed: str) -> None:
    done = run("--replay", "none.json", "--speed", speed)
    assert done.returncode == 2
    assert "--speed: expected more than 0" in done.stderr
