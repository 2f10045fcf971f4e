# SPDX-License-Identifier: Apache-2.0
"""Short tests of the ops and of the bundled model on one device, for ``diffulex doctor``.

Ops are compared with their pure-torch twins. A test returns a remark, or raises what is wrong.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from diffulex.bench.word_problems import extract_answer
from diffulex.config.sampling_params import SamplingParams
from diffulex.engine.engine import Diffulex
from diffulex.nn.rotary import build_cos_sin_cache
from diffulex.ops.activation import act_and_mul, act_and_mul_reference
from diffulex.ops.attention import MaskKind, block_attention, block_attention_reference
from diffulex.ops.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from diffulex.ops.rope import qk_norm_rope_store, qk_norm_rope_store_reference
from diffulex.ops.sampling import token_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_QUESTION = (
    "Tom has 3 bags with 4 marbles each. Then he buys 5 more marbles. "
    "How many marbles does Tom have now?"
)
_TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


def _random(shape: tuple[int, ...], device: str, dtype: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, getattr(torch, dtype))


def _expect_close(actual: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    error = (actual.float() - expected.float()).abs().max().item()
    limit = _TOLERANCE[dtype] * max(1.0, expected.float().abs().max().item())
    if not error <= limit:
        raise RuntimeError(f"largest difference to the reference is {error:.3g}, limit {limit:.3g}")


def _test_norm(device: str, dtype: str) -> None:
    x, weight = _random((9, 96), device, dtype), _random((96,), device, dtype, seed=1)
    _expect_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), dtype)
    pair = [(x.clone(), x.flip(0).clone()) for _ in range(2)]
    add_rms_norm(*pair[0], weight, 1e-6)
    add_rms_norm_reference(*pair[1], weight, 1e-6)
    for actual, expected in zip(*pair, strict=True):
        _expect_close(actual, expected, dtype)


def _test_activation(device: str, dtype: str) -> None:
    x = _random((7, 160), device, dtype)
    _expect_close(act_and_mul(x), act_and_mul_reference(x), dtype)


def _test_rope_and_store(device: str, dtype: str) -> None:
    table = build_cos_sin_cache(64, 32, 1e4, device)
    positions = torch.arange(5, 11, device=device)
    slots = torch.tensor([0, 3, -1, 5, 7, -1], dtype=torch.int32, device=device)
    q_weight, k_weight = (_random((32,), device, dtype, seed) for seed in (1, 2))
    results = []
    for op in (qk_norm_rope_store, qk_norm_rope_store_reference):
        qkv = _random((6, 8 * 32), device, dtype)
        k_cache, v_cache = torch.zeros(2, 2, 4, 2, 32, device=device, dtype=qkv.dtype)
        op(
            qkv,
            positions,
            table,
            q_weight,
            k_weight,
            k_cache,
            v_cache,
            slots,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=32,
            eps=1e-6,
        )
        results.append((qkv, k_cache, v_cache))
    for actual, expected in zip(*results, strict=True):
        _expect_close(actual, expected, dtype)


def _test_attention(device: str, dtype: str) -> None:
    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q = _random((12, 4, 64), device, dtype)
    k, v = (_random((12, 2, 64), device, dtype, seed) for seed in (1, 2))
    caches = [_random((4, 8, 2, 64), device, dtype, seed) for seed in (3, 4)]
    pages = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32, device=device)
    kinds = integers(MaskKind.BLOCK_CAUSAL, MaskKind.BLOCK_CAUSAL)
    common = (q, k, v, *caches, pages, integers(0, 8, 12), integers(12, 4), integers(8, 12), kinds)
    actual = block_attention(*common, block_size=4, max_seqlen_q=8, max_context_len=12)
    expected, _ = block_attention_reference(*common, block_size=4)
    _expect_close(actual, expected, dtype)


def _test_token_stats(device: str) -> str:
    logits = _random((5, 3000), device, "float32")
    logits[3, 2999] = 9.0
    result = token_stats(logits)
    best = torch.softmax(logits, -1).max(-1)
    if not torch.equal(result.ids, best.indices):
        raise RuntimeError(
            f"expected the best ids {best.indices.tolist()}, got {result.ids.tolist()}"
        )
    _expect_close(result.stats[:, 1], best.values, "float32")
    return "float32"


def _test_demo(device: str) -> str:
    with Diffulex("demo", device=device, max_num_reqs=1) as engine:
        result = engine.generate(
            _QUESTION, SamplingParams(), summary=False, use_chat_template=True,
            progress_log_interval=0,
        )  # fmt: skip
    answer = extract_answer(result[0].text)
    if answer != 17:
        raise RuntimeError(f"expected the answer 17, got {result[0].text!r}")
    return f"answer {answer}, {result.tpf:.2f} tokens per forward"


def _all_dtypes(test: Callable[[str, str], None], device: str) -> str:
    for dtype in _TOLERANCE:
        test(device, dtype)
    return ", ".join(_TOLERANCE)


#: Name -> test of one device.
SELF_TESTS: Mapping[str, Callable[[str], str]] = {
    "rms_norm": functools.partial(_all_dtypes, _test_norm),
    "act_and_mul": functools.partial(_all_dtypes, _test_activation),
    "qk_norm_rope_store": functools.partial(_all_dtypes, _test_rope_and_store),
    "block_attention": functools.partial(_all_dtypes, _test_attention),
    "token_stats": _test_token_stats,
    "model demo": _test_demo,
}
