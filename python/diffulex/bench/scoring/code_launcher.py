# SPDX-License-Identifier: Apache-2.0
"""Gives up what a program that a model wrote must not have, and becomes its interpreter.

Started as a file, so that it is alone in its process: namespaces and users are changed here, which a
process with threads cannot do between fork and exec. The first argument is a JSON object: ``command``,
``env``, ``folder``, ``uid`` (or null), ``limits`` ([number, soft, hard]), ``mounts`` ([directory,
where to make it visible] pairs), ``namespace`` (whether to enter one), ``has_users`` (whether that
has users of its own, as only root can do without), ``parent`` (the evaluation).

In a namespace three processes follow each other: this one waits outside; the first process inside sees
no other process and takes all of them with it when it ends; the second one inside becomes the program.
Without a namespace the program is a child of this process, which also adopts what the program leaves.
All of them end with the evaluation, even where that is killed, and `folder` goes with them.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_RDONLY = 2, 4, 8, 1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _RDONLY = 442, -100, 0x8000, 1

#: What this process waits for; it receives them when it asks, and at no other time.
_AWAITED = {signal.SIGTERM, signal.SIGCHLD}

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(source: str, target: str, flags: int, kind: str | None = None) -> None:
    name = None if kind is None else kind.encode()
    _checked(_libc.mount(source.encode(), target.encode(), name, ctypes.c_ulong(flags), None))


def _mount_proc() -> None:
    """Shows the processes of the namespace alone.

    Some containers may not mount it; an empty directory then hides the processes outside.
    """
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    try:
        _mount("proc", "/proc", flags, "proc")
    except OSError:
        _mount("none", "/proc", flags | _MS_RDONLY, "tmpfs")


def _set_read_only(path: str, is_read_only: bool) -> None:
    attributes = _MountAttributes(**{"set" if is_read_only else "clear": _RDONLY})
    flags = _AT_RECURSIVE if is_read_only else 0
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    pointer = ctypes.byref(attributes)
    _checked(_libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, pointer, size))


def _enter_namespace(has_users: bool) -> None:
    """No network and, for children, no process outside."""
    uid, gid = os.geteuid(), os.getegid()
    spaces = _NEWNET | _NEWIPC | _NEWPID
    _checked(_libc.unshare(spaces | (_NEWUSER if has_users else 0)))
    if has_users:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")


def _mount_all(folder: str, mounts: list[list[str]]) -> None:
    """No writing outside `folder`. The launcher keeps its own view, and with it /proc."""
    _checked(_libc.unshare(_NEWNS))
    _mount("none", "/", _MS_REC | _MS_PRIVATE)
    _mount(folder, folder, _MS_BIND)
    _set_read_only("/", True)
    _set_read_only(folder, False)
    for source, target in mounts:
        _mount(source, target, _MS_BIND)
    _mount_proc()
    os.chdir(folder)


def _wait_for(child: int, options: int = 0) -> int | None:
    """Waits for a child, and for what else it left to this process; its status as a shell has it.

    None: it has not ended, and WNOHANG is among the options.
    """
    ended, status = os.waitpid(-1, options)
    while ended not in (0, child):
        ended, status = os.waitpid(-1, options)
    if ended == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _parent_of(process: Path) -> int:
    try:
        # The name, which may hold anything, stands in parentheses before the state and the parent.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):  # it has ended meanwhile
        return 0


def _end_children() -> None:
    """Ends every child; what they started becomes ours, and is ended in its turn."""
    while True:
        own = os.getpid()
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and _parent_of(process) == own:
                os.kill(int(process.name), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _end_with(parent: int, number: int) -> None:
    """Asks for a signal when the thread that started this process is gone.

    A change of user or of capabilities undoes it.
    """
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))
    if os.getppid() != parent:  # it went before
        os.kill(os.getpid(), number)


def _run_child(child: int, job: dict[str, Any]) -> None:
    """Ends as the child does, or when it is told to, and leaves nothing behind."""
    status = None
    while status is None:
        is_told = signal.sigwait(_AWAITED) == signal.SIGTERM
        status = 128 + signal.SIGTERM if is_told else _wait_for(child, os.WNOHANG)
    _end_children()
    if os.getppid() != job["parent"]:  # which would have removed it
        shutil.rmtree(job["folder"], ignore_errors=True)
    os._exit(status)


def _become_program(job: dict[str, Any], parent: int) -> None:
    os.setsid()  # signals to its group are for itself
    if job["uid"] is not None:
        os.setgroups([])
        os.setgid(job["uid"])
        os.setuid(job["uid"])
    _end_with(parent, signal.SIGKILL)
    for name, soft, hard in job["limits"]:
        resource.setrlimit(name, (soft, hard))
    os.execve(job["command"][0], job["command"], job["env"])


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    if job["namespace"]:
        _enter_namespace(job["has_users"])
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    _end_with(job["parent"], signal.SIGTERM)
    launcher = os.getpid()
    inner = os.fork()
    if inner:
        _run_child(inner, job)
    # In a namespace a first process without handlers cannot be ended from inside.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    if not job["namespace"]:
        _become_program(job, launcher)
    _end_with(0, signal.SIGKILL)  # a parent outside has no number inside
    _mount_all(job["folder"], job["mounts"])
    program = os.fork()
    if program:
        os._exit(_wait_for(program) or 0)  # and with it every process inside
    _become_program(job, 1)


if __name__ == "__main__":
    main()
