# SPDX-License-Identifier: Apache-2.0
"""The zoo evaluation: its directory format, its runs and its report files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffulex import ConfigError, SamplingParams
from diffulex.bench.evaluate import RunReport, Score
from diffulex.bench.zoo import ZooReport, ZooRow, chosen, read_zoo, run_zoo
from diffulex.checkpoint.resolve import demo_dir

pytest.importorskip("matplotlib", reason="the plot needs matplotlib")


@pytest.fixture
def zoo(tmp_path):
    directory = tmp_path / "zoo"
    directory.mkdir()
    lines = (demo_dir() / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    (directory / "problems.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    curve = {
        "name": "blocks",
        "model": "demo",
        "engine": {"buffer_size": 2},
        "sampling": {"max_tokens": 96},
        "sweep": {"key": "accept_threshold", "values": [0.95, 0.5]},
    }
    fixed = {"name": "one block", "model": "demo", "engine": {"buffer_size": 1}}
    content = {"data": "problems.jsonl", "curves": [curve, fixed]}
    (directory / "zoo.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_one_command_writes_table_and_plot(zoo, tmp_path):
    shown = []
    report = run_zoo(
        zoo,
        output_dir=tmp_path,
        engine_kwargs={"device": "cpu", "num_pages": 256, "max_num_reqs": 8},
        sampling_params=SamplingParams(max_tokens=64),
        show=shown.append,
        command="diffulex eval --zoo",
    )
    assert shown == [report]
    assert [(row.curve, row.buffer_size, row.setting) for row in report.rows] == [
        ("blocks", 2, "accept_threshold 0.95"),
        ("blocks", 2, "accept_threshold 0.5"),
        ("one block", 1, "accept_threshold 0.95"),
    ]
    loaded = json.loads((tmp_path / "zoo_results.json").read_text(encoding="utf-8"))
    assert loaded["environment"]["command"] == "diffulex eval --zoo"
    assert [run["total"]["num_problems"] for run in loaded["runs"]] == [6, 6, 6]
    for run in loaded["runs"]:
        assert run["nfe_per_problem"] == run["total"]["nfe"] / 6
        assert run["strategy"] == "multi_bd"
        assert run["swept"] == f"accept_threshold {run['setting']['accept_threshold']}"
    table = (tmp_path / "zoo_results.md").read_text(encoding="utf-8")
    assert table.count("| blocks | multi_bd | 2 |") == 2
    lines = report.to_text().splitlines()
    assert [line.split()[0] for line in lines] == [
        "setting", "blocks", "accept_threshold", "accept_threshold", "one", "accept_threshold",
    ]  # fmt: skip
    assert lines[4] == "one block (multi_bd, buffer 1)"
    assert max(map(len, lines)) <= 80
    plot = (tmp_path / "zoo_results.svg").read_text(encoding="utf-8")
    assert "one block" in plot
    assert "tokens per forward" in plot


def test_the_table_of_the_whole_zoo_fits_into_80_columns():
    """With the cells of the published runs."""
    text = (Path(__file__).parents[3] / "docs/zoo_results.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [
        SimpleNamespace(cells=row.copy, split="held-out", is_chosen=False)
        for row in cells
        if row[0] not in ("curve", "---")
    ]
    shown = ZooReport({}, tuple(rows)).to_text().splitlines()
    assert len(shown) > len(rows) > 5
    assert max(map(len, shown)) <= 80


@pytest.mark.slow
def test_the_same_report_gives_the_same_plot(zoo, tmp_path):
    report = run_zoo(zoo, engine_kwargs={"device": "cpu", "num_pages": 256}, limit=1)
    for name in ("a.svg", "b.svg"):
        report.write_plot(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.slow
def test_settings_are_chosen_on_other_problems_than_the_reported_ones(zoo, tmp_path):
    lines = (demo_dir() / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[6:9]
    (zoo / "validation.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    content = json.loads((zoo / "zoo.json").read_text(encoding="utf-8"))
    content["validation"] = "validation.jsonl"
    (zoo / "zoo.json").write_text(json.dumps(content), encoding="utf-8")
    report = run_zoo(zoo, output_dir=tmp_path, engine_kwargs={"device": "cpu", "num_pages": 256})
    found = [(row.curve, row.split, row.run.total.num_problems) for row in report.rows]
    assert found == [
        ("blocks", "held-out", 6),
        ("blocks", "validation", 3),
        ("blocks", "validation", 3),
        ("one block", "held-out", 6),  # one setting: there is nothing to choose
    ]
    swept = [row for row in report.rows if row.split == "validation"]
    (point,) = [row for row in swept if row.is_chosen]
    assert point is swept[chosen(swept)]
    assert report.rows[0].setting == point.setting
    text = (tmp_path / "zoo_results.md").read_text(encoding="utf-8")
    assert f"| {point.setting} * |" in text
    assert text.index("## Held-out problems") < text.index("## Validation problems")
    assert "chosen setting, held-out problems" in (tmp_path / "zoo_results.svg").read_text()
    runs = json.loads((tmp_path / "zoo_results.json").read_text(encoding="utf-8"))["runs"]
    assert [run["split"] for run in runs if run["chosen"]] == ["held-out", "validation"]


@pytest.mark.parametrize(
    ("points", "place"),
    [
        ([(990, 3.0), (986, 3.5), (970, 4.0)], 1),  # 0.4 points less for more tokens per forward
        ([(990, 3.0), (984, 3.5)], 0),
        ([(900, 5.0), (990, 3.0), (990, 3.2)], 2),
    ],
)
def test_the_fastest_setting_within_half_a_point_is_chosen(points, place):
    rows = []
    for right, tpf in points:
        score = Score("all", 1000, right, int(1000 * tpf), 1000)
        rows.append(ZooRow("a", "multi_bd", 1, "s", RunReport({}, score, (), {}, ())))
    assert chosen(rows) == place


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON"),
        ("[]", "data and curves"),
        ('{"data": "x", "curves": [{"name": "a"}]}', "name, model"),
        ('{"data": "x", "curves": [{"name": "a", "model": "b", "speed": 1}]}', "speed"),
    ],
)
def test_bad_zoo_files_are_one_clear_error(tmp_path, content, message):
    (tmp_path / "zoo.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_zoo(tmp_path)


def test_missing_places_fail_before_anything_runs(zoo, tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_zoo(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="output_dir"):
        run_zoo(zoo, output_dir=Path(tmp_path / "nowhere"))


def run_command_line(*arguments):
    """`diffulex eval` in a process of its own: it configures the log of the whole process."""
    return subprocess.run(
        [sys.executable, "-m", "diffulex", "eval", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_the_command_line_refuses_what_the_zoo_decides(zoo):
    refused = run_command_line("--zoo", zoo, "--model", "demo", "--buffer-size", "1")
    assert refused.returncode == 2
    assert "got --buffer-size, --model" in refused.stderr
    refused = run_command_line("--output-dir", zoo)
    assert refused.returncode == 2
    assert "expected --zoo" in refused.stderr


@pytest.mark.slow
def test_the_command_line_prints_the_table(zoo):
    done = run_command_line("--zoo", zoo, "--device", "cpu", "--limit", "2")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["setting", "accuracy"]
    assert len(lines) == 6
