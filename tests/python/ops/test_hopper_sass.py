# SPDX-License-Identifier: Apache-2.0
"""Machine code of the Hopper kernels: the instructions that make them what they are."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import diffulex_ext


@functools.cache
def _listing() -> str:
    """Of all sm_90a kernels in the op library; nothing where it cannot be made."""
    tool = shutil.which("cuobjdump")
    library = Path(diffulex_ext.__file__).parent / "libdiffulex_ops.so"
    if tool is None or not library.is_file():
        return ""
    return subprocess.run(
        [tool, "--dump-sass", "--gpu-architecture", "sm_90a", str(library)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout


def _functions(kernel: str) -> dict[str, str]:
    """Disassembly of the sm_90a kernels of that name in the op library, by mangled name."""
    if not _listing():
        pytest.skip("needs cuobjdump and the op library")
    functions = {}
    for part in _listing().split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        if "sm90" in name and kernel in name:
            functions[name.strip()] = body
    if not functions:
        pytest.skip(f"the library holds no sm_90a {kernel}")
    return functions


# What kernels have in their names whose operands are e4m3 codes: dense products and experts.
_OF_E4M3 = ("MoeScaledTraits", "scaled_linear_kernel", "many_rows_kernel")
_COPIES = re.compile(r"UTMALDG|UBLKCP|SYNCS\.ARRIVE")


def _loops_of_products(body: str) -> list[list[str]]:
    """The instructions of the shortest loop around each product of tensor cores, where there is one."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", body)
    places = {int(address, 16): index for index, (address, _) in enumerate(lines)}
    spans = []
    for last, (_, text) in enumerate(lines):
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target is not None and (first := places[int(target[1], 16)]) < last:
            spans.append((first, last))
    products = [index for index, (_, text) in enumerate(lines) if re.search(r"[HQ]G?MMA", text)]
    around = [[span for span in spans if span[0] <= at <= span[1]] for at in products]
    shortest = {min(found, key=lambda span: span[1] - span[0]) for found in around if found}
    return [[text for _, text in lines[first : last + 1]] for first, last in sorted(shortest)]


def _loops_over_lanes(body: str) -> list[str]:
    """The instructions of each loop that an operand which all lanes must share makes of one instruction."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", body)
    places = {int(address, 16): index for index, (address, _) in enumerate(lines)}
    loops = []
    for index, (_, text) in enumerate(lines):
        target = re.search(r"BRA\.U\.ANY\b.*?0x([0-9a-f]+)", text)
        if target is not None:
            first = places[int(target[1], 16)]
            loops.append("\n".join(instruction for _, instruction in lines[first : index + 1]))
    return loops


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    ["attention_kernel", "moe_kernel", "linear_kernel", "nibble_linear_kernel", "many_rows_kernel"],
)
def test_products_use_the_tensor_cores_and_the_copy_engine(kernel: str) -> None:
    for name, body in _functions(kernel).items():
        own, other = ("HGMMA", "QGMMA")
        if any(part in name for part in _OF_E4M3):
            own, other = other, own
        assert own in body, name
        assert other not in body, name
        assert "UTMALDG" in body, name
        # Copies from several lanes become a loop over lanes, a hundred cycles each.
        assert not [loop for loop in _loops_over_lanes(body) if _COPIES.search(loop)], name


@pytest.mark.slow
def test_experts_of_codes_are_among_the_kernels() -> None:
    """Or else the test above would hold without a product of e4m3 experts, or of nibbles."""
    for traits in ("MoeScaledTraits", "MoeTiledTraits"):
        assert any(traits in name for name in _functions("moe_kernel")), traits


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["scaled_linear_kernel", "many_rows_kernel"])
def test_lines_of_codes_are_waited_for_as_a_whole(kernel: str) -> None:
    """Where a compiler cannot follow what is on its way, it waits after each of the four instructions."""
    found = _functions(kernel)
    assert found
    for name, body in found.items():
        listed = re.findall(r"QGMMA|WARPGROUP\.DEPBAR", body)
        assert listed.count("QGMMA") == 4 * listed.count("WARPGROUP.DEPBAR"), name


@pytest.mark.slow
def test_many_rows_are_promoted_during_products() -> None:
    """Of tiles of 128 rows of W one line while the next one is on its way; of 192 by turns of two warpgroups."""
    found = _functions("many_rows_kernel")
    assert {width for name in found for width in re.findall(r"ManyRowsTraitsILi(\d+)E", name)} == {
        "128",
        "192",
    }
    for name, body in found.items():
        is_wide = "ManyRowsTraitsILi192E" in name
        assert bool(re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", body)) != is_wide, name
        assert ("BAR.ARV" in body) == is_wide, name


# Kernels whose registers must be enough. What a compiler version spills of single words between loops
# costs nothing that can be measured; an array in local memory, or a spill in an unrolled loop, takes
# dozens of accesses.
_MOST_LOCAL_ACCESSES = 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        "attention_kernel",
        "moe_kernel",
        "linear_kernel",
        "nibble_linear_kernel",
        "cluster_kernel",
        "cluster_filter_kernel",
    ],
)
def test_nothing_of_weight_lives_in_local_memory(kernel: str) -> None:
    """Sums of 128 rows beside nibbles leave no registers for what lies outside their loop."""
    for name, body in _functions(kernel).items():
        text, most = body, _MOST_LOCAL_ACCESSES
        if "NibbleTraitsILi128E" in name:
            text, most = "\n".join(map("\n".join, _loops_of_products(body))), 0
            assert text, name
        accesses = re.findall(r"\b(?:STL|LDL)\b.*", text)
        assert len(accesses) <= most, f"{name}: {len(accesses)}, {accesses[:3]}"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["many_rows_kernel", "scaled_linear_kernel", "moe_kernel"])
def test_loops_of_products_are_in_registers(kernel: str) -> None:
    """Where a kernel keeps words between its tiles in local memory, the loop over the depth has none."""
    for name, body in _functions(kernel).items():
        loops = _loops_of_products(body)
        assert loops, name
        for loop in loops:
            assert not [text for text in loop if re.search(r"\b(?:STL|LDL)\b", text)], name
