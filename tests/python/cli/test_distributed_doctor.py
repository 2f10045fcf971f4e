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


def test_a_broken_driver_is_one_line_for_each_thing(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("Unexpected error from cudaGetDeviceCount().\nError 804: forward compat")

    monkeypatch.setattr(doctor, "_ranks", lambda devices: [doctor.Finding("ranks", "ok", "none")])
    for name in ("device_count", "get_device_name", "can_device_access_peer"):
        monkeypatch.setattr(torch.cuda, name, broken)
        text, is_healthy = doctor.examine_distributed(as_json=False)
        monkeypatch.undo()
        monkeypatch.setattr(doctor, "_ranks", lambda devices: [])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "card")
        assert not is_healthy
        what = "peer access" if name == "can_device_access_peer" else "devices"
        wanted = f"{what}: missing (RuntimeError: Unexpected error from cudaGetDeviceCount()."
        assert f"{wanted} Error 804: forward compat)" in text.splitlines()


FAKE_RAY = """\
def init(address, **options):
    assert address == "auto"
    {init}
def nodes():
    return [
        dict(NodeManagerAddress="10.0.0.1", Alive=True, Resources=dict(CPU=8.0, GPU=1.0)),
        dict(NodeManagerAddress="10.0.0.2", Alive=False, Resources={{}}),
    ]
"""


@pytest.mark.parametrize(
    ("init", "state", "detail"),
    [
        ("print('joined')", "ok", "9.9, nodes 2: 10.0.0.1 (CPU 8, GPU 1), 10.0.0.2 (lost)"),
        ("raise ConnectionError", "ok", "9.9, no cluster runs: start one with ray start --head"),
        ("raise ValueError('odd')", "slow", "9.9, ended with 1: ValueError: odd"),
    ],
)
def test_nodes_of_a_ray_cluster(tmp_path, monkeypatch, init, state, detail):
    (tmp_path / "ray.py").write_text(FAKE_RAY.format(init=init))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "version", lambda name: "9.9")
    assert doctor._ray() == doctor.Finding("ray", state, detail)


def test_a_ray_cluster_that_does_not_answer(tmp_path, monkeypatch):
    (tmp_path / "ray.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "version", lambda name: "9.9")
    monkeypatch.setattr(doctor, "_RAY_S", 0.5)
    detail = "9.9, no answer within 0.5 s: see ray status"
    assert doctor._ray() == doctor.Finding("ray", "slow", detail)


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
