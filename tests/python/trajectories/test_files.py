# SPDX-License-Identifier: Apache-2.0
"""Files of trajectories: lines, compression, what is refused; the form of older programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from diffulex.errors import ConfigError
from diffulex.trace.files import read_traces, trace_record, trajectory_of, write_traces
from diffulex.trace.legacy import legacy_record
from traced_answers import Traced, every_strategy

one_strategy = pytest.mark.parametrize("traced", ["multi_bd"], indirect=True)


def _same(read: Any, made: Any) -> None:
    assert read.token_ids == made.token_ids
    assert (read.level, read.prompt_len, read.block_size) == (
        made.level, made.prompt_len, made.block_size,
    )  # fmt: skip
    for one, other in zip(read.steps, made.steps, strict=True):
        assert one._replace(seconds=0, changes=()) == other._replace(seconds=0, changes=())
        assert one.seconds == pytest.approx(other.seconds, abs=1e-6)
        assert [change[:3] for change in one.changes] == [change[:3] for change in other.changes]
        for (*_, value), (*_, expected) in zip(one.changes, other.changes, strict=True):
            assert value == pytest.approx(expected, abs=1e-6)


@every_strategy
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_what_is_written_is_read(traced: Traced, suffix: str, tmp_path: Path) -> None:
    if suffix.endswith(".zst"):
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    path = tmp_path / f"trace{suffix}"
    write_traces(path, traced.records)
    read = list(read_traces(path))
    assert len(read) == len(traced.full)
    for (record, trajectory), output in zip(read, traced.full, strict=True):
        _same(trajectory, output.trajectory)
        assert record["text"] == output.text
        assert record["metrics"]["nfe"] == output.metrics.nfe
        tokens = record["tokens"]
        assert [item[3] for item in tokens] == list(output.token_ids)
        assert [item[0] for item in tokens] == [t.position for t in output.trajectory.tokens]
        # The texts of its tokens make the answer readable without the tokenizer.
        assert set(map(str, output.token_ids)) <= set(record["texts"])


@one_strategy
def test_blocks_alone_are_smaller_and_have_no_ids_per_step(traced: Traced) -> None:
    for blocks, full in zip(traced.blocks, traced.full, strict=True):
        small, large = trace_record(blocks), trace_record(full)
        assert len(json.dumps(small)) < len(json.dumps(large))
        assert small["tokens"] == []
        assert all("changes" not in step for step in small["steps"])
        assert small["texts"] == {}
        _same(trajectory_of(small), blocks.trajectory)
    with pytest.raises(ValueError, match="expected a request with a trajectory, got one without"):
        trace_record(traced.plain[0])


@one_strategy
def test_lines_are_added_and_a_cut_one_is_left_out(traced: Traced, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_traces(path, traced.records[:1])
    write_traces(path, traced.records[1:])
    assert len(list(read_traces(path))) == 2
    path.write_text(path.read_text()[:-5])
    assert len(list(read_traces(path))) == 1


@one_strategy
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "expected diffulex-trajectory version 1, got something else"),
        ({"version": 2}, "expected diffulex-trajectory version 1"),
        ({"level": "none"}, "level: expected blocks or full, got 'none'"),
        ({"steps": None}, "steps: expected"),
        ({"prompt_len": "3"}, "prompt_len: expected"),
        ({"steps": [{}]}, "steps: expected steps with blocks and changes"),
        (
            {"steps": [{"step": 1, "seconds": 0, "prefill": True, "new_tokens": 1, "settled": 0,
                        "blocks": [], "changes": [[0, 1, 2, None]]}]},
            "expected positions from",
        ),
    ],
)  # fmt: skip
def test_lines_that_are_no_trajectories_are_named(
    traced: Traced, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    write_traces(path, [traced.records[0], {**traced.records[1], **change}])
    with pytest.raises(ConfigError, match=rf"trace\.jsonl:2: .*{message}"):
        list(read_traces(path))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: cannot read .*: No such file"):
        list(read_traces(tmp_path / "none.jsonl"))
    text = tmp_path / "text.jsonl"
    text.write_text("not json\n")
    with pytest.raises(ConfigError, match=r"text\.jsonl:1: "):
        list(read_traces(text))
    text.write_text("[1]\n")
    with pytest.raises(ConfigError, match=r"text\.jsonl:1: expected an object, got list"):
        list(read_traces(text))
    text.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="expected JSON lines in UTF-8"):
        list(read_traces(text))
    with pytest.raises(ConfigError, match=r"trace: cannot write .*: No such file"):
        write_traces(tmp_path / "none" / "trace.jsonl", [])


def test_compression_without_its_package_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"expected the package zstandard for a \.zst file"):
        write_traces(tmp_path / "trace.jsonl.zst", [])


@every_strategy
def test_the_older_form_has_whole_steps(traced: Traced) -> None:
    for record, output in zip(traced.records, traced.full, strict=True):
        trajectory = trajectory_of(record)
        legacy = legacy_record(record, trajectory)
        assert list(legacy) == [
            "req_id", "token_ids", "trajectory", "is_truncated", "max_new_tokens_reached",
            "max_model_len_reached", "max_nfe_reached", "max_repetition_run_reached",
            "eos_token_generated", "completion_reason", "text",
        ]  # fmt: skip
        assert legacy["token_ids"] == list(output.token_ids)
        assert legacy["is_truncated"] is output.is_truncated
        assert legacy["eos_token_generated"] is (output.completion_reason == "eos_token_generated")
        steps = legacy["trajectory"]
        assert [step["step_id"] for step in steps] == list(range(output.metrics.nfe))
        assert sum(step["num_generated_tokens"] for step in steps) == output.metrics.decided_tokens
        for step in steps:
            assert list(step) == [
                "step_id", "step_time", "is_prefill", "num_generated_tokens", "running_token_ids",
                "block_size", "buffer_bids", "block_trace",
            ]  # fmt: skip
            assert len(step["buffer_bids"]) == len(step["block_trace"])
            if step["is_prefill"]:
                assert step["running_token_ids"] == []
                continue
            masks = sum(block["num_mask_tokens"] for block in step["block_trace"])
            open_ids = [i for i in step["running_token_ids"] if i == traced.mask_id]
            assert len(open_ids) == masks
            for block in step["block_trace"]:
                assert list(block) == [
                    "block_id", "is_active", "is_dummy", "num_mask_tokens", "mask_ratio",
                    "progress", "block_status",
                ]  # fmt: skip
                assert block["mask_ratio"] == block["num_mask_tokens"] / step["block_size"]
                assert block["progress"] == 1 - block["mask_ratio"]


@one_strategy
def test_the_older_form_needs_tokens(traced: Traced) -> None:
    record = trace_record(traced.blocks[0])
    with pytest.raises(ConfigError, match="expected a trajectory of level full for the older form"):
        legacy_record(record, trajectory_of(record))
