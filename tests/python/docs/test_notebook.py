# SPDX-License-Identifier: Apache-2.0
"""Example notebooks and programs run, and what they show is what happened."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffulex import Diffulex, denoising, registry
from diffulex.checkpoint.resolve import demo_dir
from diffulex.engine.terminal import MASK_CHAR

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"
QUESTION = "Ben has 8 coins. He loses 3 coins. How many coins does Ben have now?"
pytestmark = pytest.mark.skipif(
    not (demo_dir() / "model.safetensors").is_file(), reason="the bundled model is not in this tree"
)


@pytest.fixture(scope="module")
def engine():
    with Diffulex("demo", device="cpu", max_num_reqs=1) as engine:
        yield engine


def run_cells(name: str) -> dict[str, Any]:
    """All cells of a notebook in one namespace, as a kernel would."""
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs belong to whoever ran it"
            exec("".join(cell["source"]), names)
    return names


def test_cells_run_in_order() -> None:
    names = run_cells("first_steps")
    assert names["answer"].text.endswith("#### 5")
    assert len(names["outputs"]) == 6
    forwards = [names["table"][threshold][0] for threshold in (0.5, 0.9, 1.0)]
    assert forwards == sorted(forwards)


@pytest.mark.slow
def test_strategies_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (EXAMPLES.parent / "zoo" / "dmax_llada2" / "model.safetensors").is_file():
        pytest.skip("the zoo is not in this tree")
    monkeypatch.chdir(EXAMPLES)
    names = run_cells("comparing_strategies")
    assert len(capsys.readouterr().out.splitlines()) == len(names["scores"]) == 3
    for score in names["scores"].values():
        assert score.num_correct >= 6
        assert score.tpf > 1
    assert all(picture.output.text for picture in names["pictures"])


def test_a_strategy_of_ones_own() -> None:
    registries = [
        getattr(registry, name)
        for name in ("AutoReq", "AutoKVCacheManager", "AutoScheduler", "AutoModelRunner")
    ]
    try:
        answers = run_cells("own_strategy")["answers"]
    finally:
        for item in registries:
            item.unregister("one_by_one")
    plain, slow = answers["multi_bd"], answers["one_by_one"]
    assert slow.text.endswith("#### 5")
    assert slow.metrics.nfe >= slow.metrics.completion_tokens > plain.metrics.nfe


def run_example(*arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / arguments[0]), *arguments[1:]],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_a_file_of_questions(tmp_path: Path) -> None:
    source, target = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    source.write_text(f"{QUESTION}\n{QUESTION.replace('8', '9')}\n", encoding="utf-8")
    assert run_example("batch.py", str(source), str(target))[0].startswith("2 answers, ")
    rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [row["answer"].splitlines()[-1] for row in rows] == ["#### 5", "#### 6"]
    assert all(row["forwards"] >= 1 for row in rows)


@pytest.mark.slow
def test_answers_as_they_come() -> None:
    lines = run_example("streaming.py", QUESTION)
    pieces = [eval(line.partition(" ")[2]) for line in lines if line.startswith("0: '")]
    assert "".join(pieces).endswith("#### 5")
    assert lines[: len("".join(pieces).splitlines())] == "".join(pieces).splitlines()
    assert re.fullmatch(r"0: done after \d+ forwards", lines[-1])


@pytest.mark.slow
def test_an_answer_with_a_form() -> None:
    first, second = map(json.loads, run_example("structured.py"))
    assert first == {"had": 8, "lost": 3, "left": 5, "answer": 5}
    assert second == {"had": 9, "lost": 4, "left": 5, "answer": 5}


def test_what_is_printed_of_objects(engine) -> None:
    outputs = engine.generate(QUESTION, use_chat_template=True, summary=False)
    assert repr(outputs) == f"GenerationOutputs([{outputs[0].text!r}])"
    assert repr(engine) == "<Diffulex demo: multi_bd on cpu>"
    assert repr(Diffulex.__new__(Diffulex)) == "<Diffulex that could not be built>"


def test_rows_are_the_forwards(engine) -> None:
    picture = denoising(engine, QUESTION, accept_threshold=1.0)
    assert len(picture.rows) == picture.output.metrics.nfe + 1
    assert MASK_CHAR in picture.rows[0][0].text
    assert (
        picture.text
        == engine.chat(
            [{"role": "user", "content": QUESTION}], accept_threshold=1.0, summary=False
        ).text
    )
    lines = str(picture).splitlines()
    assert [int(line.split("|")[0]) for line in lines] == list(range(len(picture.rows)))
    shown = picture._repr_html_()
    assert shown.count("\n") + 1 == len(picture.rows)
    assert f"{len(picture.rows) - 1} forwards" in repr(picture)


def test_text_of_a_model_is_no_markup(engine) -> None:
    picture = denoising(engine, QUESTION)
    rows = [[span._replace(text="<script>\x1b") for span in row] for row in picture.rows]
    shown = type(picture)(rows, picture.output)._repr_html_()
    assert "<script>" not in shown
    assert "\x1b" not in shown
    outputs = engine.generate(QUESTION, use_chat_template=True, summary=False)
    assert "#### 5" in outputs._repr_html_()
    assert "forwards" in outputs[0]._repr_html_()
