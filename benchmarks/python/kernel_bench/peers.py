# SPDX-License-Identifier: Apache-2.0
"""Kernels of other projects, where they can be imported."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["flash_attention_3", "flashinfer_prefill", "vllm_fused_experts"]


def _attribute(module: str, name: str) -> tuple[Any, str]:
    """The attribute, or None and why it is not there."""
    try:
        return getattr(importlib.import_module(module), name), ""
    except Exception as error:  # whatever the import of a foreign package raises
        return None, f"not importable: {type(error).__name__}: {error}"[:120]


def flash_attention_3() -> tuple[Callable[..., Any] | None, str]:
    """FlashAttention-3 over a paged cache as f(q, k_cache, v_cache, table, **sizes)."""
    function, reason = _attribute("vllm.vllm_flash_attn", "flash_attn_varlen_func")
    if function is None:
        return None, reason

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        num_query: int,
        used: torch.Tensor,
        num_keys: int,
        table: torch.Tensor | None,
        causal: bool,
        out: torch.Tensor,
    ) -> None:
        keys = {"seqused_k": used, "block_table": table}
        if table is None:
            keys = {"cu_seqlens_k": cu_seqlens_q}
        function(
            q, k, v, max_seqlen_q=num_query, cu_seqlens_q=cu_seqlens_q, max_seqlen_k=num_keys,
            causal=causal, out=out, fa_version=3, **keys,
        )  # fmt: skip

    return call, ""


def flashinfer_prefill() -> tuple[Callable[..., Any] | None, str]:
    """FlashInfer's paged prefill with one of its backends ("fa2", "fa3").

    Plans at once and returns f(q, k_cache, v_cache, out).
    """
    wrapper, reason = _attribute("flashinfer", "BatchPrefillWithPagedKVCacheWrapper")
    if wrapper is None:
        return None, reason

    def plan(
        device: torch.device,
        cu_seqlens_q: torch.Tensor,
        table: torch.Tensor,
        num_keys: int,
        heads: tuple[int, int, int],
        page_size: int,
        backend: str,
    ) -> Callable[..., Any]:
        num_requests, num_pages = table.shape
        space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        prefill = wrapper(space, "NHD", backend=backend)
        starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * num_pages
        last = torch.full_like(starts[1:], (num_keys - 1) % page_size + 1)
        prefill.plan(
            cu_seqlens_q, starts, table.flatten(), last, *heads, page_size, causal=False,
            q_data_type=torch.bfloat16,
        )  # fmt: skip
        return lambda q, k, v, out: prefill.run(q, (k, v), out=out)

    return plan, ""


def vllm_fused_experts() -> tuple[Callable[..., Any] | None, str]:
    """vLLM's Triton mixture of experts as f(x, w13, w2, weights, ids)."""
    return _attribute("vllm.model_executor.layers.fused_moe.fused_moe", "fused_experts")
