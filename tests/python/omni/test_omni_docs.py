# SPDX-License-Identifier: Apache-2.0
"""docs/omni.md: its commands and its program run, its lists are complete."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diffulex.omni import AutoOmniPipeline, OmniDiffusionRequest
from diffulex.tools.cli import main
from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

from PIL import Image  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/omni.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if line.startswith("diffulex")
]


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    path = shutil.copytree(tiny("qwen"), tmp_path_factory.mktemp("docs") / "MODEL")
    defaults = {"height": 64, "width": 64, "num_inference_steps": 3, "true_cfg_scale": 1.0}
    (path / "generation_config.json").write_text(json.dumps({"diffulex": defaults}))
    return path


def test_the_picture_of_the_readme_is_of_its_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"!\[[^\]]*\]\(docs/images/omni_(\w+\.png)\)", readme)
    # Here the commands run, and draw the pictures that are shown.
    assert re.findall(rf"`(diffulex omni [^`]* -o {name})`", readme) == [
        command for command in COMMANDS if command.endswith(f"--seed 1 -o {name}")
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = re.sub(r"--limit \d+", "--limit 2", command)
    command = command.replace("--num-inference-steps 20", "--num-inference-steps 2")
    words = [str(model) if word == "MODEL" else word for word in shlex.split(command)]
    assert main(words[1:]) == 0
    capsys.readouterr()
    written = list(tmp_path.iterdir())
    assert written
    if "MODEL" not in command and written[0].suffix == ".png":
        shown, drawn = (
            np.asarray(Image.open(path), np.float32)
            for path in (ROOT / f"docs/images/omni_{written[0].name}", written[0])
        )
        # Another processor rounds otherwise, which moves some pixels at the borders of shapes.
        assert np.abs(shown - drawn).mean() < 2


PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow  # starts two worker processes
def test_the_program_with_an_event_loop(tmp_path):
    # The bundled model is the one of the source tree.
    command = [sys.executable, "-c", PROGRAMS[2]]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"step {step} of 20" for step in range(1, 21)]
    assert Image.open(tmp_path / "async.png").size == (64, 64)


@pytest.mark.slow
def test_the_program(tmp_path, monkeypatch):
    # The bundled model is the default.
    assert len(PROGRAMS) == 3
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[0], "omni.md", "exec"), {})
    assert {path.name for path in tmp_path.iterdir()} == {
        "circle.png", *(f"step{step}.png" for step in range(1, 9)),
    }  # fmt: skip


@pytest.mark.slow
def test_the_program_with_a_cache(capsys):
    exec(compile(PROGRAMS[1], "omni.md", "exec"), {})
    skipped = json.loads(capsys.readouterr().out)
    assert skipped
    assert set(skipped) < set(range(4, 20))


def test_every_pipeline_and_every_field_is_named():
    assert set(re.findall(r"^\| `(\w+Pipeline)` \|", TEXT, flags=re.MULTILINE)) == {
        *AutoOmniPipeline.available()
    }
    for field in dataclasses.fields(OmniDiffusionRequest):
        assert field.name in ("prompt", "request_id") or f"`{field.name}`" in TEXT, field.name


#: Reports of `diffulex omni eval` behind tables of the document.
REPORTS = sorted(ROOT.glob("benchmarks/results/cpu_omni_*.json"))
SECONDS = ROOT / "benchmarks/results/cpu_omni_seconds.json"
REPORTS.remove(SECONDS)


def cells_of(run):
    """What a row of the document says of a run."""

    def percent(value):
        return "100 %" if value == 1 else f"{100 * value:.1f} %"

    accuracy = run["accuracy"]
    cells = [percent(accuracy[name]) for name in ("all", "shape", "size", "relation")]
    if "blocks_run" in run:
        cells += [percent(run["blocks_run"]), f"{run['num_lost']}, {run['num_gained']} ("]
        change = run["pixel_change"]
        cells.append(f"{change:.4f} |" if change else "0 |")
    return cells


def check_rows(report):
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    for run in report["runs"]:
        cells = cells_of(run)
        assert any(all(cell in row for cell in cells) for row in rows), (run["setting"], cells)


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_tables_are_those_of_their_reports(path):
    assert f"`benchmarks/results/{path.name}`" in TEXT
    report = json.loads(path.read_text())
    assert {"command", "date", "torch", "diffusers"} <= set(report["environment"])
    if "parallel" in path.stem or "settings" in path.stem:
        # Sentences, not a table: the same verdicts with each of them.
        first, *others = report["runs"]
        assert f"{first['num_images']} captions" in TEXT
        assert all((run["num_lost"], run["num_gained"]) == (0, 0) for run in others)
        assert max(run["pixel_change"] for run in others) < 1.5e-4
        return
    check_rows(report)
    wrong = json.loads(path.read_text())
    wrong["runs"][-1]["accuracy"]["all"] -= 0.013
    with pytest.raises(AssertionError):
        check_rows(wrong)


def test_seconds_of_caches_are_those_of_their_report():
    shown: dict[str, set[str]] = {}
    for line in TEXT.splitlines():
        name, *cells = re.sub(r"`| \([a-z' ]+\)", "", line).strip("| ").split(" | ")
        shown.setdefault(name, set()).update(cells)
    for row in json.loads(SECONDS.read_text())["rows"]:
        assert f"{row['median_s']:.2f} s ({row['median_ratio']:.2f})" in shown[row["cache"]]
    assert f"`benchmarks/results/{SECONDS.name}`" in TEXT
