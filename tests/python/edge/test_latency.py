# SPDX-License-Identifier: Apache-2.0
"""How long calls take beside each other: the least of many turns in one process, never milliseconds.

The limits are far above what benchmarks/results/README.md has, since a host may be shared.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from diffulex.checkpoint.auto_model import detect
from diffulex.ops.acceptance import accept_mask_fill
from diffulex.ops.sampling import AcceptRule, ConfidenceKind, token_stats
from diffulex.quiet import quiet
from diffulex_edge.backends import BACKENDS
from diffulex_edge.exporter import load_decoder
from diffulex_edge.model import EdgeProgram
from diffulex_edge.program import PteProgram
from diffulex_edge.quant import quantize_model
from fixtures.edge import DEMO
from fixtures.extras import need_extra

need_extra("edge", "executorch", "torchao")

pytestmark = pytest.mark.alone
BLOCK, CONTEXT = 8, 64
TURNS, BURST = 30, 3


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def program(bundle):
    return PteProgram(bundle("demo") / "model.pte", threads=1)


def call_over(program, rows: int, first: int = CONTEXT):
    inputs = (
        torch.full((rows,), 7),
        torch.arange(first, first + rows),
        torch.full((rows,), first + rows),
        torch.arange(rows),
    )
    return lambda: program(*inputs)


def ratio(one, other) -> float:
    """Time of `one` as a share of that of `other`, in turns."""
    best = [float("inf"), float("inf")]
    for _ in range(TURNS):
        for place, call in enumerate((one, other)):
            for _ in range(BURST):
                start = time.perf_counter()
                call()
                best[place] = min(best[place], time.perf_counter() - start)
    return best[0] / best[1]


def test_a_step_takes_less_than_that_of_the_module(program):
    decoder = load_decoder(DEMO, detect(DEMO)[1], program.cache_rows, BACKENDS["xnnpack"])
    module = EdgeProgram(decoder)

    @torch.inference_mode()
    def eager(tokens, positions, ends, rows):
        return module(tokens[None], positions, ends, rows)

    assert ratio(call_over(program, BLOCK), call_over(eager, BLOCK)) < 0.65


def test_a_prompt_in_one_call_takes_less_than_in_blocks(program):
    blocks = [call_over(program, BLOCK, first) for first in range(0, 64, BLOCK)]
    assert ratio(call_over(program, 64, 0), lambda: [block() for block in blocks]) < 0.9


def test_four_blocks_take_less_than_four_times_one(program):
    one = call_over(program, BLOCK)
    assert ratio(call_over(program, 4 * BLOCK), lambda: [one() for _ in range(4)]) < 0.95


def test_a_step_is_the_model_and_hardly_the_sampling(program):
    """Statistics of the rows of four blocks and the decision over them."""
    rows = 4 * BLOCK
    logits = call_over(program, rows)()
    tokens = torch.full((1, rows), 9)
    places = torch.arange(rows, dtype=torch.int32).view(1, -1)

    def sample():
        result = token_stats(logits)
        accept_mask_fill(
            tokens,
            places,
            torch.zeros(1, dtype=torch.int32),
            torch.ones(1, dtype=torch.uint8),
            torch.tensor([0.9]),
            torch.zeros(1, dtype=torch.int32),
            result.ids,
            result.stats,
            mask_token_id=9,
            rule=AcceptRule.THRESHOLD,
            confidence_kind=ConfidenceKind.MAX_PROB,
        )

    assert ratio(sample, call_over(program, rows)) < 0.25


def lowered_products(decoder, path):
    """The decoder's products of one width, as XNNPACK runs them, over the rows of a block."""
    from executorch import exir
    from executorch.extension.pybindings import portable_lib

    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(
                part for layer in decoder.layers[:2] for part in (layer.gate, layer.up)
            )

        def forward(self, x):
            return tuple(part(x) for part in self.parts)

    module = Products().eval()
    x = torch.randn(BLOCK, module.parts[0].in_features)
    with quiet():
        exported = torch.export.export(module, (x,), strict=False)
        partitioners = BACKENDS["xnnpack"].partitioners()
        edge = exir.to_edge_transform_and_lower(exported, partitioner=partitioners)
        path.write_bytes(edge.to_executorch().buffer)
        portable_lib._unsafe_reset_threadpool(1)
        program = portable_lib._load_for_executorch(str(path))
    return lambda: program.forward((x,))


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_quantised_products_take_less(tmp_path):
    decoder = load_decoder(DEMO, detect(DEMO)[1], 64, BACKENDS["xnnpack"])
    whole = lowered_products(decoder, tmp_path / "whole.pte")
    small = lowered_products(quantize_model(decoder, "8da8w"), tmp_path / "small.pte")
    assert ratio(small, whole) < 0.9
