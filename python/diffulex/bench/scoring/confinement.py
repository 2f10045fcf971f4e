# SPDX-License-Identifier: Apache-2.0
"""What a program that a model wrote may use.

In a ``namespace`` it has no network, every directory but its own is read-only, and it sees no process
but its own; with ``rlimit`` alone only time, memory, the size of files and the number of processes are
bounded. A child of root becomes another user in both: for root the number of processes would have no
limit.
"""

from __future__ import annotations

import functools
import json
import os
import pwd
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffulex.errors import ConfigError

__all__ = ["Confinement", "confine", "end_user", "sandbox"]

_LAUNCHER = Path(__file__).with_name("code_launcher.py")
_MEMORY, _FILE_SIZE, _PROCESSES = 1 << 30, 16 << 20, 32
#: Below what systemd gives away (60001 up: homes, dynamic users) and what people's accounts reach by
#: counting up from 1000; in the 65536 ids that a container maps.
_UIDS = range(52_000, 60_000)
_END_USER = (
    "import os, sys; uid = int(sys.argv[1]); os.setgroups([]); os.setgid(uid); os.setuid(uid);"
    " os.kill(-1, 9)"
)


class Confinement(NamedTuple):
    """How one child is started: its command, and the user it becomes (None: the same)."""

    command: list[str]
    uid: int | None


def _own_threads() -> int:
    """Threads of this user, which count against the limit of its children."""
    uid, count = os.getuid(), 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            count += _threads_of(entry, uid)
    return count


def _threads_of(process: Path, uid: int) -> int:
    try:
        return len(list((process / "task").iterdir())) if process.stat().st_uid == uid else 0
    except OSError:  # it has ended meanwhile
        return 0


def _claimed_uid(slot: int) -> int:
    """A user without account and processes, whom no other evaluation on this machine uses.

    Raises:
        ConfigError: there is none.
    """
    held = _HELD_UIDS.get((os.getpid(), slot))
    if held is not None and not _has_processes(held[0]):
        return held[0]
    for uid in _UIDS:
        if _has_account(uid) or _has_processes(uid):
            continue
        # An address that ends with this process; other evaluations cannot have it meanwhile.
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0diffulex-code-{uid}")
        except OSError:
            claim.close()
            continue
        _HELD_UIDS[os.getpid(), slot] = (uid, claim)
        return uid
    raise ConfigError(f"code worker: expected a free user id from {_UIDS[0]} on, got none")


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _has_processes(uid: int) -> bool:
    return any(
        _threads_of(entry, uid) for entry in Path("/proc").iterdir() if entry.name.isdecimal()
    )


#: By process and slot: a user of ours, and what claims it.
_HELD_UIDS: dict[tuple[int, int], tuple[int, socket.socket]] = {}


def _package_folders() -> list[str]:
    """Where installed packages are, which an interpreter in isolated mode does not look for."""
    names = ("site-packages", "dist-packages")
    return [path for path in sys.path if Path(path).name in names and Path(path).is_dir()]


def _confinement(
    folder: Path, arguments: Sequence[str], seconds: float, slot: int, has_namespace: bool
) -> Confinement:
    is_root = os.geteuid() == 0
    uid = _claimed_uid(slot) if is_root else None
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    env = {"CUDA_VISIBLE_DEVICES": "", "HOME": str(folder), "TMPDIR": str(folder)}
    env["OPENBLAS_NUM_THREADS"] = "1"  # the limits count threads, and the memory of each
    packages, mounts = _package_folders(), []
    # Other users may not reach the directory the interpreter is installed in.
    is_moved = has_namespace and is_root
    if is_moved:
        moved = [str(folder / f"packages{place}") for place in range(len(packages))]
        mounts = [(os.path.realpath(sys.base_prefix), str(folder / "python"))]
        mounts += zip(packages, moved, strict=True)
        packages = moved
        for _, target in mounts:
            Path(target).mkdir()
        inner = Path(executable).relative_to(os.path.realpath(sys.base_prefix))
        executable = str(folder / "python" / inner)
        env["LD_LIBRARY_PATH"] = str(folder / "python" / "lib")
    if uid is not None:
        os.chown(folder, uid, uid)
    processes = _PROCESSES + (0 if is_root else _own_threads())
    job: dict[str, Any] = {
        "command": [executable, "-I", *arguments, *packages],
        "env": env,
        "folder": str(folder),
        "uid": uid,
        "namespace": has_namespace,
        "has_users": not is_root,
        "parent": os.getpid(),
        "mounts": mounts,
        "limits": [
            # SIGXCPU comes at the first figure; at the second SIGKILL, which says no reason.
            (resource.RLIMIT_CPU, int(seconds) + 1, int(seconds) + 2),
            (resource.RLIMIT_AS, _MEMORY, _MEMORY),
            (resource.RLIMIT_FSIZE, _FILE_SIZE, _FILE_SIZE),
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_NPROC, processes, processes),
        ],
    }
    source = _LAUNCHER.read_text(encoding="utf-8")
    return Confinement([sys.executable, "-I", "-c", source, json.dumps(job)], uid)


def _works(has_namespace: bool) -> bool:
    """Whether a child can be started so."""
    folder = Path(tempfile.mkdtemp(prefix="diffulex-code-"))
    try:
        arguments = ("-c", "open('x', 'w').close()")
        child = _confinement(folder, arguments, 5, 0, has_namespace)
        probe = subprocess.run(child.command, cwd=folder, capture_output=True, check=False)
        return probe.returncode == 0
    except (OSError, ValueError):
        return False
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def sandbox() -> str:
    """How programs are confined on this machine: ``namespace`` or ``rlimit``.

    Raises:
        ConfigError: they cannot be: root, whose children have no limit on processes, can neither make
            a namespace nor start its interpreter as another user.
    """
    if _works(has_namespace=True):
        return "namespace"
    if _works(has_namespace=False):
        return "rlimit"
    raise ConfigError(
        "code worker: expected namespaces, or an interpreter that other users can run, got"
        f" {sys.executable} for root alone"
    )


def confine(folder: Path, arguments: Sequence[str], seconds: float, slot: int) -> Confinement:
    """How to start one child in an empty directory.

    Args:
        folder: of the child alone; removed by the caller.
        arguments: of the interpreter; the folders of installed packages come after them.
        seconds: of the program; one more of the processor is allowed.
        slot: from 0 to 7, no two children at one time have the same.

    Raises:
        ConfigError: as for `sandbox`.
    """
    return _confinement(folder, arguments, seconds, slot, sandbox() == "namespace")


def end_user(uid: int) -> None:
    """Ends every process of a child's user: those that outlived its launcher."""
    if _has_processes(uid):
        command = [sys.executable, "-I", "-c", _END_USER, str(uid)]
        subprocess.run(command, capture_output=True, check=False)
