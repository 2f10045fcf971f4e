# SPDX-License-Identifier: Apache-2.0
"""The example notebook runs, and what it shows is what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffulex import Diffulex, denoising
from diffulex.checkpoint.resolve import demo_dir
from diffulex.engine.terminal import MASK_CHAR

NOTEBOOK = Path(__file__).resolve().parents[3] / "examples" / "python" / "first_steps.ipynb"
QUESTION = "Ben has 8 coins. He loses 3 coins. How many coins does Ben have now?"
pytestmark = pytest.mark.skipif(
    not (demo_dir() / "model.safetensors").is_file(), reason="the bundled model is not in this tree"
)


@pytest.fixture(scope="module")
def engine():
    with Diffulex("demo", device="cpu", max_num_reqs=1) as engine:
        yield engine


def test_cells_run_in_order() -> None:
    """All of them in one namespace, as a kernel would."""
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs belong to whoever ran it"
            exec("".join(cell["source"]), names)
    assert names["answer"].text.endswith("#### 5")
    assert len(names["outputs"]) == 6
    forwards = [names["table"][threshold][0] for threshold in (0.5, 0.9, 1.0)]
    assert forwards == sorted(forwards)


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
