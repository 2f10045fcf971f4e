# SPDX-License-Identifier: Apache-2.0
"""Where ranks find each other."""

from __future__ import annotations

import datetime
import errno
import secrets
import socket
import time
from typing import Any

from torch import distributed

from diffulex.distributed.layout import LOOPBACK
from diffulex.errors import ConfigError, DiffulexError

__all__ = [
    "PeerError",
    "join_store",
    "make_store",
    "meet",
    "part_of_store",
    "place_of",
    "time_limit",
]

#: Much of it is not declared.
_dist: Any = distributed
#: Where waiting has no limit.
_NO_LIMIT_S = 10 * 365 * 86400


class PeerError(DiffulexError, RuntimeError):
    """Another rank did not take part in an exchange: it is gone, or stuck."""


def time_limit(seconds: float) -> datetime.timedelta:
    """A limit of waiting; 0: none."""
    return datetime.timedelta(seconds=seconds or _NO_LIMIT_S)


def make_store(size: int, host: str = LOOPBACK, parallel: Any = None) -> Any:
    """The place where ranks find each other, for as long as the first rank, this one, is there.

    Args:
        size: ranks there are.
        host: the address of this process for the others.
        parallel: the section of the configuration, which may name another one, and a port.

    Raises:
        ConfigError: it cannot be there.
    """
    port = 0 if parallel is None else parallel.master_port
    if parallel is not None and parallel.master_addr != "localhost":
        host = parallel.master_addr
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        door = socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"master_port: {port} is in use; leave it unset for a free one"
        else:
            got = f"{host!r} and port {port}: {error.strerror}"
            text = f"master_addr: expected an address of this host, got {got}"
        raise ConfigError(text) from error
    port = door.getsockname()[1]
    limits = {"is_master": True, "wait_for_workers": False}
    return _dist.TCPStore(host, port, size, **limits, master_listen_fd=door.detach())


def place_of(store: Any) -> tuple[str, int, str]:
    """Where other ranks find a store of `make_store`: host, port, and a name of the part that is theirs.

    It is there until `store` is dropped, which also ends the waiting of those that have joined. The name is
    a new one each time: ranks of an attempt that failed may still look for this port, which can be another
    attempt's by then.
    """
    return store.host, store.port, secrets.token_hex(8)


def join_store(store: Any, size: int, connect_s: float) -> Any:
    """`store` itself, or that at a host and port, or at a place of `place_of`.

    Raises:
        RuntimeError: it is not there in time.
    """
    if not isinstance(store, tuple):
        return store
    (host, port, *name), limit = store, time_limit(connect_s)
    found = _dist.TCPStore(host, port, size, is_master=False, timeout=limit)
    return part_of_store(found, name[0]) if name else found


def meet(store: Any, rank: int, size: int, connect_s: float) -> None:
    """Waits until all ranks are here; where they meet again, each time needs its part of the store.

    Raises:
        PeerError: one of them is not there in time.
    """
    store.set(f"rank {rank}", "")
    end = time.monotonic() + connect_s
    for other in range(size):
        if other == rank:
            continue
        seconds = max(0.001, end - time.monotonic()) if connect_s else 0.0
        try:
            store.wait([f"rank {other}"], time_limit(seconds))
        except RuntimeError as error:
            text = f"rank {rank} waited {connect_s:g} s for rank {other} to connect"
            raise PeerError(f"{text} (distributed_timeout_seconds)") from error


def part_of_store(store: Any, name: str) -> Any:
    """A part of a store for the ranks of one group."""
    return _dist.PrefixStore(name, store)
