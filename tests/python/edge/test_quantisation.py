# SPDX-License-Identifier: Apache-2.0
"""Recipes, what their programs keep of the model, and what the self-check finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from diffulex import Diffulex
from diffulex.checkpoint.auto_model import detect
from diffulex.checkpoint.resolve import demo_dir
from diffulex.errors import ConfigError
from diffulex.tools.cli import main
from diffulex_edge import exporter
from diffulex_edge.backends import BACKENDS
from diffulex_edge.bundle import read_bundle
from diffulex_edge.errors import ProgramError
from diffulex_edge.exporter import ExportConfig, export_model, load_decoder
from diffulex_edge.lowering import ProgramShape
from diffulex_edge.model import EdgeProgram
from diffulex_edge.program import PteProgram
from diffulex_edge.pt2e import calibration_calls
from diffulex_edge.quant import quantize_model, quantize_with_report
from diffulex_edge.recipes import parse_recipe, with_searched_scales
from diffulex_edge.self_check import check_agreement, compare, make_trace
from fixtures.extras import need_extra

need_extra("edge", "executorch", "torchao")


def changed_program(monkeypatch, change):
    """The tools lower a module that calls `change(program, tokens, positions, ends, rows)`."""

    class Changed(nn.Module):
        def __init__(self, program):
            super().__init__()
            self.program = program

        def forward(self, tokens, positions, visible_end, logits_rows):
            return change(self.program, tokens, positions, visible_end, logits_rows)

    lower = exporter.lower
    monkeypatch.setattr(
        exporter, "lower", lambda program, *rest, **more: lower(Changed(program), *rest, **more)
    )
    return []


def lost_cache(monkeypatch):
    """What one call stores is gone in the next, as where the cache lies in memory that is reused."""

    def change(program, *inputs):
        for pair in program.caches:
            for cache in pair:
                cache.zero_()
        return program(*inputs)

    return changed_program(monkeypatch, change)


def weight_only(monkeypatch):
    """XNNPACK takes a recipe that it computes garbage for."""
    backend = BACKENDS["xnnpack"]
    monkeypatch.setitem(BACKENDS, "xnnpack", replace(backend, recipes=(*backend.recipes, "8w")))
    return ["--quant", "8w"]


def bfloat16(monkeypatch):
    """A program of another number format than the recipe says."""

    def converted(decoder, *_):
        rows = [(norm, norm.mean_row) for norm in decoder.modules() if hasattr(norm, "mean_row")]
        decoder.bfloat16()
        for norm, row in rows:
            norm.mean_row = row
        return EdgeProgram(decoder), []

    monkeypatch.setattr(exporter, "quantised_program", converted)
    return []


def swapped_mask(monkeypatch):
    """The rows of the mask stand in another order."""
    return changed_program(
        monkeypatch,
        lambda program, tokens, positions, ends, rows: program(
            tokens, positions, ends.flip(0), rows
        ),
    )


DEFECTS = {item.__name__: item for item in (lost_cache, weight_only, bfloat16, swapped_mask)}


@pytest.mark.slow
@pytest.mark.parametrize("defect", sorted(DEFECTS))
def test_a_program_that_computes_something_else_is_not_left(
    checkpoint, tmp_path, monkeypatch, capsys, defect
):
    """Whatever the tools wrote without a word, the self-check decides."""
    flags = DEFECTS[defect](monkeypatch)
    model = str(checkpoint("shallow"))
    command = ["edge", "export", "--model", model, "-o", str(tmp_path / "out"), *flags]
    assert main([*command, "--max-rows", "32", "--max-model-len", "64"]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(("error: self-check: expected", "error: program: cannot load"))
    assert not list(tmp_path.iterdir())


class TestQuantisation:
    @pytest.mark.parametrize(
        ("name", "error", "least"),
        [
            ("sdar-8da8w", 0.1, 0.9),
            ("sdar-8da4w", 0.1, 0.6),
            ("shallow-fp16", 0.02, 0.9),
            ("shallow-pt2e_dyn8", 0.1, 0.9),
            ("shallow-static_int8", 0.1, 0.6),
            ("shallow-emb=4", 0.1, 0.6),
        ],
    )
    def test_bounds(self, bundle, name, error, least):
        facts = read_bundle(bundle(name)).facts
        check, agreement = facts["self_check"], facts["agreement_with_unquantised"]
        assert check["max_error"] <= error * check["scale"]
        assert check["argmax"] >= 0.9
        assert agreement["argmax"] >= least

    @pytest.mark.parametrize("name", ["shallow-fp16", "shallow-pt2e_dyn8", "shallow-emb=4"])
    def test_programs_answer(self, bundle, name):
        with Diffulex(str(bundle(name))) as engine:
            (output,) = engine.generate([[7] * 21], max_tokens=9, ignore_eos=True, summary=False)
        assert len(output.token_ids) == 9

    def test_half_halves_the_cache(self, bundle):
        program = PteProgram(bundle("shallow-fp16") / "model.pte")
        assert program.constants["dlx_kv_dtype"] == "float16"
        whole = PteProgram(bundle("shallow-pt2e_dyn8") / "model.pte")
        assert program.cache_bytes * 2 == whole.cache_bytes

    def test_is_smaller(self, bundle):
        sizes = [read_bundle(bundle(name)).program_bytes for name in ("llada", "sdar-8da8w")]
        assert sizes[1] < sizes[0]

    @pytest.mark.parametrize(
        ("text", "canonical"),
        [
            ("none", "none"),
            ("fp32", "none"),
            ("int8", "8da8w"),
            ("8DA8W", "8da8w"),
            ("8da8w,emb=8", "8da8w,emb=8"),
            ("int4", "8da4w-g32,head=8da8w,emb=8"),
            ("8da4w", "8da4w-g32,head=8da8w,emb=8"),
            ("8da4w-g64", "8da4w-g64,head=8da8w"),
            ("8da4w-g64,head=none", "8da4w-g64,head=none"),
            ("8da4w,emb=4", "8da4w-g32,head=8da8w,emb=4"),
            ("float16", "fp16"),
            ("weight_only_int8", "8da8w"),
            ("pt2e_dyn8", "pt2e_dyn8"),
            ("static_int8", "static_int8"),
            ("8da4w-g64,hqq", "8da4w-g64,head=8da8w,hqq"),
            ("8da8w,hqq,emb=8", "8da8w,emb=8,hqq"),
        ],
    )
    def test_names(self, text, canonical):
        assert str(parse_recipe(text)) == canonical
        assert parse_recipe(canonical) == parse_recipe(text)

    @pytest.mark.parametrize(
        "text",
        [
            "8da8w,emb=3", "8da8w,tail=8da8w", "8da8w-g32", "none,head=x", "none,head=fp16",
            "none,hqq", "fp16,hqq", "pt2e_dyn8,hqq",
        ],
    )  # fmt: skip
    def test_unknown(self, text):
        with pytest.raises(ConfigError, match="quant: expected"):
            parse_recipe(text)

    def test_names_round_trip_through_the_constants(self, bundle):
        program = PteProgram(bundle("sdar-8da4w") / "model.pte")
        assert program.constants["dlx_quant"] == "8da4w-g32,head=8da8w,emb=8"
        assert program.constants["dlx_requires"] == "quantized_kernels"


class TestQuantizeModel:
    @pytest.fixture
    def decoder(self, checkpoint):
        path = checkpoint("shallow")
        return load_decoder(path, detect(path)[1], 64, BACKENDS["xnnpack"])

    @pytest.mark.parametrize(
        ("dtype", "saved", "least", "converted"),
        [("int8", 50, 0.9, 8), ("fp16", 50, 0.9, 8), ("int4", 75, 0.5, 8), ("none", 0, 1, 0)],
    )
    def test_reports_what_is_saved_and_lost(self, decoder, dtype, saved, least, converted):
        weight = decoder.layers[0].q.weight
        calls = make_trace(ProgramShape(32, 16, 64), 8, 300, {5})
        result = quantize_with_report(decoder, dtype, calls=calls)
        assert result.success
        assert decoder.layers[0].q.weight is weight
        assert result.metrics["memory_reduction_pct"] >= saved
        assert result.metrics["argmax_agreement"] >= least
        assert result.metrics["converted_linear_layers"] == converted
        assert (result.metrics["max_abs_error"] > 0) == (dtype != "none")

    def test_changes_the_model_where_asked(self, decoder):
        assert quantize_model(decoder, "fp16", inplace=True) is decoder
        assert decoder.dtype == torch.float16
        assert quantize_model(decoder, "none", "dynamic") is not decoder

    @pytest.mark.parametrize("recipe", ["8da4w", "8da8w"])
    def test_searched_scales_are_nearer_to_the_weights(self, decoder, recipe):
        def error(text):
            model = quantize_model(decoder, text)
            layer, exact = model.layers[0], decoder.layers[0]
            names = ("q", "k", "v", "o", "gate", "up", "down")
            pairs = [(getattr(layer, name).weight, getattr(exact, name).weight) for name in names]
            return sum(float((a.dequantize() - b).square().sum()) for a, b in pairs)

        assert error(with_searched_scales(recipe)) < error(recipe)

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("int9",), "quant: expected one of"),
            (("int8", "sometimes"), "mode: expected dynamic or weight_only, got 'sometimes'"),
            (("pt2e_dyn8",), "expected a recipe of weights, got pt2e_dyn8"),
        ],
    )
    def test_refuses(self, decoder, arguments, text):
        with pytest.raises(ConfigError, match=text):
            quantize_model(decoder, *arguments)


@pytest.mark.parametrize("max_rows", [3, 10, 32])
def test_calibration_fits_into_the_program(max_rows):
    """Also where blocks take more than half of its rows."""
    path, shape = demo_dir(), ProgramShape(max_rows, 2, 64)
    calls = calibration_calls(path / "heldout.jsonl", path, detect(path)[1], shape)
    assert len(calls) == 16
    assert max(call.tokens.numel() for call in calls) <= max_rows


def normal():
    """Logits [4, 9], the same in every run."""
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(5))


class TestSelfCheck:
    NONE = parse_recipe("none")

    def test_trace_reaches_the_end_and_steps_back(self):
        calls = make_trace(ProgramShape(64, 16, 128), 8, 300, {5})
        assert max(int(call.positions.max()) for call in calls) == 127
        starts = [int(call.positions[0]) for call in calls]
        assert sorted(starts) != starts
        assert not any((call.tokens == 5).any() for call in calls)
        assert any(call.tokens.numel() == 1 for call in calls)

    def test_finds_wrong_logits(self):
        right = [normal()]
        check_agreement(compare(right, right), self.NONE)
        for wrong in (right[0] + 0.01, right[0] * float("nan"), right[0].flip(0)):
            with pytest.raises(ProgramError, match="self-check: expected"):
                check_agreement(compare([wrong], right), self.NONE)

    def test_nan_is_no_agreement(self):
        right = normal()
        found = compare([right], [right * float("nan")])
        with pytest.raises(ProgramError, match="self-check: expected logits within"):
            check_agreement(found, self.NONE)
        with pytest.raises(ProgramError, match="self-check: expected logits within"):
            check_agreement(compare([right + 1e-5], [right]), self.NONE, tolerance=1e-9)

    def test_quantised_programs_keep_their_best_ids(self):
        right = torch.eye(8)
        wrong = right * 0.99 + right.flip(0)
        with pytest.raises(ProgramError, match="self-check"):
            check_agreement(compare([wrong], [right]), parse_recipe("8da8w"), tolerance=2.0)


@pytest.mark.slow
def test_coreml_takes_the_whole_program(checkpoint, tmp_path, capsys):
    """Where its compiler is; what it makes runs on Apple's devices only."""
    if not BACKENDS["coreml"].availability().can_export:
        pytest.skip(f"coreml: {BACKENDS['coreml'].availability().reason}")
    config = ExportConfig(
        str(checkpoint("shallow")), tmp_path / "out", backend="coreml", quant="8w", max_rows=8
    )
    result = export_model(config)
    assert (result.num_delegates, result.undelegated_ops) == (1, {})
    assert not result.device_verified
    assert read_bundle(tmp_path / "out").backend == "coreml"
    with pytest.raises(ProgramError, match="expected a program for any number of rows"):
        PteProgram(tmp_path / "out/model.pte")
    assert main(["edge", "info", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "not opened   coreml: runs on Apple devices only" in text
    assert "quant = '8w'" in text
