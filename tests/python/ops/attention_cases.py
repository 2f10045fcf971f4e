# SPDX-License-Identifier: Apache-2.0
"""Random batches for block_attention, and what the specification says about them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import torch

from reference import dense as oracles
from tolerance import to_numpy

CAP = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
LSE_TOLERANCE = {torch.bfloat16: 1e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@dataclasses.dataclass
class AttentionCase:
    """One call: tensors by argument name, host numbers, and the requests as the oracle wants them."""

    tensors: dict[str, torch.Tensor | None]
    numbers: dict[str, Any]
    requests: list[oracles.Request]

    def run(self, **overrides: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the op, both prefilled with NaN."""
        from diffulex.ops import block_attention

        tensors = dict(self.tensors)
        q = tensors.pop("q")
        assert q is not None
        positional = [
            tensors.pop(name)
            for name in (
                "k",
                "v",
                "k_cache",
                "v_cache",
                "page_table",
                "cu_seqlens_q",
                "context_lens",
                "valid_slices",
                "mask_kinds",
            )
        ]
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:2], torch.nan, device=q.device)
        numbers = {**self.numbers, **overrides}
        block_attention(q, *positional, **tensors, **numbers, out=out, lse=lse)
        return out, lse

    def gathered(self) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """(first row, keys, values, mask) of every request."""
        arrays = {name: to_numpy(t) for name, t in self.tensors.items() if t is not None}
        parts = []
        for index, request in enumerate(self.requests):
            first = int(arrays["cu_seqlens_q"][index])
            keys, values, mask = oracles.gather(
                arrays["k"],
                arrays["v"],
                arrays["k_cache"],
                arrays["v_cache"],
                arrays["page_table"][index],
                first,
                request,
                block=self.numbers["block_size"],
                window=self.numbers["sliding_window"],
                layout=self.numbers["kv_layout"],
            )
            parts.append((first, keys, values, mask))
        return parts

    def expected(self) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
        """fp64 (out, lse), and out of plain torch in the dtype of q."""
        q = self.tensors["q"]
        assert q is not None
        q64 = to_numpy(q)
        out, lse = np.zeros(q64.shape), np.full(q64.shape[:2], -np.inf)
        base = torch.zeros(q.shape, dtype=q.dtype)
        scale, softcap = self.numbers["scale"], self.numbers["softcap"]
        for first, keys, values, mask in self.gathered():
            rows = slice(first, first + mask.shape[0])
            out[rows], lse[rows] = oracles.softmax_rows(
                q64[rows], keys, values, mask, scale=scale, softcap=softcap
            )
            base[rows] = _plain_torch(q[rows].cpu(), keys, values, mask, scale, softcap)
        return out, lse, base


def _plain_torch(
    q: torch.Tensor,
    keys: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    group = q.shape[1] // keys.shape[1]
    k = torch.from_numpy(keys).to(q.dtype).repeat_interleave(group, 1).permute(1, 2, 0)
    v = torch.from_numpy(values).to(q.dtype).repeat_interleave(group, 1).transpose(0, 1)
    scores = q.transpose(0, 1) @ k * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~torch.from_numpy(mask), -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0)
    return (weights @ v).transpose(0, 1)


def random_case(  # noqa: PLR0915 (one straight list of draws)
    seed: int, device: str, *, layout: int | None = None, dtype: torch.dtype | None = None
) -> AttentionCase:
    """A batch that mixes kinds, lengths, pages, holes and windows."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    layout = rng.randrange(2) if layout is None else layout
    if dtype is None:
        dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    block = rng.choice([4, 8, 16, 32])
    page_size = rng.choice([4, 8, 16, 32, 64])
    num_kv_heads, group = rng.choice([(1, 1), (2, 1), (2, 2), (1, 4), (1, 7), (2, 4), (1, 8)])
    head_dim = rng.choice([64, 64, 64, 128, 128, 256])
    num_reqs = rng.randrange(6)
    requests, lengths = [], []
    with_starts = rng.random() < 0.3
    for _ in range(num_reqs):
        kind = rng.randrange(5) | (oracles.HOLE if rng.random() < 0.3 else 0)
        kind |= oracles.ANCHOR if rng.random() < 0.3 else 0
        c = rng.choice(
            [
                0,
                rng.randrange(page_size),
                2 * page_size,
                rng.randrange(5) * block,
                rng.randrange(120),
            ]
        )
        length = rng.choice([0, 1, block, 2 * block, rng.randrange(1, 40)])
        nv = length if rng.random() < 0.6 else rng.randrange(length + 1)
        p = rng.randrange(c + length + 1)
        pp = p + rng.randrange(2 * block)
        a = rng.randrange(c + 1) if with_starts else c
        requests.append(oracles.Request(kind, c, nv, a, p, pp))
        lengths.append(length)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_tokens = int(starts[-1]) + rng.choice([0, 0, 3])
    max_pages = max([-(-r.c // page_size) for r in requests], default=0) + rng.randrange(1, 3)
    num_pages = max(1, num_reqs * max_pages)
    pages = torch.randperm(num_pages, generator=generator)
    page_table = np.full((num_reqs, max_pages), -1, dtype=np.int32)
    for index, request in enumerate(requests):
        for slot in range(-(-request.c // page_size)):
            shared = index > 0 and rng.random() < 0.2
            owner = 0 if shared else index
            page_table[index, slot] = int(pages[owner * max_pages + slot])
            if rng.random() < 0.05:
                page_table[index, slot] = -1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)

    num_q_heads = num_kv_heads * group
    if rng.random() < 0.5:
        packed = normal(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim)
        q, k, v = torch.split(packed, [num_q_heads, num_kv_heads, num_kv_heads], 1)
    else:
        q = normal(num_tokens, num_q_heads, head_dim)
        k, v = (normal(num_tokens, num_kv_heads, head_dim) for _ in range(2))
    if layout == 0:
        spare_heads, spare_dims = rng.choice([(0, 0), (0, 0), (1, 64)])
        shape = (num_pages, page_size, num_kv_heads + spare_heads, head_dim + spare_dims)
        k_cache, v_cache = normal(*shape), normal(*shape)
    else:
        width = rng.choice([8, 8, 16])
        k_cache = normal(num_pages, num_kv_heads, head_dim // width, page_size, width)
        v_cache = normal(num_pages, num_kv_heads, head_dim, page_size)
    tensors: dict[str, torch.Tensor | None] = {
        "q": q,
        "k": k,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": ints(page_table).reshape(num_reqs, max_pages),
        "cu_seqlens_q": ints(starts),
        "context_lens": ints([r.c for r in requests]),
        "valid_slices": ints([int(starts[i]) + r.nv for i, r in enumerate(requests)]),
        "mask_kinds": ints([r.kind for r in requests]),
        "prefix_lens": ints([r.p for r in requests]),
        "padded_prefix_lens": ints([r.pp for r in requests]),
        "q_starts": ints([r.a for r in requests]) if with_starts else None,
    }
    numbers = {
        "scale": head_dim**-0.5,
        "softcap": rng.choice([0.0, 0.0, 30.0]),
        "block_size": block,
        "sliding_window": rng.choice([0, 0, 0, 1, block, 100]),
        "max_seqlen_q": max([1, *lengths]),
        "max_context_len": max([0, *(r.c for r in requests)]),
        "num_splits": rng.choice([0, 0, 1, 2, 5]),
        "kv_layout": layout,
    }
    return AttentionCase(tensors, numbers, requests)


def unseen_cache_slots(case: AttentionCase) -> torch.Tensor:
    """[num_pages, page_size] bool: slots that no row of any request sees."""
    k_cache, page_table = case.tensors["k_cache"], case.tensors["page_table"]
    assert k_cache is not None
    assert page_table is not None
    page_size = k_cache.shape[1] if case.numbers["kv_layout"] == 0 else k_cache.shape[3]
    unseen = torch.ones(k_cache.shape[0], page_size, dtype=torch.bool)
    for index, (request, part) in enumerate(zip(case.requests, case.gathered())):
        for j in np.flatnonzero(part[3].any(0)[: request.c]):
            unseen[int(page_table[index, j // page_size]), j % page_size] = False
    return unseen.to(k_cache.device)


def poison(case: AttentionCase, value: float) -> AttentionCase:
    """A copy in which everything that no row sees holds `value`."""
    tensors = {name: None if t is None else t.clone() for name, t in case.tensors.items()}
    k, v, q = tensors["k"], tensors["v"], tensors["q"]
    assert k is not None
    assert v is not None
    assert q is not None
    unseen_rows = np.ones(q.shape[0], dtype=bool)
    real_rows = np.zeros(q.shape[0], dtype=bool)
    for request, (first, _, _, mask) in zip(case.requests, case.gathered()):
        seen = np.flatnonzero(mask.any(0)[request.c :])
        unseen_rows[first + seen] = False
        real_rows[first : first + request.nv] = True
    k[torch.from_numpy(unseen_rows)] = value
    v[torch.from_numpy(unseen_rows)] = value
    q[torch.from_numpy(~real_rows)] = value
    unseen = unseen_cache_slots(case)
    for name in ("k_cache", "v_cache"):
        cache = tensors[name]
        assert cache is not None
        if case.numbers["kv_layout"] == 0:
            cache[unseen] = value
            cache[:, :, k.shape[1] :] = value
            cache[:, :, :, k.shape[2] :] = value
        elif name == "k_cache":
            cache.permute(0, 3, 1, 2, 4)[unseen] = value
        else:
            cache.permute(0, 3, 1, 2)[unseen] = value
    return AttentionCase(tensors, case.numbers, case.requests)
