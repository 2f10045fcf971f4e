# SPDX-License-Identifier: Apache-2.0
"""Caches of e4m3 codes with a scale byte per slot and head, for the tests of the ops."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

import op_calls
from attention_cases import AttentionCase
from reference import quantize as reference

CODED = torch.float8_e4m3fn
#: What no reader may see: a code that stands for NaN, and a scale beyond every finite one.
NEVER = 0xFF
OPS = ["block_attention", "store_kv_cache", "load_kv_cache", "copy_kv_pages", "qk_norm_rope_store"]


def coded_caches(num_pages: int, page_size: int, heads: int, dim: int) -> dict[str, Any]:
    """Caches whose codes and scales were never written."""
    codes = torch.full((2, num_pages, page_size, heads, dim), NEVER, dtype=torch.uint8)
    scales = torch.full((2, num_pages, heads, page_size), NEVER, dtype=torch.uint8)
    k, v = codes.view(CODED)
    return {"k_cache": k, "v_cache": v, "k_scale": scales[0], "v_scale": scales[1]}


def oracle(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale bytes of rows [..., D]."""
    flat = rows.float().numpy().reshape(-1, rows.shape[-1])
    heads = [reference.kv_head(head) for head in flat]
    codes = np.stack([codes for codes, _ in heads]).reshape(rows.shape)
    return codes, np.array([scale for _, scale in heads], np.uint8).reshape(rows.shape[:-1])


def coded(case: AttentionCase) -> tuple[AttentionCase, AttentionCase]:
    """The case with its caches as codes, and with caches of their values."""
    codes, values = dict(case.tensors), dict(case.tensors)
    for name in ("k", "v"):
        rows, cache = case.tensors[name], case.tensors[f"{name}_cache"]
        assert rows is not None
        assert cache is not None
        # Caches may have room for longer heads.
        raw = np.full(cache.shape, NEVER, np.uint8)
        raw[..., : rows.shape[2]], scales = oracle(cache[..., : rows.shape[2]])
        codes[f"{name}_cache"] = torch.from_numpy(raw).view(CODED)
        codes[f"{name}_scale"] = torch.from_numpy(scales).permute(0, 2, 1).contiguous()
        read = torch.from_numpy(reference.kv_values(raw, scales))
        values[f"{name}_cache"] = read.to(cache.dtype)
    return (
        dataclasses.replace(case, tensors=codes),
        dataclasses.replace(case, tensors=values),
    )


def with_scales(op: str, device: str) -> op_calls.Call:
    """A call of `op` with caches of codes."""
    tensors, numbers = op_calls.make(op, device)
    cache = tensors["k_cache"]
    assert cache is not None
    num_pages, page_size, heads, dim = cache.shape
    for name, part in coded_caches(num_pages, page_size, heads, dim).items():
        tensors[name] = part.to(device)
    return tensors, numbers
