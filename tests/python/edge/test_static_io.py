# SPDX-License-Identifier: Apache-2.0
"""The program whose caller holds the cache: the logits of the one that holds it itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from diffulex.checkpoint.auto_model import detect
from diffulex.errors import ConfigError
from diffulex.tools.cli import main
from diffulex_edge.backends import BACKENDS, EdgeBackend
from diffulex_edge.bundle import read_bundle
from diffulex_edge.exporter import ExportConfig, avoided_ids, export_model, load_decoder
from diffulex_edge.lowering import ProgramShape
from diffulex_edge.model import EdgeForm, EdgeProgram
from diffulex_edge.self_check import compare, eager_caller, make_trace, run_trace
from diffulex_edge.static_io import CallerCache, StaticProgram, static_inputs, static_mask
from fixtures.extras import need_extra
from fixtures.families import DENSE_FAMILIES

need_extra("edge", "executorch", "torchao")

SHAPE = ProgramShape(16, 16, 80, is_static=True)


def trace(spec):
    return make_trace(SHAPE, 8, spec.vocab_size, avoided_ids(spec))


@pytest.fixture
def host_cached(monkeypatch):
    """A backend that takes nothing, for programs whose caller holds the cache."""
    form = EdgeForm(norm="mean", layout="static_io")
    backend = EdgeBackend("held", "tests", ("none",), form, is_static=True, is_host=False)
    monkeypatch.setitem(BACKENDS, "held", backend)
    return backend


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_logits_are_those_of_the_program_with_a_cache(checkpoint, family):
    path = checkpoint(family)
    spec = detect(path, family)[1]
    decoder = load_decoder(path, spec, SHAPE.cache_rows, BACKENDS["qnn"])
    calls = trace(spec)
    expected = run_trace(eager_caller(EdgeProgram(decoder)), calls)
    found = run_trace(CallerCache(StaticProgram(decoder), spec, SHAPE.cache_rows), calls)
    agreement = compare(found, expected)
    assert agreement.max_error <= 1e-5 * agreement.scale
    assert agreement.num_rows == 16 * len(calls)


def test_a_row_of_the_call_hides_its_older_self():
    mask = static_mask(torch.tensor([2, 3]), torch.tensor([4, 4]), 6)
    visible = mask == 0
    assert visible.tolist() == [[True, True, False, False, False, False, True, True]] * 2
    later = static_mask(torch.tensor([2, 3]), torch.tensor([3, 4]), 6)
    assert (later == 0)[0].tolist() == [True, True, False, False, False, False, True, False]
    assert mask.half().isfinite().all()


def test_inputs_stand_in_the_documented_order(checkpoint):
    spec = detect(checkpoint("sdar"))[1]
    tokens, positions, mask, *caches = static_inputs(spec, SHAPE)
    assert (tokens.dtype, positions.dtype) == (torch.int32, torch.int32)
    assert mask.shape == (16, 96)
    assert [tuple(item.shape) for item in caches] == [(2, 80, 32)] * 4


def test_the_lowered_program_computes_the_same(checkpoint, tmp_path, host_cached):
    """The file of such an export, run by the runtime's portable operators."""
    path, out = checkpoint("shallow"), tmp_path / "out"
    config = ExportConfig(str(path), out, backend="held", max_rows=16, max_model_len=64)
    result = export_model(config)
    assert not result.device_verified
    assert result.self_check.argmax == 1
    constants, program = _loaded(out / "model.pte")
    assert constants["dlx_layout"] == "static_io"
    assert read_bundle(out).cache_rows == constants["get_max_context_len"] == 80
    spec = detect(path)[1]
    decoder = load_decoder(path, spec, 80, host_cached)
    calls = trace(spec)
    expected = run_trace(eager_caller(EdgeProgram(decoder)), calls)
    found = run_trace(CallerCache(program, spec, 80), calls)
    agreement = compare(found, expected)
    assert agreement.max_error <= 1e-4 * agreement.scale


def _loaded(path):
    """Constants of a program, and its method as a function of tensors."""
    from executorch.extension.pybindings import _C

    program = _C._load_program(os.fspath(path))
    names = [program.get_method_name(index) for index in range(program.num_methods())]
    constants = {
        name: program.load_method(name)([])[0] for name in names if name.startswith(("dlx", "get"))
    }
    method = program.load_method("forward")
    return constants, lambda *inputs: method([item.contiguous() for item in inputs])


def test_the_engine_refuses_it_by_a_line(checkpoint, tmp_path, host_cached, capsys):
    out = tmp_path / "out"
    export_model(
        ExportConfig(str(checkpoint("shallow")), out, backend="held", max_rows=8, max_model_len=24)
    )
    assert main(["generate", "--model", str(out), "hi"]) == 1
    assert "expected a program for any number of rows" in capsys.readouterr().err


class TestQnn:
    def test_program_is_the_one_without_a_cache(self):
        backend = BACKENDS["qnn"]
        assert backend.form.layout == "static_io"
        assert backend.is_static
        assert not backend.is_host

    def test_chip_is_checked_before_anything_is_lowered(self, monkeypatch, tmp_path):
        monkeypatch.setenv("QNN_SDK_ROOT", str(tmp_path))
        backend = BACKENDS["qnn"]
        with pytest.raises(ConfigError, match=r"soc: expected one of .*SM8650.*, got 'SM1'"):
            EdgeBackend(**_fields(backend), options={"soc": "sm1"}).partitioners()

    def test_partitioner_is_the_vendors(self, monkeypatch, tmp_path):
        monkeypatch.setenv("QNN_SDK_ROOT", str(tmp_path))
        (partitioner,) = BACKENDS["qnn"].partitioners()
        assert type(partitioner).__name__ == "QnnPartitioner"

    @pytest.mark.slow
    def test_a_kit_that_cannot_be_loaded_is_one_line(self, checkpoint, tmp_path):
        kit = tmp_path / "kit/lib/x86_64-linux-clang"
        kit.mkdir(parents=True)
        (kit / "libQnnHtp.so").write_bytes(b"")
        command = [sys.executable, "-m", "diffulex_edge", "export", "--backend", "qnn"]
        command += ["--model", str(checkpoint("shallow")), "-o", str(tmp_path / "out")]
        command += ["--max-rows", "8", "--max-model-len", "32", "--log-level", "error"]
        environment = {**os.environ, "QNN_SDK_ROOT": str(tmp_path / "kit")}
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False
        )
        assert result.returncode == 1
        assert result.stderr.startswith("error: lowering: expected qnn to take the program, got ")
        assert result.stderr.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["kit"]


def _fields(backend):
    names = ("name", "target", "recipes", "form", "is_static", "is_host")
    return {name: getattr(backend, name) for name in names}
