# SPDX-License-Identifier: Apache-2.0
"""Exchange of ranks in processes with a GPU each, or with one that they share."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex.distributed import cuda_comm
from diffulex.distributed.store import PeerError, make_store

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

    def allreduce(self, tensors: Any) -> Any:
        end = self._ends.popleft()
        if isinstance(end, Exception):
            raise end
        result: Any = torch.futures.Future()
        if end is not None:
            result.set_result(int(end))
        return SimpleNamespace(get_future_result=lambda: result, wait=lambda: True)


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
