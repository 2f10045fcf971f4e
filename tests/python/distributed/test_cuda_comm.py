# SPDX-License-Identifier: Apache-2.0
"""Exchange of ranks in processes with a GPU each, or with one that they share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex.distributed import cuda_comm
from diffulex.distributed.store import PeerError, make_store
from diffulex.errors import ConfigError
from fixtures.processes import PATIENCE_S, until

_PROGRAM = str(Path(__file__).with_name("comm_rank.py"))


def run_ranks(size: int, *, backend: str, custom: str, num_devices: int) -> list[str]:
    """What the ranks printed; they must all succeed."""
    store = make_store(size)
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, _PROGRAM, str(rank), str(size), str(store.port)),
                *(str(rank % num_devices), backend, custom),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ends = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, ends):
        assert rank.returncode == 0, errors[-2000:]
    return [out.strip() for out, _ in ends]


class Exchanges:
    """Stands for a group of NCCL: each exchange ends as the test says, as the watch of a group tells."""

    def __init__(self, *ends: Any) -> None:
        self._ends = deque(ends)
        self.is_aborted = threading.Event()

    def allreduce(self, tensors: Any) -> Any:
        end = self._ends.popleft()
        if isinstance(end, Exception):
            raise end
        result: Any = torch.futures.Future()
        if end is not None:
            result.set_result(int(end))
        return SimpleNamespace(get_future_result=lambda: result, wait=lambda: True)

    def abort(self) -> None:
        self.is_aborted.set()


def nccl_of(*ends: Any) -> Any:
    nccl = cuda_comm._Nccl(None, 1, 2, 5.0)
    nccl._made = Exchanges(*ends)
    return nccl


def test_ends_of_exchanges_name_their_rank_and_number() -> None:
    results: Any = torch._C._distributed_c10d.WorkResult  # type: ignore[attr-defined]
    fine, late, failed = results.SUCCESS, results.TIMEOUT, results.COMM_ERROR
    x, refused = torch.ones(1), RuntimeError("communicator was\naborted")
    nccl = nccl_of(fine, fine, None, fine)
    for _ in range(4):
        nccl.all_reduce_(x)
        nccl.check()
    assert [number for number, _ in nccl._pending] == [2, 3]  # behind the one that goes on
    for ends, text in (
        ((fine, late), "rank 1 waited 5 s for rank 0 in exchange 1 of NCCL"),
        ((failed,), "rank 1 lost rank 0 in exchange 0 of NCCL"),
        ((fine, refused), "rank 1 lost rank 0 in exchange 1 of NCCL: communicator was aborted"),
        ((late, refused), "rank 1 waited 5 s for rank 0 in exchange 0 of NCCL"),
    ):
        nccl = nccl_of(*ends)

        def run(nccl: Any = nccl, count: int = len(ends)) -> None:
            for _ in range(count):
                nccl.all_reduce_(x)
            nccl.check()

        with pytest.raises(PeerError) as caught:
            run()
        assert str(caught.value) == text


def test_an_exchange_that_waits_too_long_is_ended_whatever_the_host_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And those that have ended before it are not late, nor one that ends in time."""
    fine: Any = torch._C._distributed_c10d.WorkResult.SUCCESS  # type: ignore[attr-defined]
    made = Exchanges(fine, None, None)
    nccl = cuda_comm._Nccl(None, 1, 2, 1000.0)
    nccl._make = lambda: made  # type: ignore[assignment]
    for _ in range(3):
        nccl.all_reduce_(torch.ones(1))
    nccl._timeout_s = 0.3  # not before all are begun, however slow the host is
    assert made.is_aborted.wait(PATIENCE_S)  # nothing asks meanwhile
    with pytest.raises(PeerError, match=r"^rank 1 waited 0\.3 s for rank 0 in exchange 1 of NCCL$"):
        nccl.check()

    patient = nccl_of(fine, None)
    for _ in range(2):
        patient.all_reduce_(torch.ones(1))
    assert not patient.end_late()
    assert not patient.end_late()
    now = [time.monotonic()]
    monkeypatch.setattr(cuda_comm.time, "monotonic", lambda: now[0])
    assert not patient.end_late()
    now[0] += 1000.0  # the process was stopped
    assert not patient.end_late()
    for _ in range(5):
        now[0] += 1.0
        is_late = patient.end_late()
    assert is_late


def test_a_watch_ends_with_its_group() -> None:
    for end in (cuda_comm._Nccl.abort, cuda_comm._Nccl.close, None):
        before = set(threading.enumerate())
        nccl = cuda_comm._Nccl(None, 1, 2, 5.0)
        nccl._make = lambda: SimpleNamespace(  # type: ignore[assignment]
            abort=lambda: None, shutdown=lambda: None
        )
        assert nccl._group is not None
        watches = [t for t in threading.enumerate() if t.name == "diffulex-exchanges"]
        watches = [watch for watch in watches if watch not in before]
        assert watches
        if end is not None:
            end(nccl)
        del nccl
        until(lambda watches=watches: not any(t.is_alive() for t in watches))


def test_exchanges_that_nobody_asks_for_are_not_kept() -> None:
    """Ranks that only take part in the forwards of others look after none."""
    fine: Any = torch._C._distributed_c10d.WorkResult.SUCCESS  # type: ignore[attr-defined]
    nccl = nccl_of(*[fine] * 100)
    for _ in range(100):
        nccl.all_reduce_(torch.ones(1))
    assert len(nccl._pending) == 1


def test_what_fails_in_this_rank_is_not_blamed_on_another() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("fault", 1)):
        with pytest.raises(type(error)):
            nccl_of(error).all_reduce_(torch.ones(1))


class Unconnected(cuda_comm.CudaComm):
    """Up to the opening of buffers, which takes GPUs."""

    def _connect(self) -> str:
        return self._missing_access([("the host", device, "", "") for device in range(2)])


@pytest.fixture
def _without_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of a host that cannot open each other's memory."""
    monkeypatch.setattr(cuda_comm, "join_store", lambda *_: None)
    monkeypatch.setattr(cuda_comm, "_library", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)


@pytest.mark.usefixtures("_without_access")
def test_gpus_without_access_to_each_other(caplog: pytest.LogCaptureFixture) -> None:
    """An error where peer memory is asked for; else one line of the first rank, and the library."""

    def connect(rank: int, **settings: str) -> Unconnected:
        return Unconnected(rank, 2, None, torch.device("cuda", rank), 1.0, 1.0, **settings)

    missing = "peer access between cuda:0 and cuda:1"
    with pytest.raises(ConfigError) as caught:
        connect(0, custom_all_reduce="on")
    assert str(caught.value) == f"custom_all_reduce: expected {missing}, got none"
    without = "ranks exchange through {} alone, without graphs: {}"
    for settings, texts in (
        ({}, [without.format("NCCL", f"expected {missing}, got none")]),
        ({"custom_all_reduce": "off"}, [without.format("NCCL", "custom_all_reduce is off")]),
        (
            {"backend": "gloo"},
            [
                "distributed_backend gloo: large exchanges go through the host; for tests",
                without.format("gloo", f"expected {missing}, got none"),
            ],
        ),
    ):
        caplog.clear()
        assert connect(0, **settings).no_capture_reason == "the ranks have no peer memory"
        assert caplog.messages == texts
        connect(1, **settings)
        assert caplog.messages == texts


@pytest.mark.cuda
def test_processes_that_share_a_gpu_open_each_others_memory() -> None:
    assert run_ranks(2, backend="gloo", custom="on", num_devices=1) == ["peers"] * 2


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("backend", "custom", "way"),
    [
        ("auto", "auto", "peers"),
        ("nccl", "off", "library"),
        ("gloo", "off", "library"),
        ("gloo", "on", "peers"),
    ],
)
def test_two_gpus(backend: str, custom: str, way: str) -> None:
    assert run_ranks(2, backend=backend, custom=custom, num_devices=2) == [way] * 2
