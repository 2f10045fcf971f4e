# SPDX-License-Identifier: Apache-2.0
"""Recordings that fail: they end, and the steps around them do not."""

from __future__ import annotations

import pytest

from diffulex.engine.profiling import Profiler
from diffulex.errors import ConfigError


def make(directory, **config):
    return Profiler({"torch_profiler_dir": str(directory), **config})


@pytest.fixture
def occupied(tmp_path):
    """A path at which no directory can be made."""
    path = tmp_path / "traces"
    path.write_text("a file")
    return path


def test_a_trace_that_cannot_be_written_does_not_fail_the_step(occupied, caplog):
    profiler = make(occupied, max_iterations=1)
    profiler.start("p")
    profiler.count_step()
    assert "the recording is lost" in caplog.text
    with pytest.raises(RuntimeError, match="expected a recording under way, got none"):
        profiler.stop()


def test_stop_says_why_there_is_no_trace(occupied):
    profiler = make(occupied)
    profiler.start(None)
    with pytest.raises(OSError, match="exists"):
        profiler.stop()
    profiler.start(None)  # it can be tried again
    profiler.close()


def test_a_recording_that_cannot_begin(tmp_path, monkeypatch, caplog):
    def fail(profiler):
        raise RuntimeError("busy")

    monkeypatch.setattr("torch.profiler.profile.start", fail)
    profiler = make(tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="busy"):
            profiler.start(None)
    delayed = make(tmp_path, delay_iterations=2)
    delayed.start(None)
    delayed.count_step()
    assert not caplog.text
    delayed.count_step()
    assert "busy" in caplog.text


def test_steps_to_skip_and_to_record(tmp_path):
    profiler = make(tmp_path, delay_iterations=2, max_iterations=2)
    profiler.start("../p")
    for num_steps in range(1, 5):
        profiler.count_step()
        assert len(list(tmp_path.glob("p-*.json"))) == (num_steps == 4)


@pytest.mark.parametrize("config", [{}, {"torch_profiler_dir": "x", "speed": 1}])
def test_bad_settings(config):
    with pytest.raises(ConfigError, match="profiler_config: expected"):
        Profiler(config)
