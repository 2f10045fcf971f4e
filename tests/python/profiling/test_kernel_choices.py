# SPDX-License-Identifier: Apache-2.0
"""What is said about kernels, of machines that are not here."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import diffulex_ext
from diffulex.profiling.kernel_choices import CodedProducts, OpShapes, kernel_choices
from diffulex.profiling.platform import Platform, byte_variants, cpu_isa, runs_on

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


def coded(scheme: str, **shapes: Any) -> OpShapes:
    unfit = shapes.pop("num_unfit", 0)
    products = (CodedProducts(scheme, 36, unfit),)
    return BF16._replace(coded=products, coded_experts=CodedProducts(scheme, 36, unfit), **shapes)


LIMITED = dataclasses.replace(H200, has_hopper=False, is_limited=True)
HOPPER_ONLY = "Hopper kernels are for the dtype, fp8, fp8_block, int4"


@pytest.mark.parametrize(
    ("machine", "scheme", "shapes", "products", "experts"),
    [
        (
            H200, "fp8", {},
            ("linear_scaled, Hopper sm_90; cuBLAS", "by rows and size", True),
            ("fp8, Hopper sm_90", "compute capability 9.0", True),
        ),
        (
            H200, "fp8", {"is_batch_invariant": True},
            ("linear_scaled, Hopper sm_90", "batch_invariant is set", True),
            ("fp8, Hopper sm_90", "compute capability 9.0", True),
        ),
        (
            H200, "fp8_block", {"dtype": "float16"},
            ("linear_scaled, portable", "the Hopper kernel is for bfloat16, got float16", False),
            ("fp8_block, portable", "the Hopper kernel is for bfloat16, got float16", False),
        ),
        (
            H200, "fp8", {"num_unfit": 2, "experts": (2048, 100)},
            (
                "linear_scaled, Hopper sm_90; portable",
                "2 of 36 have a form that Hopper's does not take",
                False,
            ),
            ("fp8, portable", "the Hopper kernel takes multiples of 16, got 2048 x 100", False),
        ),
        (
            H200, "int8", {},
            ("linear_scaled, portable", HOPPER_ONLY, False),
            ("int8, portable", HOPPER_ONLY, False),
        ),
        (
            H200, "int4", {},
            ("linear_w4a16, Hopper sm_90; cuBLAS", "by rows and size", True),
            ("int4, Hopper sm_90", "compute capability 9.0", True),
        ),
        (
            H200, "int4", {"num_unfit": 36},
            (
                "linear_w4a16, Hopper sm_90; portable; cuBLAS",
                "36 of 36 have a form that Hopper's does not take",
                False,
            ),
            ("int4, portable", "36 of 36 layers have a form that Hopper's does not take", False),
        ),
        (
            H200, "int4", {"dtype": "float16"},
            ("linear_w4a16, portable", "the Hopper kernel is for bfloat16, got float16", False),
            ("int4, portable", "the Hopper kernel is for bfloat16, got float16", False),
        ),
        (
            LIMITED, "fp8", {},
            ("linear_scaled, portable", "DIFFULEX_FORCE_SM80 is set", False),
            ("fp8, portable", "DIFFULEX_FORCE_SM80 is set", False),
        ),
        (
            A100, "int4", {"num_unfit": 36},
            ("linear_w4a16, portable; cuBLAS", "compute capability 8.0", True),
            ("int4, portable", "compute capability 8.0", True),
        ),
    ],
)  # fmt: skip
def test_weights_in_low_precision(
    machine: Platform,
    scheme: str,
    shapes: dict[str, Any],
    products: tuple[str, str, bool],
    experts: tuple[str, str, bool],
) -> None:
    found = said(machine, coded(scheme, **shapes))
    assert found[f"{scheme} products"] == products
    assert found["fused_moe"] == experts


def test_each_format_of_a_model_is_named() -> None:
    """A head of another scheme, and what keeps its dtype, as the experts of LLaDA2 with int4."""
    products = CodedProducts("int4", 40), CodedProducts("fp8")
    found = said(H200, BF16._replace(coded=products))
    assert {"dense products", "int4 products", "fp8 products"} < found.keys()
    assert found["fused_moe"] == ("Hopper sm_90", "compute capability 9.0", True)
    assert "dense products" not in said(H200, BF16._replace(coded=products, has_dense=False))


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


@pytest.mark.parametrize(
    ("isa", "variants", "scheme", "kernel", "how"),
    [
        ("v4", ("v3", "v4", "v4n"), "int8", "linear_scaled, AVX-512 VNNI", "sums of integers"),
        ("v4", ("v3", "v4"), "int8", "linear_scaled, AVX-512", "sums of integers"),
        ("v4", ("v3",), "int8", "linear_scaled, AVX2", "sums of integers"),
        ("v3", ("v3", "v4"), "fp8", "linear_scaled, AVX2", "codes widened to float32"),
        ("base", (), "int4", "linear_w4a16, portable", "codes widened to float32"),
        ("base", ("dot",), "int8", "linear_scaled, SDOT", "sums of integers"),
        ("base", (), "int8", "linear_scaled, portable", "sums of integers"),
        ("base", ("dot",), "fp8", "linear_scaled, portable", "codes widened to float32"),
    ],
)
def test_low_precision_on_processors(
    isa: str, variants: tuple[str, ...], scheme: str, kernel: str, how: str
) -> None:
    found_here = {"isa": isa, "isa_variants": variants, "byte_variants": ("v4n", "dot")}
    machine = dataclasses.replace(CPU, **found_here)
    shapes = OpShapes("float32", (64,), 32, coded_experts=CodedProducts(scheme))
    found = said(machine, shapes)
    assert found[f"{scheme} products"][0] == kernel
    assert found[f"{scheme} products"][1].startswith(f"{how}; ")
    assert found[f"{scheme} products"][2] == (variants != ("v3",))
    assert found["dense products"][0] == "linear_packed"
    # Of a model in bfloat16 whose matrices are all in low precision none is torch's.
    shapes = OpShapes("bfloat16", (64,), 32, coded=(CodedProducts("int8"),), has_dense=False)
    assert said(machine, shapes).keys() == {"ops", "int8 products"}


def test_instruction_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    path = tmp_path / "cpuinfo"
    v3 = "fpu avx2 fma f16c bmi1 bmi2 abm movbe"
    v4 = f"{v3} avx512f avx512bw avx512cd avx512dq avx512vl"
    for flags, isa in ((v4, "v4"), (v3, "v3"), (v4.replace(" abm", ""), "base"), ("fpu", "base")):
        path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        assert cpu_isa(path) == isa
    path.write_text(f"flags\t\t: {v4} avx512_vnni\n")
    assert byte_variants(path) == ("v4n",)
    path.write_text(f"flags\t\t: {v3} avx_vnni\n")
    assert byte_variants(path) == ("v3n",)
    assert cpu_isa(tmp_path / "none") == "base"
    assert byte_variants(tmp_path / "none") == ()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpu_isa(path) == "base"
    assert byte_variants(path) == ()
    path.write_text("processor\t: 0\nFeatures\t: fp asimd atomics asimddp\n")
    assert cpu_isa(path) == "base"
    assert byte_variants(path) == ("dot",)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert byte_variants(path) == ("dot",)


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
