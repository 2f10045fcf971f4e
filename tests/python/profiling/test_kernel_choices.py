# SPDX-License-Identifier: Apache-2.0
"""What is said about kernels, of machines that are not here."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import pytest
import torch

import diffulex_ext
from diffulex.profiling.kernel_choices import OpShapes, kernel_choices
from diffulex.profiling.platform import Platform, cpu_isa, runs_on

H200 = Platform((9, 0), ("80", "90a"), "full", "v4", ("v3", "v4"), has_hopper=True)
A100 = dataclasses.replace(H200, capability=(8, 0), has_hopper=False)
CPU = dataclasses.replace(H200, capability=None, has_hopper=False)
BF16 = OpShapes("bfloat16", (128,), 32, (2048, 768))


def said(machine: Platform, shapes: OpShapes) -> dict[str, tuple[str, str, bool]]:
    return {choice.op: choice[1:] for choice in kernel_choices(machine, shapes)}


def test_a_hopper_device() -> None:
    assert said(H200, BF16) == {
        "block_attention D 128": ("Hopper sm_90", "compute capability 9.0", True),
        "dense products": ("linear_few_rows, cuBLAS", "by rows and size", True),
        "fused_moe": ("Hopper sm_90", "compute capability 9.0", True),
        "other ops": ("CUDA", "one kernel each", True),
    }
    assert "fused_moe" not in said(H200, BF16._replace(experts=None))


@pytest.mark.parametrize(
    ("scheme", "dtype", "kernel", "is_fast"),
    [
        ("fp8", "bfloat16", "linear_scaled, Hopper sm_90; cuBLAS", True),
        ("fp8_block", "float16", "linear_scaled, portable", False),
        ("int8", "bfloat16", "linear_scaled, portable", True),
        ("int4", "bfloat16", "linear_w4a16, Hopper sm_90; portable", True),
        ("int4", "float16", "linear_w4a16, portable", False),
    ],
)
def test_weights_in_low_precision(scheme: str, dtype: str, kernel: str, is_fast: bool) -> None:
    shapes = BF16._replace(scheme=scheme, dtype=dtype)
    choice = kernel_choices(H200, shapes)[2]
    assert (choice.op, choice.kernel, choice.is_fast) == (
        "products in low precision",
        kernel,
        is_fast,
    )
    experts = "Hopper sm_90" if scheme == "fp8" else "portable"
    assert said(H200, shapes)["fused_moe"] == (experts, f"weights {scheme}", True)
    assert said(A100, shapes)["fused_moe"] == ("portable", f"weights {scheme}", True)
    invariant = said(H200, shapes._replace(is_batch_invariant=True))["products in low precision"]
    assert "cuBLAS" not in invariant[0]
    there = said(A100, BF16._replace(scheme="fp8"))["products in low precision"]
    assert there == ("linear_scaled, portable", "compute capability 8.0", True)


def test_attention_over_cached_codes() -> None:
    shapes = BF16._replace(has_cached_codes=True)
    (attention,) = (said(H200, shapes)[op] for op in said(H200, shapes) if "attention" in op)
    assert attention == ("Hopper sm_90", "compute capability 9.0", True)
    assert kernel_choices(A100, shapes)[0].kernel == "tensor cores sm_80"
    choice = kernel_choices(H200, shapes._replace(dtype="float16"))[0]
    assert (choice.kernel, choice.is_fast) == ("portable", False)


def test_an_ampere_device_has_nothing_faster() -> None:
    choices = kernel_choices(A100, BF16)
    assert all(choice.is_fast for choice in choices)
    assert str(choices[0]) == ("block_attention D 128: tensor cores sm_80 (compute capability 8.0)")
    assert choices[1].kernel == "cuBLAS"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_limited": True}, "DIFFULEX_FORCE_SM80 is set"),
        ({"archs": ("80",)}, "the build has no Hopper kernels"),
    ],
)
def test_a_hopper_device_without_its_kernels(change: dict[str, object], reason: str) -> None:
    choices = said(dataclasses.replace(H200, has_hopper=False, **change), BF16)
    for op in ("block_attention D 128", "dense products", "fused_moe"):
        assert choices[op][1:] == (reason, False)


@pytest.mark.parametrize(
    ("machine", "shapes", "op", "expected"),
    [
        (H200, {"dtype": "float32"}, "block_attention D 128", "dtypes bfloat16, float16, got float32"),
        (H200, {"dtype": "float32"}, "dense products", "is for bfloat16 and float16, got float32"),
        (H200, {"dtype": "float32"}, "fused_moe", "got float32 and 2048 x 768"),
        (
            H200,
            {"dtype": "float16", "scheme": "int4"},
            "products in low precision",
            "for bfloat16, got float16",
        ),
        (
            dataclasses.replace(H200, has_hopper=False, is_limited=True),
            {"scheme": "int4"},
            "products in low precision",
            "DIFFULEX_FORCE_SM80 is set",
        ),
        (H200, {"head_dims": (96,)}, "block_attention D 96", "sizes 64, 128, 256, 512, got 96"),
        (H200, {"page_size": 4}, "block_attention D 128", "pages of 8 to 256 tokens, got 4"),
        (H200, {"experts": (2048, 100)}, "fused_moe", "multiples of 8, got bfloat16 and 2048 x 100"),
        (H200, {"experts": (2048, 72)}, "fused_moe", "multiples of 64, got 2048 x 72"),
        (
            dataclasses.replace(H200, profile="minimal"),
            {"dtype": "float16"},
            "block_attention D 128",
            "dtypes bfloat16, got float16",
        ),
        (
            dataclasses.replace(H200, profile="minimal"),
            {"dtype": "float16"},
            "fused_moe",
            "the build has no Hopper kernels of float16",
        ),
        (
            dataclasses.replace(A100, capability=(7, 5)),
            {},
            "block_attention D 128",
            "need compute capability 8.0",
        ),
    ],
)  # fmt: skip
def test_slower_paths_say_why(
    machine: Platform, shapes: dict[str, object], op: str, expected: str
) -> None:
    _, reason, is_fast = said(machine, BF16._replace(**shapes))[op]
    assert expected in reason
    assert not is_fast


@pytest.mark.parametrize(
    ("isa", "variants", "kernel", "is_fast"),
    [
        ("v4", ("v3", "v4"), "CPU AVX-512", True),
        ("v3", ("v3", "v4"), "CPU AVX2", True),
        ("v4", ("v3",), "CPU AVX2", False),
        ("v3", (), "CPU portable", False),
        ("base", ("v3", "v4"), "CPU portable", True),
    ],
)
def test_processors(isa: str, variants: tuple[str, ...], kernel: str, is_fast: bool) -> None:
    machine = dataclasses.replace(CPU, isa=isa, isa_variants=variants)
    ops, products = kernel_choices(machine, OpShapes("float32", (64,), 32))
    assert (ops.kernel, ops.is_fast) == (kernel, is_fast)
    assert products.is_fast
    assert products.kernel == "linear_packed"
    products = kernel_choices(machine, OpShapes("bfloat16", (64,), 32))[1]
    assert not products.is_fast
    assert products.reason == "packed products are for float32, weights are bfloat16"


def test_instruction_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    path = tmp_path / "cpuinfo"
    v3 = "fpu avx2 fma f16c bmi1 bmi2 abm movbe"
    v4 = f"{v3} avx512f avx512bw avx512cd avx512dq avx512vl"
    for flags, isa in ((v4, "v4"), (v3, "v3"), (v4.replace(" abm", ""), "base"), ("fpu", "base")):
        path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        assert cpu_isa(path) == isa
    assert cpu_isa(tmp_path / "none") == "base"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpu_isa(path) == "base"


def test_this_processor_is_the_one_that_torch_sees() -> None:
    seen = {"AVX512": "v4", "AVX2": "v3", "DEFAULT": "base", "NO AVX": "base"}
    assert cpu_isa() == seen.get(torch.backends.cpu.get_cpu_capability(), "base")


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (("80",), (8, 0), True),
        (("80",), (8, 6), True),
        (("80",), (9, 0), True),  # by its PTX
        (("80-real",), (9, 0), False),
        (("80-real",), (8, 9), True),
        (("80-virtual",), (8, 0), True),
        (("90a",), (9, 0), True),
        (("90a",), (10, 0), False),
        (("90a-real", "80-real"), (7, 5), False),
        (("120",), (9, 0), False),
        ((), (8, 0), False),
    ],
)
def test_what_a_device_runs(
    archs: tuple[str, ...], capability: tuple[int, int], expected: bool
) -> None:
    assert runs_on(archs, capability) is expected


def test_this_machine() -> None:
    found = Platform.of("cpu", None, has_hopper=False)
    assert found.capability is None
    assert found.isa_variants == tuple(diffulex_ext.build_info()["cpu_isa_variants"])
