# SPDX-License-Identifier: Apache-2.0
"""What a program cannot reach: processes outside, and life after its verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diffulex.bench.scoring import code_worker, confinement
from diffulex.bench.scoring.code_worker import CodeJob, run_job
from diffulex.bench.scoring.confinement import sandbox

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives children another user")
#: Outlives its parent in a session of its own, under a name that can be found.
DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", "{seconds}"])
    os._exit(0)
os.wait()
x = 1
"""


#: Becomes another process that can be found, beside a daemon.
SLEEPER = DAEMON.format(seconds="86314") + 'os.execv("/bin/sleep", ["sleep", "86315"])\n'
#: Runs it, confined as the test that starts it has it.
EVALUATION = """
import os
from diffulex.bench.scoring import confinement
from diffulex.bench.scoring.code_worker import CodeJob, run_job
os.geteuid = lambda: {uid}
confinement.sandbox = lambda: {mode!r}
run_job(CodeJob({code!r}, ("assert x == 1",), seconds=60.0))
"""


def processes_with(text: bytes) -> list[int]:
    """Processes of this machine with `text` in their command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if text in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def becomes(wanted: Callable[[], bool], seconds: float) -> bool:
    """Whether something is so within some seconds."""
    limit = time.monotonic() + seconds
    while not wanted():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def command_of(seconds: str) -> bytes:
    return f"sleep\0{seconds}\0".encode()


def running(seconds: str) -> bool:
    """Whether `sleep seconds` is a process of this machine; it may take a moment to go."""
    return not becomes(lambda: not processes_with(command_of(seconds)), 2)


def after_a_kill(mode: str) -> tuple[list[int], list[str]]:
    """Kills an evaluation within a program: the processes and files that are left of it."""
    code = EVALUATION.format(uid=os.geteuid(), mode=mode, code=SLEEPER)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # for the user that the program becomes
        # The launcher's command names the folder.
        texts = (folder.encode(), command_of("86314"), command_of("86315"))

        def left() -> list[int]:
            return [pid for text in texts for pid in processes_with(text)]

        environment = {**os.environ, "TMPDIR": folder}
        evaluation = subprocess.Popen([sys.executable, "-c", code], env=environment)
        try:
            assert becomes(lambda: all(map(processes_with, texts)), 60)
            evaluation.kill()
            evaluation.wait()
            becomes(lambda: not left() and not os.listdir(folder), 20)
            return left(), os.listdir(folder)
        finally:
            evaluation.kill()
            evaluation.wait()
            for pid in left():
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=["namespace", "rlimit"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How programs are confined; those of root as far as that works here."""
    name = str(request.param)
    if not confinement._works(has_namespace=name == "namespace"):
        pytest.skip(f"{name}: children cannot be started so on this machine")
    monkeypatch.setattr(confinement, "sandbox", lambda: name)
    return name


@pytest.fixture(params=["namespace", "rlimit"])
def mode_of_one_user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As `mode`, where the program has the user of the evaluation."""
    name = str(request.param)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if not confinement._works(has_namespace=name == "namespace"):
        pytest.skip(f"{name}: children of one user cannot be started so on this machine")
    monkeypatch.setattr(confinement, "sandbox", lambda: name)
    return name


def test_a_namespace_of_one_user_knows_no_other(mode_of_one_user: str, tmp_path: Path) -> None:
    path = Path("/")  # of root
    if os.getuid() == 0:
        path = tmp_path / "file"
        path.touch()
        os.chown(path, 4242, -1)
    owner = 65534 if mode_of_one_user == "namespace" else path.stat().st_uid
    test = f"import os\nassert os.stat({str(path)!r}).st_uid == {owner}"
    assert run_job(CodeJob("", (test,))).reason == "pass"


def test_a_namespace_shows_its_own_processes_alone() -> None:
    if sandbox() != "namespace":
        pytest.skip("no namespaces can be made on this machine")
    test = (
        "import os\nassert os.getppid() == 1\n"
        "assert len([name for name in os.listdir('/proc') if name.isdigit()]) <= 2"
    )
    assert run_job(CodeJob("", (test,))).reason == "pass"


@pytest.mark.usefixtures("mode")
def test_what_leaves_its_session_is_ended() -> None:
    assert run_job(CodeJob(DAEMON.format(seconds="86311"), ("assert x == 1",))).reason == "pass"
    assert not running("86311")


@pytest.mark.slow
@pytest.mark.usefixtures("mode_of_one_user")
def test_what_leaves_its_session_is_ended_without_a_user_alone() -> None:
    assert run_job(CodeJob(DAEMON.format(seconds="86312"), ("assert x == 1",))).reason == "pass"
    assert not running("86312")


@pytest.mark.slow
@pytest.mark.usefixtures("mode_of_one_user")
def test_what_left_its_session_is_ended_at_the_end_of_the_time() -> None:
    code = DAEMON.format(seconds="86313") + "while True: pass\n"
    assert run_job(CodeJob(code, ("assert x == 1",), seconds=0.5)).reason == "timeout"
    assert not running("86313")


@pytest.mark.usefixtures("mode")
def test_a_program_is_ended_soon_after_its_time() -> None:
    """By its launcher: an evaluation that has to kill a launcher waits for long before."""
    job = CodeJob("import time; time.sleep(60)", ("pass",), seconds=0.5)
    start = time.monotonic()
    assert run_job(job).reason == "timeout"
    limit = 0.5 + code_worker._START_SECONDS + code_worker._END_SECONDS / 2
    assert time.monotonic() - start < limit


def test_a_killed_evaluation_leaves_nothing(mode: str) -> None:
    assert after_a_kill(mode) == ([], [])


@pytest.mark.slow
def test_a_killed_evaluation_leaves_nothing_of_one_user(mode_of_one_user: str) -> None:
    assert after_a_kill(mode_of_one_user) == ([], [])


@pytest.mark.parametrize("victim", ["os.kill(os.getppid(), 9)", "os.killpg(0, 9)"])
@pytest.mark.usefixtures("mode_of_one_user")
def test_a_program_cannot_end_the_evaluation(victim: str) -> None:
    code = f"import os, time\n{victim}\ntime.sleep(60)\n"
    assert run_job(CodeJob(code, ("assert x == 1",), seconds=1.0)).reason in ("exit", "timeout")


@NEEDS_ROOT
def test_users_are_outside_of_reserved_ranges() -> None:
    uid = confinement._claimed_uid(0)
    # 60001 and up are given away by systemd; a container maps ids below 65536.
    assert 1000 <= uid < 60_000
    assert confinement._claimed_uid(0) == uid
    assert confinement._claimed_uid(1) != uid


@NEEDS_ROOT
def test_a_user_with_processes_is_refused() -> None:
    uid = confinement._claimed_uid(0)
    foreign = subprocess.Popen(["sleep", "60"], user=uid)
    try:
        while not confinement._has_processes(uid):
            time.sleep(0.01)
        assert confinement._claimed_uid(0) != uid
        assert run_job(CodeJob("x = 1", ("assert x == 1",))).reason == "pass"
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


@NEEDS_ROOT
def test_two_evaluations_have_different_users() -> None:
    program = "from diffulex.bench.scoring import confinement as c; print(c._claimed_uid(0))"
    mine = {confinement._claimed_uid(slot) for slot in range(8)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) not in mine
