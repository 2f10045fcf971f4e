# SPDX-License-Identifier: Apache-2.0
"""What weights in low precision cost: pairs of runs, limits, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import diffulex
from diffulex import Diffulex
from diffulex.bench.evaluate import RunReport, Score
from diffulex.bench.zoo import read_zoo
from diffulex.bench.zoo_schemes import (
    CURVES,
    LIMITS,
    MAX_EDIT_TPF_CHANGE,
    MAX_TPF_CHANGE,
    compare,
    main,
    table,
)
from diffulex.checkpoint.resolve import demo_dir

ROOT = Path(__file__).resolve().parents[3]


def report(wrong: set[int], tokens: int = 3000) -> RunReport:
    score = Score("all", 100, 100 - len(wrong), tokens, 1000)
    return RunReport({}, score, (), {}, tuple(wrong))


def test_a_row_pairs_the_answers_of_two_runs() -> None:
    row = compare("one", "int8", report({1, 2, 3}), report({3, 4}, 3030))
    assert (row.lost, row.gained, row.num_correct) == (1, 2, 98)
    assert row.points == pytest.approx(1.0)
    # Of 100 pairs two gained and one lost: variance 0.03 - 0.01^2.
    assert row.error == pytest.approx(100 * (0.0299 / 100) ** 0.5)
    assert row.tpf_change == pytest.approx(1.0)
    assert row.is_accepted


@pytest.mark.parametrize(
    ("curve", "scheme", "num_lost", "tokens", "is_accepted"),
    [
        ("one", "int8", 1, 3000, True),
        ("one", "int8", 2, 3000, False),
        ("one", "int4", 2, 3000, True),
        ("one", "int4", 3, 3000, False),
        ("one", "kv", 0, 3000, True),
        ("one", "kv", 1, 3000, False),
        ("one", "fp8+kv", 1, 3000, True),
        ("one", "fp8+kv", 2, 3000, False),
        ("one", "fp8", 0, 3089, True),
        ("one", "fp8", 0, 3100, False),
        ("one", "fp8", 0, 2900, False),
        ("edit (LLaDA2)", "fp8", 0, 3100, True),
        ("edit (LLaDA2)", "fp8", 0, 3130, False),
    ],
)
def test_limits(curve: str, scheme: str, num_lost: int, tokens: int, is_accepted: bool) -> None:
    row = compare(curve, scheme, report(set()), report(set(range(num_lost)), tokens))
    assert row.is_accepted == is_accepted
    assert row.cells()[-1] == ("yes" if is_accepted else "no")


def test_the_table_ends_with_means() -> None:
    rows = [
        compare(name, "fp8", report(set()), report(wrong))
        for name, wrong in [("one", {1}), ("two", set())]
    ]
    assert table(rows)[-1].split("|")[1:-1] == [" fp8 ", " -0.50 ", " -0.5 ", " yes "]
    rows.append(compare("three", "fp8", report(set()), report({1, 2})))
    assert table(rows)[-1].endswith(" no |")


def test_the_curves_are_seven_of_the_zoo() -> None:
    names = [curve.name for curve in read_zoo(ROOT / "examples/zoo").curves]
    assert sum(name.startswith(CURVES) for name in names) == len(CURVES) == 7


def test_the_command_runs_every_scheme(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (demo_dir() / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    curves = [
        {"name": name, "model": "demo", "engine": {}, "sampling": {"max_tokens": 64}}
        for name in ("multi_bd, 1 block", "not in the table")
    ]
    (tmp_path / "zoo.json").write_text(json.dumps({"data": "problems.jsonl", "curves": curves}))
    output = tmp_path / "table.md"
    seen, given = [], []

    def engine(**settings: Any) -> diffulex.Diffulex:
        made = Diffulex(**settings)
        seen.append((made.config.model.quantization, made.config.cache.kv_cache_dtype))
        given.append(settings.get("quantization_ignore"))
        return made

    monkeypatch.setattr(diffulex, "Diffulex", engine)
    schemes = ("int8", "kv", "fp8+kv")
    assert main([str(tmp_path), "--schemes", *schemes, "--output", str(output)]) == 0
    assert seen == [("none", "auto"), ("int8", "auto"), ("none", "fp8_e4m3"), ("fp8", "fp8_e4m3")]
    assert capsys.readouterr().out.count("\n") == 3
    text = output.read_text(encoding="utf-8")
    assert all(f"| multi_bd, 1 block | {scheme} |" in text for scheme in schemes)
    assert "not in the table" not in text
    assert given == [None] * 4
    chosen = ["--schemes", "int4+all", "--curves", "not in"]
    assert main([str(tmp_path), *chosen, "--output", str(output)]) == 0
    assert (given[4:], seen[4:]) == ([None, ()], [("none", "auto"), ("int4", "auto")])
    assert "| not in the table | int4+all |" in output.read_text(encoding="utf-8")


def test_a_zoo_without_these_curves_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = {"name": "another", "model": "demo", "engine": {}, "sampling": {}}
    (tmp_path / "zoo.json").write_text(json.dumps({"data": "problems.jsonl", "curves": [curve]}))
    expected = f"error: --curves: expected beginnings of the curves of {tmp_path}, got "
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{expected}'multi_bd, 1 block', 'multi_bd, 4 blocks', ")
    assert not printed.out
    # Also where others match.
    assert main([str(tmp_path), "--curves", "anther", "anot", "nother"]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"{expected}'anther', 'nother', which no curve begins with\n"
    assert not printed.out


def test_the_document_has_the_limits() -> None:
    text = " ".join((ROOT / "docs/quantization.md").read_text(encoding="utf-8").split())
    (mean, curve), (mean4, curve4) = LIMITS["int8"], LIMITS["int4"]
    assert LIMITS["kv"][0] == mean
    assert LIMITS["fp8+kv"] == (curve, curve)
    assert LIMITS["int4+all"] == (mean4, curve4)
    assert (
        f"loses at most {mean:g} points (`int4`: {mean4:g}), no curve more than {curve:g}"
        f" (`int4`: {curve4:g}, a cache of 8 bits alone: {LIMITS['kv'][1]:g}), and the tokens per forward stay within {MAX_TPF_CHANGE:g} %"
        f" ({MAX_EDIT_TPF_CHANGE:g} % on the curve of `edit`)"
    ) in text
