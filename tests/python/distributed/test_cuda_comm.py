# SPDX-License-Identifier: Apache-2.0
"""Exchange of ranks in processes with a GPU each, or with one that they share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diffulex.distributed.store import make_store

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
