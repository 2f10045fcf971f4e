# SPDX-License-Identifier: Apache-2.0
"""Kernels of other projects, where they can be imported."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from diffulex import ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "flash_attention_3",
    "flashinfer_fused_moe",
    "flashinfer_prefill",
    "flashinfer_sampling",
    "torch_grouped_experts",
    "torch_scaled_grouped_experts",
    "vllm_fused_experts",
]


@functools.cache
def _attribute(module: str, name: str) -> tuple[Any, str]:
    """The attribute, or None and why it is not there."""
    try:
        return getattr(importlib.import_module(module), name), ""
    except Exception as error:  # whatever the import of a foreign package raises
        return None, f"not importable: {type(error).__name__}: {error}"[:120]


def flash_attention_3() -> tuple[Callable[..., Any] | None, str]:
    """FlashAttention-3 over a paged cache, from the package inside vLLM.

    What it returns computes the scheduler's metadata of one batch, as an engine does once a step,
    and gives f(q, k_cache, v_cache, table, out, has_metadata).
    """
    function, reason = _attribute("vllm.vllm_flash_attn", "flash_attn_varlen_func")
    if function is None:
        return None, reason
    metadata_of, reason = _attribute("vllm.vllm_flash_attn", "get_scheduler_metadata")
    if metadata_of is None:
        return None, reason

    def plan(
        *,
        starts: torch.Tensor,
        keys: torch.Tensor,
        max_query: int,
        max_keys: int,
        heads: tuple[int, int, int],
        page: int,
        is_causal: bool,
        window: tuple[int, int],
    ) -> Callable[..., Any]:
        q_heads, kv_heads, head_dim = heads

        @functools.cache
        def metadata() -> torch.Tensor:
            return metadata_of(  # type: ignore[no-any-return]
                batch_size=len(keys), max_seqlen_q=max_query, max_seqlen_k=max_keys,
                num_heads_q=q_heads, num_heads_kv=kv_heads, headdim=head_dim, cache_seqlens=keys,
                qkv_dtype=torch.bfloat16, cu_seqlens_q=starts, page_size=page, causal=is_causal,
                window_size=window,
            )  # fmt: skip

        def call(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            table: torch.Tensor,
            out: torch.Tensor,
            has_metadata: bool,
        ) -> None:
            function(
                q, k, v, max_seqlen_q=max_query, cu_seqlens_q=starts, max_seqlen_k=max_keys,
                seqused_k=keys, block_table=table, causal=is_causal, window_size=list(window),
                out=out, scheduler_metadata=metadata() if has_metadata else None, fa_version=3,
            )  # fmt: skip

        return call

    return plan, ""


def flashinfer_prefill() -> tuple[Callable[..., Any] | None, str]:
    """FlashInfer's paged prefill with one of its backends ("fa2", "fa3").

    Plans at once and returns f(q, k_cache, v_cache, out).
    """
    wrapper, reason = _attribute("flashinfer", "BatchPrefillWithPagedKVCacheWrapper")
    if wrapper is None:
        return None, reason

    def plan(
        starts: torch.Tensor,
        pages: Sequence[torch.Tensor],
        keys: torch.Tensor,
        heads: tuple[int, int, int],
        page: int,
        backend: str,
    ) -> Callable[..., Any]:
        space = torch.empty(256 << 20, dtype=torch.uint8, device=keys.device)
        prefill = wrapper(space, "NHD", backend=backend)
        counts = torch.tensor([len(part) for part in pages], device=keys.device)
        first_pages = torch.cumsum(counts, 0, dtype=torch.int32)
        first_pages = torch.cat((torch.zeros_like(first_pages[:1]), first_pages))
        prefill.plan(
            starts, first_pages, torch.cat(list(pages)), (keys - 1) % page + 1, *heads, page,
            causal=False, q_data_type=torch.bfloat16,
        )  # fmt: skip
        return lambda q, k, v, out: prefill.run(q, (k, v), out=out)

    return plan, ""


def flashinfer_sampling(name: str) -> tuple[Callable[..., Any] | None, str]:
    """A function of FlashInfer's sampling module."""
    return _attribute("flashinfer.sampling", name)


def flashinfer_fused_moe() -> str:
    """Why FlashInfer's fused experts are not timed."""
    function, reason = _attribute("flashinfer.fused_moe", "cutlass_fused_moe")
    if function is None:
        return reason
    return "not timed: it compiles its CUTLASS kernels at first use, longer than all of this runs"


def vllm_fused_experts() -> tuple[Callable[..., Any] | None, str]:
    """vLLM's Triton mixture of experts as f(x, w13, w2, weights, ids)."""
    return _attribute("vllm.model_executor.layers.fused_moe.fused_moe", "fused_experts")


def torch_grouped_experts(
    activated: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[Callable[..., Any] | None, str]:
    """A mixture of experts of torch's grouped products as f(x, w13, w2, weights, ids) -> [T, H].

    Args:
        activated: of gate and up, between the products.
    """
    if not torch.cuda.is_available():
        return None, "needs CUDA"
    grouped, reason = _attribute("torch.nn.functional", "grouped_mm")
    if grouped is None:
        return None, reason

    def experts(
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        def products(tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            both = grouped(x[tokens], w13.transpose(1, 2), offs=ends)
            return grouped(activated(both), w2.transpose(1, 2), offs=ends)  # type: ignore[no-any-return]

        return _by_expert(products, len(w13), weights, ids)

    return experts, ""


def torch_scaled_grouped_experts(
    activated: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[Callable[..., Any] | None, str]:
    """The same of e4m3 codes with a scale a row, as f(x, w13, w13_scale, w2, w2_scale, weights, ids) -> [T, H]."""
    grouped, reason = _attribute("torch", "_scaled_grouped_mm")
    if grouped is None:
        return None, reason

    def multiply(
        rows: ops.QuantizedRows, w: torch.Tensor, w_scale: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        return grouped(  # type: ignore[no-any-return]
            rows.codes, w.transpose(1, 2), rows.scale[0], w_scale, offs=ends,
            out_dtype=torch.bfloat16,
        )  # fmt: skip

    def experts(
        x: torch.Tensor,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        coded = ops.quantize_rows(x, w13.dtype, group=x.size(1))

        def products(tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            # A row of float8 is taken as bytes: not every op of torch knows the type.
            codes = coded.codes.view(torch.uint8)[tokens].view(w13.dtype)
            slots = ops.QuantizedRows(codes, coded.scale[:, tokens])
            inner = activated(multiply(slots, w13, w13_scale, ends))
            of_inner = ops.quantize_rows(inner, w2.dtype, group=inner.size(1))
            scale = of_inner.scale[:, : inner.size(0)]
            return multiply(of_inner._replace(scale=scale), w2, w2_scale, ends)

        return _by_expert(products, len(w13), weights, ids)

    return experts, ""


def _by_expert(
    products: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    num_experts: int,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Slots sorted by expert, what `products` makes of their tokens up to the ends of the experts, and its
    weighted sum a token."""
    num_tokens, top_k = ids.shape
    sorted_ids, order = ids.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)
    made = products(order // top_k, ends)
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    slots = made[places].view(num_tokens, top_k, -1)
    return torch.bmm(weights.to(slots.dtype)[:, None], slots).squeeze(1)
