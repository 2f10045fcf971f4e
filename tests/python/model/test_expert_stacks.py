# SPDX-License-Identifier: Apache-2.0
"""Stacks of experts of 4 bits: the memory that kernels read, by row and in tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffulex import ops
from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.quantization.experts import QuantizedExperts
from diffulex.quantization.layers import ModelQuantizer
from diffulex.quantization.scheme import QuantizationPlan
from fixtures.moe_families import moe_builder, moe_config

BF16 = torch.bfloat16


def load(directory) -> Any:
    name, spec, _ = detect(directory)
    quantizer = ModelQuantizer(QuantizationPlan("int4"))
    return load_model(name, spec, directory, BF16, "cpu", quantizer=quantizer)


def experts_of(model: Any) -> list[QuantizedExperts]:
    held = [getattr(module, "matrices", None) for module in model.modules()]
    return [each for each in held if isinstance(each, QuantizedExperts)]


def test_stacks_of_nibbles_are_in_tiles_where_there_is_a_kernel(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After they were packed, in the memory that graphs read; a matrix that is written is by row until then."""
    config = moe_config("llada2", moe_intermediate_size=128, hidden_size=256)
    moe_builder("llada2", config=config).write(tmp_path)
    monkeypatch.setattr(QuantizedExperts, "are_stacked", staticmethod(lambda device: True))
    monkeypatch.setattr(ops, "has_hopper_kernels", lambda device: device.type == "cpu")
    tiled = load(tmp_path)
    monkeypatch.setattr(ops, "has_hopper_kernels", lambda device: False)
    plain = load(tmp_path)
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(ops, "fused_moe", lambda x, w13, w2, *_, **__: calls.append((w13, w2)))
    routing = ops.Routing(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    x = torch.zeros(1, 256, dtype=BF16)

    def multiplied(held: QuantizedExperts) -> tuple[torch.Tensor, torch.Tensor]:
        held.product(x, routing, out=x, workspace=x)
        return calls[-1]

    found = experts_of(tiled)
    assert found
    for held, other in zip(found, experts_of(plain), strict=True):
        expected = [stack.codes for stack in other._stacks]
        tiles = multiplied(held)
        assert held.suits_hopper
        assert not other.suits_hopper
        assert [operand.dim() for operand in tiles] == [5, 5]
        for operand, codes in zip(tiles, expected, strict=True):
            assert torch.equal(ops.from_nibble_tiles(operand.clone()), codes)
        memory = tiles[0].data_ptr()
        held.w13[1].write(0, torch.ones(256, 256))
        again = multiplied(held)
        assert again[0].data_ptr() == memory
        assert torch.equal(again[1], tiles[1])
        changed = ops.from_nibble_tiles(again[0].clone())
        assert torch.equal(changed[0], expected[0][0])
        assert not torch.equal(changed[1], expected[0][1])
        assert torch.equal(changed[1], held.w13[1].parts[0].row_major())
        assert [stack.dim() for stack in multiplied(other)] == [3, 3]
