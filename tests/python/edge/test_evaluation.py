# SPDX-License-Identifier: Apache-2.0
"""`edge eval`: programs beside their model on the same problems."""

from __future__ import annotations

import json

import pytest

from diffulex import SamplingParams
from diffulex.tools.cli import main
from diffulex_edge.recipes import split_recipes
from fixtures.edge import ZOO
from fixtures.extras import need_extra

need_extra("edge", "executorch", "torchao")


def test_a_program_answers_as_its_model(bundle, tmp_path, capsys):
    files = [tmp_path / "r.json", tmp_path / "r.md", tmp_path / "r.svg"]
    outputs = [part for file in files for part in ("--output", str(file))]
    command = ["edge", "eval", str(bundle("demo")), "--model", "demo", "--limit", "3", *outputs]
    assert main(command) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["program", "demo", str(bundle("demo"))]
    report = json.loads(files[0].read_text())
    assert report["environment"]["problems"] == 3
    model, program = report["rows"]
    assert (model["quant"], model["file_mb"]) == ("", None)
    assert program["quant"] == "none"
    assert program["same_answers"] == 1
    assert program["lost"] == 0
    assert program["file_mb"] == pytest.approx(18.3, abs=0.5)
    assert program["step_min_ms"] > 0
    assert model["total"]["num_correct"] >= 2
    assert files[1].read_text().count("100.0 %") >= 2
    assert "exact answers, %" in files[2].read_text()


def test_what_a_program_loses_is_shown(bundle, monkeypatch, capsys):
    from diffulex_edge import evaluation

    answer = evaluation.answer_problems

    def cut(engine, problems, params):
        is_program = engine.config.model.load_format == "pte"
        return answer(engine, problems, SamplingParams(max_tokens=2) if is_program else params)

    monkeypatch.setattr(evaluation, "answer_problems", cut)
    command = ["edge", "eval", str(bundle("demo")), "--model", "demo", "--limit", "2", "--json"]
    assert main(command) == 0
    model, program = json.loads(capsys.readouterr().out)["rows"]
    assert model["same_answers"] == 1
    assert program["same_answers"] == 0
    assert program["lost"] == model["total"]["accuracy"] > 0


def test_recipes_are_exported_evaluated_and_removed(monkeypatch, capsys, bundle):
    from diffulex_edge import evaluation

    made = []

    def export(config, **_):
        made.append(config)
        config.output.symlink_to(bundle("demo"))

    monkeypatch.setattr(evaluation, "export_model", export)
    recipes = ["--quant", "none,8da4w-g64,head=none,emb=8"]
    command = ["edge", "eval", "--limit", "1", *recipes, "--model", "demo", "--json"]
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    names = ["demo", "demo none", "demo 8da4w-g64,head=none,emb=8"]
    assert [row["program"] for row in rows] == names
    assert [config.quant for config in made] == ["none", "8da4w-g64,head=none,emb=8"]
    assert not any(config.output.exists() for config in made)


def test_settings_hold_for_the_model_and_its_programs(bundle, monkeypatch, capsys):
    from diffulex_edge import evaluation

    answer, seen = evaluation.answer_problems, []

    def record(engine, problems, params):
        seen.append((engine.config.decoding.buffer_size, engine.config.decoding.block_size))
        return answer(engine, problems, params)

    monkeypatch.setattr(evaluation, "answer_problems", record)
    command = ["edge", "eval", str(bundle("demo")), "--model", "demo", "--limit", "1"]
    assert main([*command, "--buffer-size", "2", "--block-size", "4"]) == 0
    assert seen == [(2, 4)] * 2
    assert main([*command, "--help-all"]) == 0
    assert "--fdv2-use-block-cache" in capsys.readouterr().out


def test_lists_of_recipes():
    assert split_recipes("none, 8da8w") == ["none", "8da8w"]
    assert split_recipes("8da4w-g64,head=none,emb=8,none") == ["8da4w-g64,head=none,emb=8", "none"]
    assert split_recipes("8da4w-g64,hqq,8da8w") == ["8da4w-g64,hqq", "8da8w"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quant", "9bit"], "quant: expected one of "),
        (["--quant", "8w"], "quant: expected one of none, fp16, 8da8w, 8da4w, pt2e_dyn8,"),
        (["/no/such/bundle"], "/no/such/bundle"),
        (["BUNDLE", "--quant", "none"], "quant: expected a model to export, got none"),
        (["--output", "x.csv"], "output: expected a .json, .md or .svg file, got 'x.csv'"),
        (["--data", "/no/such"], "data: cannot read /no/such"),
        (["--limit", "0"], "--limit: expected an integer of at least 1, got '0'"),
        (["--temperature", "-1"], "temperature: expected"),
        (["--accept-threshold", "2"], "accept_threshold: expected"),
        (["--decoding-strategy", "d3f"], "decoding_strategy: expected"),
    ],
)
def test_errors_are_one_line_and_nothing_runs(bundle, capsys, monkeypatch, arguments, message):
    from diffulex_edge import evaluation

    def never(*_, **__):
        raise AssertionError("something ran")

    monkeypatch.setattr(evaluation, "export_model", never)
    monkeypatch.setattr(evaluation, "answer_problems", never)
    words = [str(bundle("demo")) if word == "BUNDLE" else word for word in arguments]
    assert main(["edge", "eval", *words]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert captured.out == ""


def test_a_model_that_cannot_be_exported_is_not_asked(capsys, monkeypatch):
    from diffulex_edge import evaluation

    asked = []
    monkeypatch.setattr(evaluation, "answer_problems", lambda *_: asked.append(1))
    model = str(ZOO / "dmax_llada2")
    assert main(["edge", "eval", "--model", model, "--quant", "none", "--limit", "1"]) == 2
    assert "edge: expected a model of the families" in capsys.readouterr().err
    assert asked == []


def test_doctor_knows_the_backends():
    from diffulex.tools import doctor

    assert doctor._edge_backends()["xnnpack"] == "exports and runs"
    assert doctor._version("executorch").startswith("1.5")
    assert doctor._version("no-such-package") == "not installed"
