# SPDX-License-Identifier: Apache-2.0
"""`edge verify`, `estimate` and `bench`, and the functions behind them."""

from __future__ import annotations

import json

import pytest
import torch

from diffulex.checkpoint.auto_model import detect
from diffulex.errors import ConfigError
from diffulex.tools.cli import main
from diffulex_edge.backends import BACKENDS
from diffulex_edge.bundle import read_bundle
from diffulex_edge.errors import ProgramError
from diffulex_edge.exporter import load_decoder
from diffulex_edge.measure import estimate, longest_length, parse_bytes
from diffulex_edge.presets import PRESETS, preset_spec
from diffulex_edge.recipes import parse_recipe
from diffulex_edge.self_check import Agreement
from diffulex_edge.verify import (
    BundleReport,
    EquivalenceReport,
    stock_model,
    verify_bundle,
    verify_model,
    verify_numerical_equivalence,
)
from fixtures.edge import DEMO
from fixtures.extras import need_extra
from fixtures.families import DENSE_FAMILIES, family_builder

need_extra("edge", "executorch", "torchao")


def inputs(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (20,), generator=generator) for _ in range(count)]


class TestEquivalence:
    @pytest.mark.parametrize("family", DENSE_FAMILIES)
    def test_every_family_equals_its_stock_decoder(self, checkpoint, family):
        path = checkpoint(family)
        model = load_decoder(path, detect(path, family)[1], 64, BACKENDS["xnnpack"])
        for mode in ("full", "block_causal"):
            report = verify_numerical_equivalence(path, model, inputs(), attention_mode=mode)
            assert report, str(report)
            assert "equal" in str(report)
            assert len(report.inputs) == 3
        assert verify_numerical_equivalence(
            path, model, inputs(1), attention_mode="d2f", prompt_len=7
        )

    def test_takes_a_model_that_is_built_already(self, checkpoint):
        path = checkpoint("sdar")
        spec = detect(path)[1]
        model = load_decoder(path, spec, 64, BACKENDS["xnnpack"])
        assert verify_numerical_equivalence(stock_model(spec, model), model, inputs(1))

    @pytest.mark.parametrize("family", ["sdar", "dream", "llada", "fast_dllm_v2"])
    def test_a_checkpoint_by_its_path(self, checkpoint, family):
        report = verify_model(checkpoint(family), num_inputs=2)
        assert report, str(report)
        assert len(report.inputs) == 2
        assert not verify_model(checkpoint(family), 1e-12, num_inputs=1)

    def test_nothing_to_compare_is_no_equality(self, checkpoint):
        with pytest.raises(ConfigError, match="test_inputs: expected one input or more, got none"):
            verify_model(checkpoint("sdar"), num_inputs=0)
        with pytest.raises(ConfigError, match="tolerance: expected a finite number > 0"):
            verify_model(checkpoint("sdar"), 0.0)

    def test_finds_a_changed_weight(self, checkpoint):
        path = checkpoint("sdar")
        model = load_decoder(path, detect(path)[1], 64, BACKENDS["xnnpack"])
        model.norm.weight[0] += 0.5
        report = verify_numerical_equivalence(path, model, inputs(1))
        assert not report
        assert "DIFFERENT" in str(report)
        assert report.to_json()["passed"] is False

    def test_command(self, bundle, capsys):
        command = ["edge", "verify", str(bundle("demo")), "--reference", "demo", "--json"]
        assert main([*command, "--inputs", "1"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["passed"]
        assert report["program"]["argmax"] == 1

    def test_command_names_the_link(self, bundle, capsys):
        command = ["edge", "verify", str(bundle("demo")), "--reference", "demo", "--inputs", "1"]
        for tolerance, text in (
            ("1e-12", "verify: transformers and decoder: expected equal logits, got DIFFERENT"),
            ("nan", "tolerance: expected a finite number > 0, got nan"),
            ("0", "tolerance: expected a finite number > 0, got 0.0"),
        ):
            assert main([*command, "--tolerance", tolerance]) != 0
            assert f"error: {text}" in capsys.readouterr().err

    def test_a_tighter_tolerance_holds_for_the_program(self):
        link = EquivalenceReport((), 1e-6)
        found = Agreement(max_error=1e-5, scale=1.0, argmax=1.0, is_finite=True, num_rows=1)
        assert BundleReport(link, found, parse_recipe("none")).passed
        with pytest.raises(ProgramError, match="verify: decoder and program: expected logits"):
            BundleReport(link, found, parse_recipe("none"), 1e-6).check()

    def test_command_takes_what_the_export_takes(self, bundle, capsys):
        command = ["edge", "verify", str(bundle("demo")), "--reference", "demo", "--inputs", "1"]
        assert main([*command, "--model-name", "llada"]) == 2
        assert "model_name: expected the family of the checkpoint" in capsys.readouterr().err
        assert main([*command, "--lora", "/nowhere"]) == 2
        assert "adapter: /nowhere: expected a file" in capsys.readouterr().err

    def test_quantised(self, bundle, checkpoint, tmp_path):
        path = bundle("sdar-8da8w")
        assert verify_bundle(path, checkpoint("sdar"), num_inputs=1).passed
        wrong = tmp_path / "wrong"
        family_builder("sdar", seed=5).write(wrong)
        report = verify_bundle(path, wrong, num_inputs=1)
        assert report.decoder
        assert not report.passed
        with pytest.raises(ProgramError, match="verify: decoder and program: expected"):
            report.check()

    def test_command_refuses_another_model(self, bundle, checkpoint, capsys):
        reference = str(checkpoint("llada"))
        assert main(["edge", "verify", str(bundle("demo")), "--reference", reference]) == 1
        assert "expected a reference of family" in capsys.readouterr().err


class TestEstimate:
    @pytest.mark.parametrize("name", ["demo", "llada", "fast_dllm_v2"])
    def test_file_size(self, bundle, name):
        found = read_bundle(bundle(name))
        spec = detect(found.directory)[1]
        expected = estimate(spec, parse_recipe(found.quant), found.max_model_len)
        limit = 0.02 if name == "demo" else 0.1  # the graph weighs more than a tiny model
        assert abs(found.program_bytes / expected.file - 1) <= limit

    def test_cache_bytes(self):
        spec = detect(DEMO)[1]
        expected = 6 * 2 * 2 * 544 * 64 * 4
        assert estimate(spec, parse_recipe("none"), 512).cache == expected

    def test_quantised_programs_are_smaller(self):
        spec = detect(DEMO)[1]
        sizes = [estimate(spec, parse_recipe(q), 512).file for q in ("none", "8da8w", "8da4w")]
        assert sizes == sorted(sizes, reverse=True)

    def test_longest_length_fits_and_the_next_does_not(self):
        spec, recipe = detect(DEMO)[1], parse_recipe("8da4w")
        budget = estimate(spec, recipe, 300).resident
        assert longest_length(spec, recipe, budget) == 300
        assert longest_length(spec, recipe, 1000) == 0

    def test_command(self, capsys):
        assert main(["edge", "estimate", "--budget", "1GB", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["longest_max_model_len"] == 512
        parts = report["weights"] + report["rotary"] + report["graph"]
        assert report["file"] == parts

    @pytest.mark.parametrize(("text", "size"), [("2GB", 2e9), ("500 mb", 5e8), ("1.5e9", 1.5e9)])
    def test_sizes(self, text, size):
        assert parse_bytes(text) == size

    @pytest.mark.parametrize("text", ["", "many", "-1GB", "nan"])
    def test_malformed_sizes(self, text):
        with pytest.raises(ConfigError, match="budget: expected a size such as 2GB"):
            parse_bytes(text)


def test_bench_compares_programs(bundle, capsys):
    command = ["edge", "bench", str(bundle("llada")), str(bundle("fast_dllm_v2")), "--repeat", "3"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["bundle"] for row in rows] == ["llada", "fast_dllm_v2"]
    assert all(0 < row["step_min_ms"] <= row["step_median_ms"] for row in rows)


def test_bench_names_a_program_that_does_not_run(tmp_path, capsys, bundle):
    import shutil

    path = shutil.copytree(bundle("llada"), tmp_path / "broken")
    (path / "model.pte").write_bytes(b"nothing")
    assert main(["edge", "bench", str(path)]) == 1
    expected = f"program: {path}/model.pte: expected an ExecuTorch program, got another file"
    assert capsys.readouterr().err == f"error: {expected}\n"


@pytest.mark.parametrize("threads", ["-1", "0"])
def test_bench_refuses_threads(capsys, threads):
    assert main(["edge", "bench", "demo", f"--threads={threads}"]) == 2
    assert f"threads: expected >= 1, got {threads}" in capsys.readouterr().err


def test_bench_refuses_more_rows_than_a_program_takes(bundle, capsys):
    path = bundle("demo")
    assert main(["edge", "bench", str(path), "--rows", "257"]) == 2
    assert capsys.readouterr().err == f"error: rows: expected at most 256 for {path}, got 257\n"


class TestPresets:
    @pytest.mark.parametrize(
        ("name", "parameters"),
        # Those of the published safetensors files, in thousands of millions.
        [("dream-7b", 7.616), ("fast_dllm_v2-7b", 7.616), ("llada-8b", 8.016), ("sdar-8b", 8.191)],
    )
    def test_published_sizes(self, name, parameters):
        weights = estimate(preset_spec(name), parse_recipe("none"), 512).weights
        assert weights / 4e9 == pytest.approx(parameters, abs=0.001)

    @pytest.mark.parametrize("name", PRESETS)
    def test_every_one_is_a_model_that_can_be_exported(self, name, capsys):
        spec = preset_spec(name)
        assert spec.family == PRESETS[name].family
        assert spec.num_q_heads % spec.num_kv_heads == 0
        command = ["edge", "estimate", "--preset", name, "--budget", "2GB", "--json"]
        assert main(command) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["resident"] > report["file"] > 5e8
        assert report["longest_max_model_len"] >= 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--preset", "llada"], "preset: expected one of fast_dllm_v2-1.5b, "),
            (["--preset", "llada-8b", "--model", "x"], "not allowed with argument"),
        ],
    )
    def test_errors(self, capsys, arguments, message):
        assert main(["edge", "estimate", *arguments]) == 2
        assert message in capsys.readouterr().err
