# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of decode steps and prefill on tiny shapes, and what their figures are held against."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from fixtures.bench_scripts import SCRIPTS, run

# Some start several processes that import torch, and the host may do other work.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
def test_decode_step(tmp_path):
    output = tmp_path / "steps.jsonl"
    text = run(
        "bench_decode_step.py",
        *("--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--batch", "1,3"),
        *("--buffer-size", "1,2", "--block-size", 4, "--prompt-len", 16),
        *("--warmup", 2, "--steps", 6, "--output", output),
        *("--run-ahead", "on", "--packing", "on,off"),
    )
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    shapes = [(1, 1, 4), (3, 1, 12), (1, 2, 8), (3, 2, 24)]
    assert [(x["batch"], x["buffer"], x["rows"], x["packing"]) for x in lines] == [
        (*shape, packing) for shape in shapes for packing in ("on", "off")
    ]
    assert all(x["packed"] == 0 for x in lines)  # it would not pay
    for line in lines:
        assert line["steps"] == 6
        assert 0 < line["p10_ms"] <= line["step_ms"] <= line["p90_ms"]
        assert line["floor_ms"] > 0
        assert line["shape"] == "tiny"
        assert {"device", "torch", "date"} <= line.keys()
    assert [json.loads(x) for x in text.splitlines() if x.startswith("{")] == lines
    assert text.count("|") > 5 * len(lines)


@pytest.mark.slow
def test_decode_step_counts_experts(tmp_path):
    """Of a model with experts the floor reads those that rows were sent to."""
    document = tmp_path / "steps.json"
    text = run(
        "bench_decode_step.py",
        *("--shape", "tiny-moe", "--device", "cpu", "--dtype", "float32", "--batch", "1,2"),
        *("--buffer-size", 1, "--block-size", 4, "--prompt-len", "8,20", "--run-ahead", "on"),
        *("--warmup", 2, "--steps", 4, "--max-model-len", 100, "--json", document),
    )
    rows = json.loads(document.read_text())["results"]
    assert [(row["prompt_len"], row["batch"]) for row in rows] == [(8, 1), (8, 2), (20, 1), (20, 2)]
    for row in rows:
        assert 2 <= row["experts"] <= row["experts_total"] == 8
        assert "verdict" not in row
    # The same model reads more where more experts are hit.
    by_experts = sorted((row["experts"], row["weight_bytes"]) for row in rows)
    assert by_experts == sorted(by_experts, key=lambda pair: pair[1])
    assert "experts" in text


@pytest.mark.slow
def test_decode_step_counts_the_experts_of_a_rank(tmp_path):
    """Two ranks have four whole experts each: their width is too small to be cut."""
    document = tmp_path / "steps.json"
    run(
        "bench_decode_step.py",
        *("--shape", "tiny-moe", "--device", "cpu", "--dtype", "float32", "--batch", 4),
        *("--buffer-size", 1, "--block-size", 4, "--prompt-len", 8, "--run-ahead", "off"),
        *("--warmup", 2, "--steps", 4, "--tp", "1,2", "--json", document),
    )
    alone, shared = json.loads(document.read_text())["results"]
    assert (alone["tp"], shared["tp"]) == (1, 2)
    assert 0 < shared["experts"] <= 4 < alone["experts"] <= 8
    assert 0 < shared["weight_bytes"] < alone["weight_bytes"]


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        ({"step_ms": 4.0, "target_ms": 4.0, "floor_ms": 1.0}, "pass"),
        ({"step_ms": 4.1, "target_ms": 4.0, "floor_ms": 9.0}, "miss"),
        ({"step_ms": 4.1, "target_ms": 4.0, "floor_ms": 3.3, "experts": 9.0}, "pass"),
        ({"step_ms": 4.1, "floor_ms": 3.2, "experts": 9.0}, "miss"),
        ({"step_ms": 4.1, "floor_ms": 9.0}, None),
    ],
)
def test_step_verdicts(monkeypatch, row, verdict):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    assert import_module("step_targets").judge(row) == verdict


def test_steps_are_judged_by_the_targets_of_their_scheme(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench = import_module("bench_decode_step")
    targets = import_module("step_targets").TARGETS
    given = {case._replace(target_ms=None, peer_ms=None) for case in targets}
    assert len(given) == len(targets)

    def asked(*flags):
        return bench.cases_of(bench.parse(["--targets", *flags]))

    by_scheme = {}
    for scheme in ("none", "fp8", "int4"):
        cases = asked("all", "--quantization", scheme, "--kv-cache-dtype", "auto")
        assert {(case.quantization, case.kv_cache_dtype) for case in cases} == {(scheme, "auto")}
        plain = [case for case in cases if case.is_packing and not case.quantize_head]
        by_scheme[scheme] = {case[:4]: case.target_ms for case in plain}
    # All of a scheme, unless a cache is named.
    every = asked("all", "--quantization", "fp8")
    assert sorted({case.kv_cache_dtype for case in every}) == ["auto", "fp8_e4m3"]
    assert {case.target_ms for case in every if not case.is_packing} == {14.5}
    assert {case.target_ms for case in every if case.quantize_head} == {4.4}
    of_family = import_module("step_targets").of_family
    gemma = "diffusion-gemma-26b-a4b"
    assert [of_family(gemma, 1, scheme, 1024) for scheme in ("none", "fp8")] == [15.0, 8.8]
    assert of_family("sdar-8b", 1, "none", 1024) is of_family(gemma, 1, "fp8", 64) is None
    # Figures of 4 bits are of experts that have no more.
    kept = [case for case in asked("all", "--quantization", "int4") if "llada2" in case.shape]
    assert [(case.quantization_ignore, case.target_ms) for case in kept] == [
        ((), 1.7),
        ((), 3.2),
        ((), 4.0),
    ]
    batch_1 = ("sdar-8b", 1, 256, 1)
    assert [each[batch_1] for each in by_scheme.values()] == [4.4, 2.85, 2.15]
    # Steps run valid rows alone, so that four blocks have nothing for the others.
    assert by_scheme["none"][("sdar-8b", 4, 256, 8)] == 8.6
    judged = {"step_ms": 3.28, "floor_ms": 1.99}
    verdicts = [bench.judge({**judged, "target_ms": each[batch_1]}) for each in by_scheme.values()]
    assert verdicts == ["pass", "miss", "miss"]
    coded = asked("sdar-8b", "--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3")
    assert [case.target_ms for case in coded] == [5.3]
    for flags in (["--quantization", "int8"], ["--kv-cache-dtype", "fp8_e4m3"], ["--tp", "2"]):
        with pytest.raises(SystemExit):
            asked("all", *flags)
        assert "--targets: nothing is asked of" in capsys.readouterr().err


@pytest.mark.slow
def test_decode_step_of_choices(tmp_path, monkeypatch, capsys):
    """Cases of one model follow each other; those of a family have its strategy and sizes."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench = import_module("bench_decode_step")
    shapes = import_module("published_shapes").SHAPES
    gemma = "diffusion-gemma-26b-a4b"
    tiny = {name: shapes[name].tiny() for name in ("tiny-moe", gemma)}
    monkeypatch.setattr(bench, "SHAPES", tiny)
    built = []

    def build_model(*arguments, **settings):
        built.append((settings["quantize_head"], settings["ignore"]))
        return import_module("random_engine").build_model(*arguments, **settings)

    monkeypatch.setattr(bench, "build_model", build_model)
    case = import_module("step_targets").StepCase("tiny-moe", 1, 16, 1, 4, "int4")
    given = [
        case,
        case._replace(quantization_ignore=("*.mlp.experts*",), target_ms=1e6),
        case._replace(batch=2, is_packing=False, target_ms=0.0),
        case._replace(shape=gemma, buffer_size=None, block_size=None),
    ]
    monkeypatch.setattr(bench, "cases_of", lambda options: list(given))
    output = tmp_path / "steps.json"
    flags = ["--targets", "all", "--quantization", "int4", "--device", "cpu", "--dtype", "float32"]
    assert bench.main([*flags, "--warmup", "1", "--steps", "3", "--json", str(output)]) == 0
    assert built == [(False, None), (False, ("*.mlp.experts*",)), (False, None)]
    content = json.loads(output.read_text())
    assert "commit" in content
    rows = content["results"]
    assert [(row["batch"], row["packing"], row["kept"]) for row in rows] == [
        (1, "on", "nothing"),
        (2, "off", "nothing"),
        (1, "on", "*.mlp.experts*"),
        (1, "on", "*.self_attn.*"),
    ]
    assert rows[0]["weight_bytes"] < rows[2]["weight_bytes"]
    assert (rows[3]["block"], rows[3]["rows"]) == (16, 16)
    assert [row.get("verdict") for row in rows[1:3]] == ["miss", "pass"]
    assert "*.self_attn.*" in capsys.readouterr().out


def test_serving_is_judged_by_its_targets(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench = import_module("bench_serving_overhead")
    flags = ["--shape", "sdar-8b", "--output-len", "64"]

    def judged(concurrency, speed, *more):
        row = {"concurrency": concurrency, "server_tok_s": speed}
        bench.add_targets(bench.parse([*flags, *more]), row)
        return row.get("target_tok_s"), row.get("verdict")

    fp8 = ("--engine-arg", "quantization=fp8")
    assert judged(64, 6000.0, *fp8) == (6000, "pass")
    assert judged(16, 2999.9, *fp8) == (3000, "miss")
    assert judged(2, 1e9, *fp8) == judged(64, 1e9) == (None, None)
    assert judged(64, 1e9, *fp8, "--input-len", "8") == (None, None)


def test_prefill_is_judged_by_its_share(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench = import_module("bench_prefill")
    rows = []
    for scheme, num_ranks, step_ms in (
        ("none", 1, 100),
        ("none", 2, 60),
        ("fp8", 1, 69),
        ("fp8", 2, 40),
    ):
        rows.append({"shape": "sdar-8b", "quantization": scheme, "tp": num_ranks, "tokens": 8192})
        rows[-1]["step_ms"] = step_ms
        bench.compare(rows)
    assert [row["speedup"] for row in rows] == [1, 1.667, 1, 1.725]
    assert [row["of_first"] for row in rows] == [1, 1, 0.69, 0.667]
    assert [row.get("verdict") for row in rows] == [None, None, "miss", None]
    rows[2]["step_ms"] = 68
    bench.compare(rows[:3])
    assert (rows[2]["target"], rows[2]["verdict"]) == (0.68, "pass")


@pytest.mark.slow
def test_prefill(tmp_path):
    output = tmp_path / "prefill.json"
    run(
        "bench_prefill.py",
        *("--tiny", "--device", "cpu", "--dtype", "float32", "--tp", "1,2", "--tokens", "40,80"),
        *("--block-size", 4, "--warmup", 1, "--repeat", 3, "--json", output),
    )
    rows = json.loads(output.read_text())["results"]
    assert [(row["tp"], row["tokens"]) for row in rows] == [(1, 40), (1, 80), (2, 40), (2, 80)]
    assert [row["speedup"] for row in rows[:2]] == [1, 1]
    for row in rows:
        assert row["steps"] == 3
        assert row["tok_s"] == pytest.approx(1e3 * row["tokens"] / row["step_ms"], rel=1e-3)


@pytest.mark.slow
def test_prefill_of_schemes(tmp_path):
    output = tmp_path / "prefill.json"
    text = run(
        "bench_prefill.py",
        *("--tiny", "--device", "cpu", "--dtype", "float32", "--quantization", "none,fp8,int4"),
        *("--tokens", 40, "--block-size", 4, "--warmup", 1, "--repeat", 2, "--json", output),
    )
    rows = json.loads(output.read_text())["results"]
    assert [row["quantization"] for row in rows] == ["none", "fp8", "int4"]
    assert [row["speedup"] for row in rows] == [1, 1, 1]
    assert rows[0]["of_first"] == 1
    assert "of_first" in text
    assert "verdict" not in text
