# SPDX-License-Identifier: Apache-2.0
"""When the kernel benchmark compiles its CUTLASS product, and what it says where it does not."""

from __future__ import annotations

import ctypes
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffulex import ops

SCRIPTS = Path(__file__).resolve().parents[3] / "benchmarks" / "python"
NVCC = """#!/bin/sh
echo "$@" >> "{log}"
while [ $# -gt 1 ]; do shift; done
echo library > "$1"
"""
BROKEN_NVCC = """#!/bin/sh
echo "peer.cu(1): warning: odd" >&2
echo "peer.cu(2): error: no such thing" >&2
exit 1
"""


def executable(path, text):
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def peer(monkeypatch, tmp_path):
    """The module as on a GPU of compute capability 9.0, without headers, with a cache of its own."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = import_module("kernel_bench.cutlass_peer")
    product = module._product
    product.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass"))
    yield module
    product.cache_clear()


def built(peer):
    """What it is where nothing was compiled before."""
    peer._product.cache_clear()
    return peer._product(torch.device("cuda"))


@pytest.fixture
def headers(tmp_path):
    folder = tmp_path / "cutlass" / "include" / "cutlass"
    folder.mkdir(parents=True)
    (folder / "cutlass.h").touch()
    (folder / "version.h").write_text("4.2.0", encoding="utf-8")
    return folder


@pytest.fixture
def nvcc(monkeypatch, tmp_path):
    """The log of a compiler that writes what no loader takes, which `CDLL` here does."""
    log = tmp_path / "log"
    path = executable(tmp_path / "nvcc", NVCC.format(log=log))
    monkeypatch.setenv("CUDACXX", str(path))
    library = SimpleNamespace(
        cutlass_fp8_product=SimpleNamespace(), cutlass_fp8_message=SimpleNamespace()
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Path(name).read_text() and library)
    return log


def test_without_a_gpu_nothing_is_compiled(peer, headers, nvcc, monkeypatch):
    assert peer._product(torch.device("cpu")) == "needs a GPU of compute capability 9.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert built(peer) == "needs a GPU of compute capability 9.0"
    assert not nvcc.exists()


def test_without_headers_nothing_is_compiled(peer, nvcc, monkeypatch):
    reason = built(peer)
    assert "nvidia-cutlass" in reason
    assert "CUTLASS_PATH" in reason
    monkeypatch.delenv("CUTLASS_PATH")
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    assert built(peer) == reason
    assert not nvcc.exists()


def test_headers_of_the_package_are_found_without_its_import(peer, monkeypatch, tmp_path):
    monkeypatch.delenv("CUTLASS_PATH")
    package = tmp_path / "site" / "cutlass_library"
    include = package / "source" / "include"
    (include / "cutlass").mkdir(parents=True)
    (include / "cutlass" / "cutlass.h").touch()
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert peer._headers() == include


def test_without_a_compiler(peer, headers, monkeypatch):
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(peer.shutil, "which", lambda name, path: None)
    assert built(peer) == "no nvcc (CUDACXX, PATH or /usr/local/cuda/bin)"


def test_one_library_for_each_version(peer, headers, nvcc, tmp_path):
    for _ in range(2):
        assert callable(built(peer))
    (line,) = nvcc.read_text().splitlines()
    assert "arch=compute_90a,code=sm_90a" in line
    assert f"-I{headers.parent} {peer.SOURCE} -o " in line
    assert peer.SOURCE.is_file()
    (headers / "version.h").write_text("4.3.0", encoding="utf-8")
    assert callable(built(peer))
    assert len(nvcc.read_text().splitlines()) == 2
    assert len(list((tmp_path / "cache" / "diffulex").iterdir())) == 2


def test_the_error_of_a_compiler_is_the_reason(peer, headers, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDACXX", str(executable(tmp_path / "nvcc", BROKEN_NVCC)))
    assert built(peer) == "not compiled: peer.cu(2): error: no such thing"
    assert not list((tmp_path / "cache" / "diffulex").iterdir())
    monkeypatch.setenv("CUDACXX", str(tmp_path / "missing"))
    assert "not compiled: FileNotFoundError" in built(peer)


def test_what_cannot_be_loaded_is_absent(peer, headers, nvcc, monkeypatch):
    def refuse(name):
        raise OSError("invalid ELF header")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert built(peer) == "not compiled: OSError: invalid ELF header"


def right(tile_rows, rows, codes, scale, out, space):
    ops.linear_scaled(rows, codes, scale, out=out)


def wrong_in_a_corner(tile_rows, rows, codes, scale, out, space):
    right(tile_rows, rows, codes, scale, out, space)
    out[64:, -8:] *= 1.5


def unfinished(tile_rows, rows, codes, scale, out, space):
    part = ops.linear_scaled(rows, codes, scale, out=torch.empty_like(out))
    out[:64] = part[:64]


def peers_of(peer, monkeypatch, product):
    """What the table of peers says of it with 66 rows and two weights."""
    quant_peers = import_module("kernel_bench.quant_peers")
    monkeypatch.setattr(peer, "_product", lambda device: product)
    plain = [torch.randn(256, 128, dtype=torch.bfloat16) for _ in range(2)]
    weights = [ops.quantize_weight(w, ops.WeightScheme.FP8) for w in plain]
    x = torch.randn(66, 128, dtype=torch.bfloat16)
    out = torch.empty(66, 256, dtype=torch.bfloat16)
    found, absent = quant_peers.fp8_peers(quant_peers.Operands(x, plain, weights, out))
    return (
        {name: calls for name, calls in found.items() if "CUTLASS" in name},
        {name: reason for name, reason in absent.items() if "CUTLASS" in name},
        [x.float() @ w.float().t() for w in plain],
        out,
    )


def test_right_products_are_peers(peer, monkeypatch):
    tiles = []

    def product(tile_rows, *arguments):
        tiles.append(tile_rows)
        right(tile_rows, *arguments)

    found, absent, wants, out = peers_of(peer, monkeypatch, product)
    assert absent == {}
    assert set(tiles) == {64, 128}
    assert len(found) == 2
    for calls in found.values():
        for call, want in zip(calls, wants, strict=True):
            out.fill_(torch.nan)
            call()
            assert float((out.float() - want).norm() / want.norm()) < 0.08


@pytest.mark.parametrize("product", [wrong_in_a_corner, unfinished])
def test_wrong_products_are_absent(peer, monkeypatch, product):
    found, absent, *_ = peers_of(peer, monkeypatch, product)
    assert found == {}
    assert len(absent) == 2
    assert all("not timed: its output differs from ours" in text for text in absent.values())


def test_the_status_of_a_product_is_the_reason(peer, monkeypatch):
    library = SimpleNamespace(
        cutlass_fp8_product=lambda *arguments: 2,
        cutlass_fp8_message=lambda status: b"Error Misaligned Operand" if status == 2 else b"",
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    found, absent, *_ = peers_of(peer, monkeypatch, peer._bound(library))
    assert found == {}
    assert set(absent.values()) == {"RuntimeError: Error Misaligned Operand"}


def test_the_table_says_why_it_is_absent(peer, monkeypatch):
    found, absent, *_ = peers_of(peer, monkeypatch, "no nvcc")
    assert found == {}
    assert set(absent.values()) == {"no nvcc"}
    assert len(absent) == 2
