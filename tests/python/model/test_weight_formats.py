# SPDX-License-Identifier: Apache-2.0
"""Weight formats and the dispatch of experts: layers hold them and do not ask which ones they are."""

from __future__ import annotations

import copy

import pytest
import torch

from diffulex import ops
from diffulex.families.spec.moe import MoeSpec
from diffulex.nn.attention_metadata import AttnMetadata
from diffulex.nn.embedding import OutputHead, TokenEmbedding
from diffulex.nn.feed_forward import GatedMLP, MLPScratch
from diffulex.nn.linear import Linear
from diffulex.nn.moe import MoeFeedForward
from diffulex.nn.weights import DenseExperts, DenseWeight, PackedWeight

HIDDEN, WIDTH, ROWS = 64, 48, 7
FP32 = {"dtype": torch.float32, "device": "cpu"}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class HalvedWeight:
    """Holds W / 2, in which every product is exact; counts its products."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.halves = matrix.detach() / 2
        self.num_products = 0

    @property
    def nbytes(self) -> int:
        return self.halves.nbytes

    def packed(self) -> HalvedWeight:
        return self

    def row_major(self) -> torch.Tensor:
        return self.halves * 2

    def new_rows(self, x) -> None:
        return None

    def product(self, x, out, bias, rows=None):
        self.num_products += 1
        product = torch.mm(x, self.row_major().t(), out=out)
        return product if bias is None else product.add_(bias)

    def gated_product(self, x, act, out, rows=None) -> bool:
        gate, up = self.product(x, None, None).chunk(2, dim=1)
        out.copy_(torch.nn.functional.silu(gate) * up)
        return True


def test_a_linear_layer_holds_any_format() -> None:
    layer = Linear(HIDDEN, (32, 16), bias=True, **FP32)
    layer.row_major().copy_(normal(48, HIDDEN))
    layer.bias.copy_(normal(48, seed=1))
    x = normal(ROWS, HIDDEN, seed=2)
    expected = torch.addmm(layer.bias, x, layer.row_major().t())
    layer.format = HalvedWeight(layer.row_major())
    layer.weight = None
    layer.pack()  # the format is what products want
    out = torch.empty(ROWS, 48)
    assert torch.equal(layer(x, out), expected)
    assert layer.format.num_products == 1
    assert layer.nbytes == 48 * HIDDEN * 4
    # Filling the layer again ends the format.
    weight, _ = layer.part(1)
    assert isinstance(layer.format, DenseWeight)
    assert torch.equal(weight, normal(48, HIDDEN)[32:])


def test_a_feed_forward_takes_the_gated_product_of_its_format() -> None:
    mlp = GatedMLP(HIDDEN, WIDTH, **FP32)
    mlp.gate_up.row_major().copy_(normal(2 * WIDTH, HIDDEN) / 8)
    mlp.down.row_major().copy_(normal(HIDDEN, WIDTH, seed=1) / 8)
    x = normal(ROWS, HIDDEN, seed=2)
    expected = mlp(x.clone(), MLPScratch(x, WIDTH))
    mlp.gate_up.format = HalvedWeight(mlp.gate_up.row_major())
    scratch = MLPScratch(x, WIDTH)
    scratch.gate_up.fill_(float("nan"))  # not written
    torch.testing.assert_close(mlp(x.clone(), scratch), expected)
    assert scratch.gate_up.isnan().all()


def test_products_pack_and_filling_unpacks() -> None:
    layer = Linear(HIDDEN, (40,), **FP32)
    matrix = normal(40, HIDDEN)
    layer.row_major().copy_(matrix)
    assert isinstance(layer.format, DenseWeight)
    out = torch.empty(ROWS, 40)
    layer(normal(ROWS, HIDDEN), out)
    assert isinstance(layer.format, PackedWeight)
    assert layer.weight is None
    assert torch.equal(layer.row_major(), matrix)
    assert isinstance(layer.format, DenseWeight)
    assert layer.format.row_major() is layer.weight
    half = Linear(HIDDEN, (40,), dtype=torch.bfloat16, device="cpu")
    half.pack()
    assert isinstance(half.format, DenseWeight)


def test_a_tied_head_packs_a_copy_and_keeps_the_table() -> None:
    embedding, head = TokenEmbedding(96, HIDDEN, **FP32), OutputHead(96, HIDDEN, **FP32)
    embedding.weight.copy_(normal(96, HIDDEN))
    head.tie(embedding)
    logits = head(normal(ROWS, HIDDEN, seed=1))
    assert isinstance(head.format, PackedWeight)
    assert head.weight is embedding.weight
    embedding.weight.mul_(2)
    assert torch.equal(head(normal(ROWS, HIDDEN, seed=1)), logits)  # of the copy
    assert head.row_major() is embedding.weight


def test_a_copied_layer_has_its_own_matrix() -> None:
    layer = Linear(HIDDEN, (16,), **FP32)
    layer.row_major().copy_(normal(16, HIDDEN))
    other = copy.deepcopy(layer)
    assert other.format.row_major() is other.weight
    other.row_major().zero_()
    assert torch.equal(layer.row_major(), normal(16, HIDDEN))


class HalvedExperts(DenseExperts):
    """Experts of which half of every weight is held."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__(w13.detach() / 2, w2.detach() / 2)

    def product(self, x, routing, **options):
        return DenseExperts(self.w13 * 2, self.w2 * 2).product(x, routing, **options)


class ReversingDispatch:
    """Experts that see the rows in reverse order, behind a row that no expert computes."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def send(self, x, routing, addend):
        def moved(rows: torch.Tensor, fill: float) -> torch.Tensor:
            return torch.cat([torch.full_like(rows[:1], fill), rows.flip(0)])

        ids, weights = moved(routing.ids, -1), moved(routing.weights, 0.0)
        self.num_rows.append(ids.size(0))
        return moved(x, 1.0), ops.Routing(weights, ids), moved(addend, 0.0)

    def receive(self, product):
        return product[1:].flip(0)


@pytest.fixture
def block() -> MoeFeedForward:
    moe = MoeSpec(num_experts=6, top_k=2, intermediate_size=32, layers=range(1), shared_size=32)
    block = MoeFeedForward(HIDDEN, moe, **FP32)
    for seed, parameter in enumerate(block.parameters()):
        parameter.copy_(normal(*parameter.shape, seed=seed) / 8)
    return block


def run(block: MoeFeedForward, num_rows: int = ROWS) -> torch.Tensor:
    x = normal(ROWS, HIDDEN, seed=9)
    ends = torch.tensor([ROWS], dtype=torch.int32)
    starts = torch.tensor([0, ROWS], dtype=torch.int32)
    metadata = AttnMetadata.__new__(AttnMetadata)
    object.__setattr__(metadata, "valid_slices", ends)
    object.__setattr__(metadata, "cu_seqlens_q", starts)
    scratch = block.new_scratch(x, metadata)
    if num_rows != ROWS:
        scratch.out = x.new_empty(num_rows, HIDDEN)
        scratch.workspace = block.matrices.new_workspace(scratch.out, block.moe.top_k)
    return block(x, scratch).clone()


def test_experts_hold_any_format(block: MoeFeedForward) -> None:
    expected = run(block)
    block.matrices = HalvedExperts(block.w13, block.w2)
    assert torch.equal(run(block), expected)


def test_experts_compute_the_rows_that_the_dispatch_sends(block: MoeFeedForward) -> None:
    expected = run(block)
    block.dispatch = ReversingDispatch()
    torch.testing.assert_close(run(block, ROWS + 1), expected)
    assert block.dispatch.num_rows == [ROWS + 1]
