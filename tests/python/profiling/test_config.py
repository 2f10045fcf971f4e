# SPDX-License-Identifier: Apache-2.0
"""Settings of recordings: what is accepted, what is refused and how."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from diffulex.config.parse import normalise
from diffulex.errors import ConfigError
from diffulex.profiling import ProfilerConfig


def test_defaults() -> None:
    config = ProfilerConfig.of(None)
    assert not config.is_enabled
    assert config.as_dict() == {
        "profiler": None,
        "torch_profiler_dir": "",
        "record_shapes": False,
        "profile_memory": False,
        "with_stack": False,
        "with_modules": False,
        "use_cuda": True,
        "delay_iterations": 0,
        "max_iterations": 0,
        "run_id": None,
    }


def test_forms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/tom")
    config = ProfilerConfig.of({"torch_profiler_dir": "traces", "max_iterations": 3})
    assert config == ProfilerConfig("torch", str(tmp_path / "traces"), max_iterations=3)
    assert ProfilerConfig.of(config) is config
    like = types.SimpleNamespace(profiler="torch", torch_profiler_dir="~/t", run_id="r")
    assert ProfilerConfig.of(like) == ProfilerConfig("torch", "/home/tom/t", run_id="r")
    assert ProfilerConfig.of({"torch_profiler_dir": Path("t")}).torch_profiler_dir == str(
        tmp_path / "t"
    )
    assert not ProfilerConfig.of({"profiler": None, "torch_profiler_dir": "t"}).is_enabled


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "expected a torch_profiler_dir, got none"),
        ({"profiler": "torch"}, "expected a torch_profiler_dir, got none"),
        ({"torch_profiler_dir": "x", "speed": 1}, r"known keys \(profiler, .*\), got speed"),
        ({"torch_profiler_dir": "x", 1: 1}, "got 1"),
        ({"torch_profiler_dir": "x", "profiler": "nsys"}, "profiler: expected torch or None"),
        ({"torch_profiler_dir": "x", "max_iterations": -1}, "max_iterations: expected an int >= 0"),
        ({"torch_profiler_dir": "x", "delay_iterations": 1.5}, "delay_iterations: expected an int"),
        ({"torch_profiler_dir": "x", "delay_iterations": True}, "an int >= 0, got True"),
        ({"torch_profiler_dir": "x", "with_stack": 1}, "with_stack: expected True or False, got 1"),
        ({"torch_profiler_dir": "x", "run_id": 1}, "run_id: expected a text or None, got 1"),
        ({"torch_profiler_dir": 1}, "torch_profiler_dir: expected a directory, got 1"),
        ("torch", "expected a mapping, got 'torch'"),
    ],
)
def test_bad_settings(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^profiler_config.*{message}"):
        ProfilerConfig.of(value)


def test_as_a_key_of_the_engine(tmp_path: Path) -> None:
    given = normalise({"profiler_config": ProfilerConfig("torch", str(tmp_path))}, where="")
    assert given["profiler_config"]["torch_profiler_dir"] == str(tmp_path)
    off = {"profiler_config": {"profiler": None}}
    assert normalise(off, where="") == {}
    with pytest.raises(ConfigError, match="given: profiler_config: expected known keys"):
        normalise({"profiler_config": {"speed": 1}}, where="given: ")
