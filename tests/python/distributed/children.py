# SPDX-License-Identifier: Apache-2.0
"""What the child processes of tests run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from diffulex.distributed.child_process import read_forever
from diffulex.log import configure, get_logger, name_process


def fail(message: Any) -> None:
    raise AttributeError(f"no {message}")


def refuses(connection: Any, parent_pid: int) -> None:
    """Cannot take what it is sent."""
    read_forever(connection, parent_pid, fail)
    time.sleep(60)


def leaves_a_child(connection: Any, parent_pid: int) -> None:
    """Ends before a process that it has started without closing anything."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    connection.send(child.pid)
    os._exit(0)


def writes(connection: Any, parent_pid: int) -> None:
    """Writes lines to its standard error, then says so."""
    for index in range(1000):
        print(f"{index:0200d}", file=sys.stderr, flush=True)
    connection.send("written")
    connection.recv()


def floods(connection: Any, parent_pid: int) -> None:
    """Sends more than a pipe holds, then ends."""
    connection.send("begins")
    connection.send(bytes(8 << 20))


def sleeps(connection: Any, parent_pid: int) -> None:
    """Says nothing, for longer than a test waits."""
    time.sleep(600)


def answers(connection: Any, parent_pid: int) -> None:
    """Replies what the variable ANSWERS says, whatever it is told, and nothing more."""
    for answer in json.loads(os.environ["ANSWERS"]):
        connection.send(("reply", answer))
    time.sleep(60)


def tells_its_title(connection: Any, parent_pid: int) -> None:
    """Says what the package of titles was told, and the command that the system shows."""
    told = getattr(sys.modules.get("setproctitle"), "told", [])
    connection.send((told, Path("/proc/self/cmdline").read_bytes()))
    connection.recv()


def logs(connection: Any, parent_pid: int) -> None:
    """Logs in both forms, and writes what is no log line."""
    for as_json in (False, True):
        name_process("own name" if as_json else "")
        configure("info", file="", json=as_json)
        get_logger("diffulex.engine").info("said")
    print("{not a log line}", file=sys.stderr, flush=True)
    connection.send("logged")
    connection.recv()


def trains(connection: Any, parent_pid: int) -> None:
    """A rank of the default process group: adds up what it is sent with the others, until it is sent None."""
    import torch
    from torch import distributed

    host, port = connection.recv()
    store = distributed.TCPStore(host, port, 2, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=1, world_size=2)
    while (value := connection.recv()) is not None:
        x = torch.tensor([value])
        distributed.all_reduce(x)
        connection.send(x.item())
    distributed.destroy_process_group()
