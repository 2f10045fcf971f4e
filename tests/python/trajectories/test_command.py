# SPDX-License-Identifier: Apache-2.0
"""``diffulex trace``: statistics, pictures and pages of a file; and what writes such files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffulex.bench.__main__ import main as bench_main
from diffulex.tools.cli import main
from diffulex.trace.files import read_traces, trace_record, write_traces
from diffulex.trace.statistics import kendall_tau, order_statistics
from diffulex.trace.trajectory import Change, TraceBlock, TraceStep, Trajectory
from traced_answers import QUESTIONS, Traced, every_strategy

one_strategy = pytest.mark.parametrize("traced", ["multi_bd"], indirect=True)


def _step(number: int, *changes: Change, new: int = 1) -> TraceStep:
    block = TraceBlock(0, 0, 4, "ACTIVE", 0)
    other = TraceBlock(1, 4, 8, "ACTIVE", 0)
    return TraceStep(number, 0.5, number == 1, new, 0, (block, other), changes)


def test_statistics_by_hand() -> None:
    """Two blocks of four after a prompt of two: positions 2 and 3, then 4 and 5, backwards each."""
    trajectory = Trajectory(
        "full", 2, 9, 4, (5, 6, 7, 8),
        (
            _step(1, new=0),
            _step(2, Change(3, 9, 1, 0.5)),
            _step(3, Change(2, 9, 5, 0.25), Change(3, 1, 6, 0.75)),
            _step(4, Change(5, 9, 8, 1.0), new=3),
            _step(5, Change(4, 9, 7, None)),
        ),
    )  # fmt: skip
    result = order_statistics(trajectory)
    # Written in steps 3, 3, 5, 4.
    assert result == {
        "steps": 5,
        "prefill_steps": 1,
        "seconds": 2.5,
        "tokens": 4,
        "tokens_per_step_mean": 1.5,
        "tokens_per_step_max": 3,
        "max_open_blocks": 2,
        "order_tau": pytest.approx((4 - 1) / 5),
        "block_order_tau": -1.0,
        "left_to_right": 0.75,
        "edits": 1,
        "edited_share": 0.25,
        "confidence_mean": pytest.approx(2 / 3),
        "confidence_p10": pytest.approx(0.35),
        "confidence_p50": 0.75,
        "confidence_p90": pytest.approx(0.95),
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 3], 1), ([3, 2, 1], -1), ([2, 2, 2], None), ([1], None), ([1, 3, 2], 1 / 3)],
)
def test_rank_correlation(values: list[int], expected: float | None) -> None:
    assert kendall_tau(np.array(values)) == expected


def test_rank_correlation_of_long_answers() -> None:
    values = np.random.default_rng(3).integers(0, 40, 700)
    pairs = [
        np.sign(values[j] - values[i])
        for i in range(len(values))
        for j in range(i + 1, len(values))
    ]
    assert kendall_tau(values) == pytest.approx(sum(pairs) / np.count_nonzero(pairs))


@every_strategy
def test_statistics_are_printed(traced: Traced, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(traced.path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ +mean +request 0 +request 1$", text, re.MULTILINE)
    assert re.search(r"^steps +[\d.]+ +\d+ +\d+$", text, re.MULTILINE)
    assert bench_main(["trace", str(traced.path), "--json", "--request", "0"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["req_id"] == traced.full[0].req_id
    assert row["tokens"] == len(traced.full[0].token_ids)
    assert -1 <= row["order_tau"] <= 1
    assert row["edits"] == sum(token.edits for token in traced.full[0].trajectory.tokens)


@every_strategy
def test_a_page_needs_nothing_from_elsewhere(traced: Traced, tmp_path: Path) -> None:
    out = tmp_path / "replay.html"
    assert main(["trace", str(traced.path), "--html", str(out), "--request", "1"]) == 0
    text = out.read_text(encoding="utf-8")
    assert re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org)""", text) == []
    assert "{{" not in text
    assert "default-src 'none'" in text
    assert QUESTIONS[1] in text


@one_strategy
def test_a_text_cannot_leave_its_element(traced: Traced, tmp_path: Path) -> None:
    record = {**traced.records[0], "question": '</script><b>& "x"'}
    record["texts"] = dict.fromkeys(record["texts"], "</script>{{theme.css}}")
    path, out = tmp_path / "trace.jsonl", tmp_path / "replay.html"
    write_traces(path, [record])
    assert main(["trace", str(path), "--html", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert text.count("</script>") == 2
    assert "&lt;/script&gt;&lt;b&gt;&amp; &quot;x&quot;" in text
    assert "{{theme.css}}" in text


@pytest.mark.slow  # of all tests, this one alone imports matplotlib
@one_strategy
@pytest.mark.parametrize("name", ["plot.svg", "plot.png"])
def test_plots(traced: Traced, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    out = tmp_path / name
    assert main(["trace", str(traced.path), "--plot", str(out)]) == 0
    content = out.read_bytes()
    assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


@pytest.mark.slow  # as above
@pytest.mark.parametrize("traced", ["fast_dllm_v2"], indirect=True)
def test_tokens_without_a_confidence_are_grey(traced: Traced, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    tokens = [token for output in traced.full for token in output.trajectory.tokens]
    num_unknown = sum(token.confidence is None for token in tokens)
    assert num_unknown > 0
    out = tmp_path / "plot.svg"
    assert main(["trace", str(traced.path), "--plot", str(out)]) == 0
    assert out.read_text(encoding="utf-8").count("fill: #9aa0a6") == num_unknown


@one_strategy
def test_animations(traced: Traced, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="animations need Pillow")
    out = tmp_path / "steps.gif"
    assert main(["trace", str(traced.path), "--gif", str(out)]) == 0
    with image.open(out) as picture:
        assert picture.format == "GIF"
        # Equal frames after each other may be joined.
        assert 1 < picture.n_frames <= len(traced.full[0].trajectory.steps)


@one_strategy
def test_the_older_form_is_written(traced: Traced, tmp_path: Path) -> None:
    out = tmp_path / "0x3_decode_trajectory.json"
    assert bench_main(["trace", str(traced.path), "--legacy", str(out)]) == 0
    requests = json.loads(out.read_text(encoding="utf-8"))
    assert [item["token_ids"] for item in requests] == [list(o.token_ids) for o in traced.full]


@one_strategy
def test_what_cannot_be_shown_is_an_error(
    traced: Traced, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    blocks, empty = tmp_path / "blocks.jsonl", tmp_path / "empty.jsonl"
    write_traces(blocks, [trace_record(output) for output in traced.blocks])
    empty.write_text("")
    out = str(tmp_path / "out")
    for arguments, message in (
        ([str(blocks), "--html", out], "expected a trajectory of level full to play, got blocks"),
        ([str(blocks), "--gif", out], "--gif: expected trajectories of level full, got blocks"),
        ([str(blocks), "--plot", f"{out}.svg"], "--plot: expected trajectories of level full"),
        ([str(blocks), "--legacy", out], "of level full for the older form, got blocks"),
        ([str(traced.path), "--request", "2"], "--request: expected 0 to 1, got 2"),
        ([str(traced.path), "--plot", f"{out}.txt"], "--plot: expected a name in .png, .svg, .pdf"),
        ([str(traced.path), "--html", f"{out}/none/x"], "--html: cannot write"),
        ([str(empty)], "trace: expected a line per request"),
        ([str(tmp_path / "none")], "trace: cannot read"),
    ):
        assert main(["trace", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
    assert main(["trace", str(blocks)]) == 0  # steps have numbers without tokens, too
    assert re.search(r"^order_tau +- +- +-$", capsys.readouterr().out, re.MULTILINE)
    for flag, module, name in (
        ("--gif", "PIL.Image", "pillow"),
        ("--plot", "matplotlib", "matplotlib"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            assert main(["trace", str(traced.path), flag, f"{out}.png"]) == 2
        assert f"{flag}: expected the package {name}" in capsys.readouterr().err


def test_generate_adds_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, prompts = tmp_path / "trace.jsonl", tmp_path / "prompts.txt"
    prompts.write_text("\n".join(QUESTIONS) + "\n")
    usual = ["generate", "--device", "cpu", "--max-tokens", "32", "--trace", str(path)]
    assert main([*usual, QUESTIONS[0]]) == 0
    assert main([*usual, "--trace-level", "blocks", "--prompts-file", str(prompts), "--json"]) == 0
    capsys.readouterr()
    read = list(read_traces(path))
    assert [trajectory.level for _, trajectory in read] == ["full", "blocks", "blocks"]
    assert [record["question"] for record, _ in read] == [QUESTIONS[0], *QUESTIONS]
    assert read[0][0]["model"] == "demo"
    assert main(["generate", "--device", "cpu", "--trace-level", "full", "1"]) == 2
    assert "--trace-level: expected --trace with it, got none" in capsys.readouterr().err
    assert main([*usual[:-1], str(tmp_path / "no" / "x"), "1"]) == 2
    assert "trace: cannot write" in capsys.readouterr().err


@pytest.mark.slow
def test_evaluations_keep_trajectories_on_request(tmp_path: Path) -> None:
    for level in ("none", "full"):
        code = bench_main(
            ["eval", "--model-path", "demo", "--model-name", "auto", "--decoding-strategy", "auto",
             "--dataset", "smoke_arith", "--dataset-limit", "2", "--max-tokens", "24",
             "--output-dir", str(tmp_path / level), "--engine-arg", "device=cpu",
             "--save-trace", level, "--progress", "none"]
        )  # fmt: skip
        assert code == 0
    assert not list((tmp_path / "none").rglob("trace.jsonl"))
    (path,) = (tmp_path / "full").rglob("trace.jsonl")
    read = list(read_traces(path))
    assert [record["key"][0] for record, _ in read] == ["smoke_arith"] * 2
    samples = [
        json.loads(line) for line in (path.parent / "samples.jsonl").read_text().splitlines()
    ]
    texts = {tuple(sample["key"]): sample["text"] for sample in samples}
    for record, trajectory in read:
        assert record["text"].startswith(texts[tuple(record["key"])])
        assert [token.token for token in trajectory.tokens] == record["token_ids"]
