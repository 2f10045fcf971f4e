# SPDX-License-Identifier: Apache-2.0
"""`diffulex doctor --distributed`: each line by what it finds, and real ranks on the CPU."""

from __future__ import annotations

import json
import multiprocessing

import pytest
import torch

from diffulex.tools import distributed_doctor as doctor


@pytest.fixture
def without_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.slow
def test_ranks_on_the_cpu_exchange(without_devices):
    text, is_healthy = doctor.examine_distributed(as_json=True)
    content = json.loads(text)
    assert is_healthy, text
    assert content["is_healthy"]
    found = {each["name"]: each for each in content["findings"]}
    assert found["ranks"]["detail"] == "started and ended on cpu, cpu"
    assert found["all-reduce"]["detail"].endswith(" us for 256 KB")
    assert found["devices"]["detail"] == "no CUDA device: ranks run on the CPU"
    assert {each["state"] for each in found.values()} == {"ok"}


def test_a_rank_that_cannot_start_is_one_line(monkeypatch, without_devices):
    monkeypatch.setattr(doctor, "_CHILD", "no_such_module:run")
    text, is_healthy = doctor.examine_distributed(as_json=False)
    lines = text.splitlines()
    assert not is_healthy
    assert lines[-1] == "broken: see what is missing"
    assert lines[-2].startswith("ranks: missing (rank ")
    assert "No module named 'no_such_module'" in lines[-2]


def test_a_silent_rank_is_late():
    class Silent:
        connection, other = multiprocessing.Pipe()

    with pytest.raises(RuntimeError, match=r"no answer of rank 0 within 0\.1 s"):
        doctor._collect([Silent()], 0.1)


def test_devices_without_peer_access_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: {i, j} != {0, 2})
    finding = doctor._peer_access(3)
    assert finding.state == "slow"
    assert "none from cuda:0 to cuda:2, cuda:2 to cuda:0: " in finding.detail
    assert doctor._peer_access(2).state == "ok"


def test_little_shared_memory_is_slow_for_gpus_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_SHARED_BYTES", 1 << 60)
    assert doctor._shared_memory(tmp_path, 0).state == "ok"
    finding = doctor._shared_memory(tmp_path, 2)
    assert finding.state == "slow"
    assert finding.detail.endswith("--shm-size 1g")
    assert "No such file" in doctor._shared_memory(tmp_path / "no", 2).detail


def test_a_torch_without_nccl_is_missing_it_for_gpus(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert doctor._libraries(2).detail.endswith("install a torch with nccl")
    assert doctor._libraries(2).state == "missing"
    assert doctor._libraries(0).state == "ok"


def test_a_wrong_sum_is_an_error():
    class Wrong:
        rank, size = 0, 2

        def all_reduce_(self, x):
            x.fill_(4)

    with pytest.raises(RuntimeError, match="all-reduce: expected 3, got 4"):
        doctor._measure(Wrong(), torch.empty(2, 2))
