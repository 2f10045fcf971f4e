# SPDX-License-Identifier: Apache-2.0
"""Short tests of the ops and of the bundled model on one device, for ``diffulex doctor``.

Ops are compared with torch's own functions. A test returns a remark, or raises what is wrong.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex.bench.word_problems import extract_answer
from diffulex.config.sampling_params import SamplingParams
from diffulex.engine.engine import Diffulex
from diffulex.nn.rotary import build_cos_sin_cache
from diffulex.ops.activation import act_and_mul
from diffulex.ops.attention import MaskKind, block_attention
from diffulex.ops.norm import add_rms_norm, rms_norm
from diffulex.ops.rope import qk_norm_rope_store
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


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.float(), weight.shape, weight.float(), 1e-6)


def _test_norm(device: str, dtype: str) -> None:
    x, weight = _random((9, 96), device, dtype), _random((96,), device, dtype, seed=1)
    _expect_close(rms_norm(x, weight, 1e-6), _norm(x, weight), dtype)
    normed, residual = x.clone(), x.flip(0).clone()
    total = normed.float() + residual.float()
    add_rms_norm(normed, residual, weight, 1e-6)
    _expect_close(normed, _norm(total, weight), dtype)
    _expect_close(residual, total, dtype)


def _test_activation(device: str, dtype: str) -> None:
    x = _random((7, 160), device, dtype)
    gate, up = x.float().chunk(2, -1)
    _expect_close(act_and_mul(x), functional.silu(gate) * up, dtype)


def _test_rope_and_store(device: str, dtype: str) -> None:
    table = build_cos_sin_cache(64, 32, 1e4, device)
    positions = torch.arange(5, 11, device=device)
    slots = torch.tensor([0, 3, -1, 5, 7, -1], dtype=torch.int32, device=device)
    q_weight, k_weight = (_random((32,), device, dtype, seed) for seed in (1, 2))
    qkv = _random((6, 8 * 32), device, dtype)
    heads = qkv.view(6, 8, 32).float()
    normed = torch.cat([_norm(heads[:, :4], q_weight), _norm(heads[:, 4:6], k_weight)], 1)
    (low, high), (cos, sin) = (t.chunk(2, -1) for t in (normed, table[positions][:, None]))
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    caches = torch.zeros(2, 2, 4, 2, 32, device=device, dtype=qkv.dtype)
    qk_norm_rope_store(
        qkv,
        positions,
        table,
        q_weight,
        k_weight,
        caches[0],
        caches[1],
        slots,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        eps=1e-6,
    )
    _expect_close(qkv.view(6, 8, 32), torch.cat([turned, heads[:, 6:]], 1), dtype)
    stored = torch.zeros(2, 8, 2, 32, device=device)
    is_stored = slots >= 0
    for rows, cache in zip((turned[:, 4:6], heads[:, 6:]), stored, strict=True):
        cache[slots[is_stored].long()] = rows[is_stored]
    _expect_close(caches.flatten(1, 2), stored, dtype)


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
    for rows, context, table in ((slice(0, 8), 12, [2, 0]), (slice(8, 12), 4, [3])):
        keys, values = (
            torch.cat([cache[table].flatten(0, 1)[:context], new[rows]]).float().transpose(0, 1)
            for cache, new in zip(caches, (k, v), strict=True)
        )
        positions = torch.arange(context, keys.shape[1], device=device)
        block_end = (positions // 4 + 1) * 4
        visible = torch.arange(keys.shape[1], device=device) < block_end[:, None]
        expected = functional.scaled_dot_product_attention(
            q[rows].float().transpose(0, 1)[None],
            keys.repeat_interleave(2, 0)[None],
            values.repeat_interleave(2, 0)[None],
            attn_mask=visible,
        )
        _expect_close(actual[rows], expected[0].transpose(0, 1), dtype)


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
