# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: buckets, and decoding that equals the eager path token for token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from diffulex import SamplingParams
from diffulex.engine.graph_runner import graph_buckets
from tiny_engine import TinyModel


@pytest.mark.parametrize(
    ("max_num_reqs", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (48, (1, 2, 4, 8, 16, 32, 48)),
        (5000, (1, 2, 4, 8, *range(16, 513, 16))),
    ],
)
def test_buckets(max_num_reqs: int, expected: tuple[int, ...]) -> None:
    assert graph_buckets(max_num_reqs) == expected


def requests(seed: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 24),
            ignore_eos=True,
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.getrandbits(64),
        )
        for _ in range(count)
    ]
    return prompts, params


@pytest.mark.cuda
@pytest.mark.parametrize(("block_size", "buffer_size"), [(4, 1), (8, 3), (32, 2)])
@pytest.mark.parametrize("layout", ["unified", "distinct"])
def test_graph_decode_equals_eager_decode(
    tiny_cuda: TinyModel, block_size: int, buffer_size: int, layout: str
) -> None:
    settings: dict[str, Any] = {
        "block_size": block_size,
        "buffer_size": buffer_size,
        "kv_cache_layout": layout,
        "max_num_reqs": 11,
        "decoding_thresholds": {"accept_threshold": 0.3},
    }
    prompts, params = requests(block_size, 24)
    with tiny_cuda.engine(**settings) as engine:
        graphed = engine.generate(prompts, params, summary=False)
        assert engine._runner.graph_buckets == (1, 2, 4, 8, 11)
        assert graphed.stats.num_graph_steps > 0
        assert graphed.stats.num_graph_fallbacks == 0
        # The same request alone uses another bucket.
        alone = engine.generate([prompts[3]], [params[3]], summary=False)
        assert alone[0].token_ids == graphed[3].token_ids
    with tiny_cuda.engine(**settings, enforce_eager=True) as engine:
        eager = engine.generate(prompts, params, summary=False)
        assert engine._runner.graph_buckets == ()
        assert eager.stats.num_graph_steps == 0
    assert [o.token_ids for o in graphed] == [o.token_ids for o in eager]
    assert [o.metrics.nfe for o in graphed] == [o.metrics.nfe for o in eager]


@pytest.mark.cuda
def test_cuda_equals_cpu(tiny: TinyModel, tiny_cuda: TinyModel) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = {"block_size": 8, "buffer_size": 2}
    prompts, _ = requests(5, 6)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with tiny.engine(**settings) as engine:
        expected = engine.generate(prompts, params, summary=False)
    with tiny_cuda.engine(**settings) as engine:
        outputs = engine.generate(prompts, params, summary=False)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


@pytest.mark.cuda
def test_page_pool_from_device_memory(tiny_cuda: TinyModel) -> None:
    settings = {"num_pages": -1, "gpu_memory_utilization": 0.05, "enforce_eager": True}
    with tiny_cuda.engine(**settings) as engine:
        total = torch.cuda.get_device_properties(0).total_memory
        assert engine.config.cache.num_pages >= engine.config.pages_per_request
        assert engine._runner.kv_cache.nbytes <= 0.05 * total
    with pytest.raises(ValueError, match="num_pages: expected memory for at least"):
        tiny_cuda.engine(**{**settings, "gpu_memory_utilization": 1e-6})


@pytest.mark.cuda
def test_static_runner_switch(tiny_cuda: TinyModel) -> None:
    with tiny_cuda.engine(enable_full_static_runner=False) as engine:
        assert engine._runner.graph_buckets == ()
