# SPDX-License-Identifier: Apache-2.0
"""Whole servers over real sockets, with a fake engine: how they start, fail and end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pytest

import slow_engine
from diffulex.server import launch
from diffulex.server.args import parse_args
from diffulex.server.http.http_server import HttpServer

HERE = Path(__file__).parent
#: Generous: a process that starts may take twenty seconds on a busy host. Nothing is measured.
TIMEOUT_S = 120.0


class Server:
    """One server process and what it left on disk."""

    def __init__(self, directory: Path, *flags: str, factory: str = "make_slow") -> None:
        self.directory = directory
        self.engine_log = directory / "engine.log"
        self.log = directory / "server.log"
        self.temporary = directory / "t"
        self.temporary.mkdir()
        command = [sys.executable, str(HERE / "serve_fake.py"), factory, "--model", "demo"]
        command += ["--host", "127.0.0.1", "--port", "0", *flags]
        environment = {
            **os.environ,
            "DIFFULEX_TEST_LOG": str(self.engine_log),
            "TMPDIR": str(self.temporary),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def logged(self, word: str) -> list[str]:
        if not self.engine_log.exists():
            return []
        return [line for line in self.engine_log.read_text().splitlines() if line.startswith(word)]

    def until(self, condition):
        end = time.monotonic() + TIMEOUT_S
        while not (value := condition()):
            assert time.monotonic() < end, f"expected the condition to hold, got\n{self.text()}"
            time.sleep(0.02)
        return value

    def ready(self, count: int = 1) -> str:
        def url():
            found = re.findall(r"READY url=(\S+)", self.text())
            return found[-1] if len(found) >= count else None

        return self.until(url)

    def leave_while_it_waits(self, url: str, body: dict) -> None:
        """A client that leaves as soon as its request, which has no answer yet, is in the engine."""
        count, text = len(self.logged("add")), json.dumps(body)
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), TIMEOUT_S) as client:
            head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n{text}".encode())
            self.until(lambda: len(self.logged("add")) > count)

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def backend_pid(self) -> int:
        return int(self.logged("start")[-1].split()[1])

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(TIMEOUT_S)


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:
        directory = tmp_path

        def make(*flags, **options):
            nonlocal directory
            server = Server(directory, *flags, **options)
            stack.callback(server.end)
            directory = directory / "next"
            directory.mkdir()
            return server

        yield make


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=TIMEOUT_S)


def post(url: str, body: dict) -> httpx.Response:
    return httpx.post(url, json=body, timeout=TIMEOUT_S)


class OpenStream:
    """A streaming client in a thread."""

    def __init__(self, url: str, **fields) -> None:
        body = {"prompt": "hi", "max_tokens": 50_000, "ignore_eos": True, "stream": True}
        self.body = {**body, "stream_mode": "block_append", **fields}
        self.url = url
        self.frames: list[str] = []
        self.leave = threading.Event()
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{self.url}/generate", json=self.body, timeout=TIMEOUT_S) as got,
        ):
            for line in got.iter_lines():
                if line.startswith("data: "):
                    self.frames.append(line.removeprefix("data: "))
                if self.leave.is_set():
                    return

    def error(self) -> dict:
        self.thread.join(TIMEOUT_S)
        assert self.frames[-1] == "[DONE]"
        return json.loads(self.frames[-2])


def test_life(start):
    """Ready, serve, clients that leave, drain, nothing left."""
    server = start("--drain-timeout", str(TIMEOUT_S))
    url = server.ready()
    health = get(f"{url}/health")
    assert (health.status_code, health.json()["status"]) == (200, "ready")
    body = {"prompt": "hi", "max_tokens": 8, "ignore_eos": True}
    assert post(f"{url}/generate", body).json()["text"] == "ABCDEFGH"

    # A client that leaves while it streams.
    stream = OpenStream(url)
    server.until(lambda: stream.frames)
    stream.leave.set()
    server.until(lambda: len(server.logged("abort")) == 1)
    # A client that leaves while it waits.
    server.leave_while_it_waits(url, {**body, "max_tokens": 50_000})
    server.until(lambda: len(server.logged("abort")) == 2)
    assert len(set(server.logged("abort"))) == 2

    # The drain lets requests finish and takes no more.
    stream = OpenStream(url, max_tokens=400)
    server.until(lambda: stream.frames)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: "draining: 1 requests" in server.text() or stream.frames[-1] == "[DONE]")
    assert json.loads(stream.error() and stream.frames[-2])["event"] == "final"
    assert server.wait() == 0
    assert server.logged("exit")
    assert len(server.logged("abort")) == 2
    assert list(server.temporary.iterdir()) == []
    assert is_gone(server.backend_pid())


def test_drain_ends_at_its_deadline(start):
    for seconds in (4, 16, 64):
        server = start("--drain-timeout", str(seconds))
        url = server.ready()
        stream = OpenStream(url)
        server.until(lambda stream=stream: stream.frames)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.TransportError):  # a busy host: over before it was looked at
            server.until(lambda url=url: get(f"{url}/health").status_code == 503)
            refused = post(f"{url}/generate", {"prompt": "x"})
            break
        stream.thread.join(TIMEOUT_S)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] in ("draining", "server_shutdown")
    assert int(refused.headers["retry-after"]) >= 1
    assert stream.error()["code"] == "server_shutdown"
    assert server.wait() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_second_signal(start, number, code):
    server = start("--drain-timeout", "1000")
    stream = OpenStream(server.ready())
    server.until(lambda: stream.frames)
    server.process.send_signal(number)
    server.until(lambda: "draining" in server.text())
    server.process.send_signal(number)
    assert server.wait() == code
    stream.thread.join(TIMEOUT_S)
    assert "Traceback" not in server.text()
    assert " ERROR " not in server.text()
    server.until(lambda: is_gone(server.backend_pid()))
    assert list(server.temporary.iterdir()) == []


def test_killed_backend(start):
    server = start()
    url = server.ready()
    streams = [OpenStream(url) for _ in range(2)]
    server.until(lambda: all(stream.frames for stream in streams))
    os.kill(server.backend_pid(), signal.SIGKILL)
    killed_at = time.monotonic()
    for stream in streams:
        assert stream.error()["code"] == "engine_dead"
    assert get(f"{url}/health").status_code == 503
    # The bound is two seconds, and the server ends two seconds later; loaded machines get more.
    assert time.monotonic() - killed_at < 30
    assert server.wait() == 1
    assert "error: the process was killed by SIGKILL" in server.text()
    assert list(server.temporary.iterdir()) == []


def test_restarted_backend(start):
    server = start("--restart-backend")
    url = server.ready()
    failed = post(f"{url}/generate", {"prompt": [*b"crash"]})
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "engine_dead"
    server.ready(2)
    body = {"prompt": "hi", "max_tokens": 4, "ignore_eos": True}
    assert post(f"{url}/generate", body).json()["text"] == "ABCD"
    assert get(f"{url}/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_killed_frontend(start):
    server = start()
    stream = OpenStream(server.ready())
    server.until(lambda: stream.frames)
    server.process.kill()
    server.wait()
    server.until(lambda: is_gone(server.backend_pid()))
    assert server.logged("exit")
    assert list(server.temporary.iterdir()) == []
    stream.thread.join(TIMEOUT_S)


def test_frontend_killed_while_the_model_loads(start):
    server = start(factory="make_never")
    server.until(lambda: server.logged("start"))
    server.process.kill()
    server.wait()
    server.until(lambda: is_gone(server.backend_pid()))
    assert list(server.temporary.iterdir()) == []


def test_ready_is_the_last_word_of_the_start(start):
    server = start()
    server.ready()
    text = server.text()
    assert text.index("Application startup complete") < text.index("READY url=")


def test_port_in_use(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start("--port", str(port))
        assert server.wait() == 1
    reason = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert server.text() == f"diffulex serve: error: {reason}\n"
    assert not server.logged("start")


def test_backend_that_does_not_start(start):
    server = start(factory="make_broken")
    assert server.wait() == 1
    reason = "ValueError: checkpoint: expected weights, got none"
    assert server.text() == f"diffulex serve: error: backend failed to start: {reason}\n"
    assert list(server.temporary.iterdir()) == []


def test_backend_for_the_front_end_of_another_program(tmp_path, monkeypatch):
    log = tmp_path / "engine.log"
    monkeypatch.setenv("DIFFULEX_TEST_LOG", str(log))
    args = parse_args(["--model", "demo"])
    addresses = [f"ipc://{tmp_path}/{name}.ipc" for name in ("command", "event")]
    process = launch.start_backend(args, *addresses, slow_engine.make_slow)
    try:
        assert process.is_alive()
        assert "start" in log.read_text()
    finally:
        process.terminate()
        process.join(TIMEOUT_S)
    assert process.exitcode is not None
    with pytest.raises(RuntimeError, match="failed to start: ValueError: checkpoint: expected"):
        launch.start_backend(args, *addresses, slow_engine.make_broken)


def test_early_bind(start):
    server = start("--early-bind", factory="make_never")
    server.until(lambda: server.logged("start") and "startup complete" in server.text())
    (url,) = re.findall(r"listening on (\S+),", server.text())
    health = get(f"{url}/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "starting")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    server.until(lambda: is_gone(server.backend_pid()))


def test_sigterm_while_the_model_loads(start):
    server = start(factory="make_never")
    server.until(lambda: server.logged("start"))
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "SIGKILL" not in server.text()
    assert is_gone(server.backend_pid())
    assert list(server.temporary.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signal_while_one_process_loads(start, number, code):
    server = start("--inproc", factory="make_never")
    server.until(lambda: server.logged("start"))
    server.process.send_signal(number)
    assert server.wait() == code
    assert server.text() == ""


def test_sigterm_between_ready_and_serving(tmp_path, monkeypatch):
    """Nobody but the launcher handles signals before the HTTP server does."""
    monkeypatch.setenv("DIFFULEX_TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(HttpServer, "run", lambda server: signal.raise_signal(signal.SIGTERM))
    previous = signal.getsignal(signal.SIGTERM)
    args = parse_args(["--model", "demo", "--port", "0"])
    assert launch.serve(args, slow_engine.make_slow) == 0
    assert signal.getsignal(signal.SIGTERM) is previous
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert is_gone(int((tmp_path / "log").read_text().split()[1]))


@pytest.fixture
def short_path():
    """Short enough for sockets, which `tmp_path` is not in each of several processes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


class TestCheapChecks:
    """What ends with one line before anything is loaded."""

    @pytest.mark.parametrize(
        ("flags", "reason"),
        [
            (["--model", "/no/such/model"], "/no/such/model"),
            (["--chat-template", "/no/such/file"], "--chat-template: cannot read /no/such/file"),
            (
                ["--chat-template", "{% for m in messages %}\n{{ m. }}"],
                "--chat-template: chat template: line 2: ",
            ),
            (["--uds", "/no/such/directory/socket"], "cannot listen on /no/such/directory/socket"),
        ],
    )
    def test_one_line(self, flags, reason, capfd, monkeypatch):
        monkeypatch.setattr(launch, "_backend", None)  # must not be reached
        assert launch.serve(parse_args(["--port", "0", *flags])) == 1
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("diffulex serve: error: ")
        assert reason in line

    def test_addresses(self, tmp_path, caplog):
        args = parse_args(["--port", "8000"])
        command, event = launch.resolve_zmq_addrs(args, tmp_path)
        assert command == f"ipc://{tmp_path}/diffulex-{os.getpid()}-8000-command.ipc"
        assert event == f"ipc://{tmp_path}/diffulex-{os.getpid()}-8000-event.ipc"
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(command.removeprefix("ipc://"))
        assert launch.default_ipc_addr(args, "command", tmp_path) == command
        assert not Path(command.removeprefix("ipc://")).exists()
        own = ["--zmq-command-addr", "tcp://10.0.0.1:5", "--zmq-event-addr", "tcp://127.0.0.1:6"]
        assert launch.resolve_zmq_addrs(parse_args(own)) == (own[1], own[3])
        assert "tcp://10.0.0.1:5: anybody who reaches" in caplog.text
        assert "tcp://127.0.0.1:6: anybody" not in caplog.text

    def test_long_directories(self, tmp_path):
        deep = tmp_path / ("x" * 90)
        addr = launch.default_ipc_addr(parse_args(["--port", "8000"]), "command", deep)
        assert addr == f"ipc://@diffulex-{os.getpid()}-8000-command"

    def test_private_directory(self):
        directory = launch.ipc_directory()
        try:
            assert directory.stat().st_mode & 0o777 == 0o700
        finally:
            launch.remove_ipc_directory(directory)
        assert not directory.exists()

    def test_a_file_system_without_locks_is_passed_over(self, tmp_path, monkeypatch):
        def flock(file, operation):
            if str(tmp_path) in os.readlink(f"/proc/self/fd/{file}"):
                raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(launch.fcntl, "flock", flock)
        directory = launch.ipc_directory()
        launch.remove_ipc_directory(directory)
        assert tmp_path not in directory.parents
        assert not list(tmp_path.iterdir())

    def test_directories_of_killed_processes_are_removed(self, short_path, monkeypatch):
        """One that lives keeps its own, and what nobody has claimed yet is left alone."""
        monkeypatch.setattr(tempfile, "tempdir", str(short_path))
        program = """
import sys
from diffulex.server.launch import ipc_directory
print(ipc_directory(), flush=True)
sys.stdin.read()
"""
        unclaimed = short_path / "diffulex-unclaimed"
        unclaimed.mkdir()
        owners = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TMPDIR": str(short_path)},
                text=True,
            )
            for _ in range(2)
        ]
        try:
            killed, alive = (Path(owner.stdout.readline().strip()) for owner in owners)
            (killed / "diffulex-1-2-command.ipc").touch()
            owners[0].kill()
            owners[0].wait()
            own = launch.ipc_directory()
            assert not killed.exists()
            assert {path.name for path in short_path.iterdir()} == {
                *(unclaimed.name, alive.name, own.name)
            }
            again = launch.ipc_directory()
            assert own.exists()
            for directory in (own, again):
                launch.remove_ipc_directory(directory)
        finally:
            for owner in owners:
                owner.kill()
                owner.communicate()
