# SPDX-License-Identifier: Apache-2.0
"""A valid call of every op, as (arguments, keyword arguments) for `torch.ops.diffulex.<op>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import acceptance_calls
import decode_calls
import merge_calls
import moe_calls

T, R, HQ, HKV, D, PAGES, PAGE = 6, 2, 4, 2, 64, 5, 4
V, B = 40, 4

Arguments = dict[str, Any]
Keywords = dict[str, Any]
Call = tuple[Arguments, Keywords]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _caches() -> Arguments:
    return {"k_cache": _normal(PAGES, PAGE, HKV, D), "v_cache": _normal(PAGES, PAGE, HKV, D)}


def _angles() -> torch.Tensor:
    angle = torch.arange(32)[:, None] * torch.logspace(0, -2, D // 4)[None]
    return torch.cat([angle.cos(), angle.sin()], 1)


def block_attention() -> Call:
    tensors = {
        "q": _normal(T, HQ, D),
        "k": _normal(T, HKV, D),
        "v": _normal(T, HKV, D),
        **_caches(),
        "page_table": _ints([0, 3], [1, -1]),
        "cu_seqlens_q": _ints(0, 4, 6),
        "context_lens": _ints(8, 4),
        "valid_slices": _ints(4, 6),
        "mask_kinds": _ints(1, 2),
        "prefix_lens": _ints(0, 0),
        "padded_prefix_lens": _ints(0, 0),
        "q_starts": None,
        "k_scale": None,
        "v_scale": None,
        "out": torch.zeros(T, HQ, D),
        "lse": torch.zeros(T, HQ),
        "workspace": None,
        "codes": None,
        "codes_scale": None,
    }
    numbers = {
        "scale": 0.125,
        "softcap": 0.0,
        "block_size": 4,
        "sliding_window": 0,
        "max_seqlen_q": 4,
        "max_context_len": 8,
        "num_splits": 1,
        "kv_layout": 0,
    }
    return tensors, numbers


def store_kv_cache() -> Call:
    tensors = {
        "k": _normal(T, HKV, D),
        "v": _normal(T, HKV, D),
        **_caches(),
        "slot_mapping": _ints(0, -1, 5, 19, 7, -1),
        "k_scale": None,
        "v_scale": None,
    }
    return tensors, {"kv_layout": 0}


def load_kv_cache() -> Call:
    tensors = {
        **_caches(),
        "k_new": _normal(T, HKV, D),
        "v_new": _normal(T, HKV, D),
        "page_table": _ints([0, 3], [1, -1]),
        "context_lens": _ints(8, 4),
        "cu_seqlens_q": _ints(0, 4, 6),
        "cu_seqlens_k": _ints(0, 12, 18),
        "k_scale": None,
        "v_scale": None,
        "k_out": torch.zeros(20, HKV, D),
        "v_out": torch.zeros(20, HKV, D),
    }
    return tensors, {"kv_layout": 0}


def copy_kv_pages() -> Call:
    tensors = {**_caches(), "src_dst": _ints([0, 1], [-1, 2], [3, 4])}
    return {**tensors, "k_scale": None, "v_scale": None}, {}


def _code_rows() -> Arguments:
    return {"codes": torch.zeros(T, D, dtype=torch.int8), "scale": torch.zeros(1, T)}


def rms_norm() -> Call:
    tensors = {"x": _normal(T, D), "weight": _normal(D), "out": torch.zeros(T, D), **_code_rows()}
    return tensors, {"eps": 1e-6, "weight_offset": 0.0}


def add_rms_norm() -> Call:
    tensors = {"x": _normal(T, D), "residual": _normal(T, D + 0) * 2, "weight": _normal(D)}
    return tensors | _code_rows(), {"eps": 1e-6, "weight_offset": 1.0}


def sum_add_rms_norm() -> Call:
    tensors = {
        "parts": _normal(3, T, D),
        "residual": _normal(T, D),
        "weight": _normal(D),
        "out": torch.zeros(T, D),
    }
    return tensors, {"eps": 1e-6, "weight_offset": 1.0}


def rms_norm_add() -> Call:
    tensors = {
        "x": _normal(T, D),
        "residual": _normal(T, D) * 2,
        "weight": _normal(D),
        "out_scale": torch.tensor([0.5]),
        "out": torch.zeros(T, D),
    }
    return tensors, {"eps": 1e-6, "weight_offset": 0.0}


def rotary_embedding() -> Call:
    tensors = {
        "positions": torch.arange(T),
        "q": _normal(T, HQ, D),
        "k": _normal(T, HKV, D),
        "cos_sin_cache": _angles(),
    }
    return tensors, {"head_dim": D, "neox": True}


def _fused_numbers() -> Keywords:
    return {
        "num_q_heads": HQ,
        "num_kv_heads": HKV,
        "head_dim": D,
        "eps": 1e-6,
        "weight_offset": 0.0,
        "neox": True,
        "norm_v": False,
        "v_from_raw_k": False,
    }


def qk_norm_rope() -> Call:
    tensors = {
        "qkv": _normal(T, (HQ + 2 * HKV) * D),
        "positions": torch.arange(T),
        "cos_sin_cache": _angles(),
        "q_weight": _normal(D),
        "k_weight": _normal(D),
        "v_out": None,
    }
    return tensors, _fused_numbers()


def qk_norm_rope_store() -> Call:
    tensors = {
        **qk_norm_rope()[0],
        **_caches(),
        "slot_mapping": _ints(0, -1, 5, 19, 7, -1),
        "k_scale": None,
        "v_scale": None,
    }
    return tensors, {**_fused_numbers(), "kv_layout": 0}


def act_and_mul() -> Call:
    return {"x": _normal(T, 2 * D), "out": torch.zeros(T, D), **_code_rows()}, {"act": 0}


def linear_few_rows() -> Call:
    half = torch.bfloat16
    tensors = {
        "x": _normal(3, 64).to(half),
        "weight": _normal(128, 64).to(half),
        "bias": _normal(128).to(half),
        "out": torch.zeros(3, 128, dtype=half),
    }
    return tensors, {"act": -1}


def linear_packed() -> Call:
    from diffulex.ops import pack_weight

    packed = pack_weight(_normal(V, D))
    tensors = {"x": _normal(T, D), "packed_weight": packed, "out": torch.zeros(T, V)}
    return tensors, {"out_features": V}


def quantize_rows() -> Call:
    codes = torch.zeros(T, D, dtype=torch.int8)
    return {"x": _normal(T, D), "out": codes, "scale": torch.zeros(1, T)}, {"group": 128}


def quantize_weight() -> Call:
    codes = torch.zeros(V, D, dtype=torch.int8)
    tensors = {"w": _normal(V, D), "out": codes, "scale": torch.zeros(V)}
    return tensors, {"scheme": 2, "group": 0}


def linear_scaled() -> Call:
    codes = torch.ones(V, D, dtype=torch.int8)
    tensors = {
        "x": torch.ones(T, D, dtype=torch.int8),
        "x_scale": torch.ones(1, T),
        "weight": codes,
        "weight_scale": torch.ones(V),
        "bias": _normal(V),
        "out": torch.zeros(T, V),
    }
    return tensors, {"act": -1}


def linear_w4a16() -> Call:
    tensors = {
        "x": _normal(T, D),
        "weight": torch.ones(V, D // 2, dtype=torch.uint8),
        "scales": torch.ones(2, V, dtype=torch.bfloat16),
        "zeros": torch.zeros(2, V, dtype=torch.uint8),
        "bias": _normal(V),
        "out": torch.zeros(T, V),
    }
    return tensors, {"group": D // 2}


def dequantize_nibbles() -> Call:
    tensors = {
        "weight": torch.ones(V, D // 2, dtype=torch.uint8),
        "scales": torch.ones(2, V, dtype=torch.bfloat16),
        "zeros": torch.zeros(2, V, dtype=torch.uint8),
        "out": torch.zeros(V, D, dtype=torch.bfloat16),
    }
    return tensors, {"group": D // 2}


def token_stats() -> Call:
    tensors = {
        "logits": _normal(T, V),
        "extra_logits": _normal(1, V),
        "row_index": _ints(0, 6, -1, 5),
        "inv_temperature": torch.tensor([0.0, 1.0, 1.0, 0.5]),
        "uniforms": torch.tensor([0.5, 0.25, 0.5, 0.75], dtype=torch.float64),
        "forbidden_ids": torch.tensor([V - 1, -1]),
        "penalty_ids": torch.tensor([3, -1, 2, 1]),
        "penalties": torch.tensor([0.5, 0.5, 0.0, 1.5]),
        "ids": torch.zeros(4, dtype=torch.int64),
        "stats": torch.zeros(4, 8),
        "topk_ids": torch.zeros(4, 3, dtype=torch.int64),
        "topk_probs": torch.zeros(4, 3),
        "workspace": None,
    }
    numbers = {
        "vocab_limit": V - 2,
        "softcap": 0.0,
        "exclusion": 0,
        "vocab_start": 0,
        "partial": False,
    }
    return tensors, numbers


def merge_token_stats() -> Call:
    from diffulex.ops import token_stats as run

    logits = _normal(T, V)
    parts = [
        run(half.contiguous(), partial=True, vocab_start=start, top_k=3)
        for half, start in ((logits[:, : V // 2], 0), (logits[:, V // 2 :], V // 2))
    ]
    tensors = {
        "part_ids": torch.stack([part.ids for part in parts]),
        "part_stats": torch.stack([part.stats for part in parts]),
        "part_topk_ids": torch.stack([part.topk_ids for part in parts]),
        "part_topk_vals": torch.stack([part.topk_probs for part in parts]),
        "ids": torch.zeros(T, dtype=torch.int64),
        "stats": torch.zeros(T, 8),
        "topk_ids": torch.zeros(T, 3, dtype=torch.int64),
        "topk_probs": torch.zeros(T, 3),
    }
    return tensors, {}


def accept_mask_fill() -> Call:
    from diffulex.ops import token_stats as run

    result = run(_normal(2 * B, V) * 4)
    tensors = {
        "tokens": torch.tensor([[39, 39, 39, 39], [3, 39, 39, 5]]),
        "row_index": torch.arange(2 * B, dtype=torch.int32).view(2, B),
        "editable_start": _ints(0, 1),
        "valid_len": _ints(4, 4),
        "gate": torch.tensor([1, 0], dtype=torch.uint8),
        "accept_threshold": torch.tensor([0.5, 0.9]),
        "open_steps": _ints(0, 1),
        "ids": result.ids,
        "stats": result.stats,
        "write_ids": torch.zeros(2, B, dtype=torch.int64),
        "confidence": torch.zeros(2, B),
        "masks_left": _ints(0, 0),
        "flags": _ints(0, 0),
    }
    numbers = {
        "mask_token_id": 39,
        "rule": 0,
        "confidence_kind": 0,
        "raw_confidence": False,
        "denoising_steps": 0,
        "force_accept_last_step": False,
        "factor": 1.0,
        "entropy_bound": 0.0,
        "low_threshold": 0.0,
    }
    return tensors, numbers


CALLS: dict[str, Callable[[], Call]] = (
    {
        call.__name__: call
        for call in (
            block_attention,
            store_kv_cache,
            load_kv_cache,
            copy_kv_pages,
            rms_norm,
            add_rms_norm,
            sum_add_rms_norm,
            rms_norm_add,
            rotary_embedding,
            qk_norm_rope,
            qk_norm_rope_store,
            act_and_mul,
            linear_few_rows,
            linear_packed,
            quantize_rows,
            quantize_weight,
            linear_scaled,
            linear_w4a16,
            dequantize_nibbles,
            token_stats,
            merge_token_stats,
            accept_mask_fill,
        )
    }
    | acceptance_calls.CALLS
    | decode_calls.CALLS
    | merge_calls.CALLS
    | moe_calls.CALLS
)


#: Ops that raise an error for CUDA tensors, and why that is right.
CPU_ONLY = {"linear_packed": "dense products on CUDA are cuBLAS through torch"}


#: Ops that raise an error for CPU tensors, and why that is right. They need a partner to call them with:
#: their tests are in test_comm.py.
CUDA_ONLY = dict.fromkeys(
    ("all_reduce", "all_reduce_add_rms_norm", "gather_records"),
    "ranks on CPUs exchange through gloo",
)


def make(op: str, device: str) -> Call:
    """The call with its tensors on `device` and, where the op needs it, scratch."""
    if device.startswith("cuda") and op in CPU_ONLY:
        raise ValueError(f"{op}: expected a CPU call ({CPU_ONLY[op]}), got {device}")
    if op == "linear_few_rows" and device.startswith("cuda"):
        from diffulex import ops

        if not ops.has_hopper_kernels(torch.device(device)):
            pytest.skip("linear_few_rows needs a Hopper GPU and a library built for it")
    tensors, numbers = CALLS[op]()
    tensors = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in tensors.items()
    }
    if op in moe_calls.CALLS and "workspace" in tensors:
        tensors["workspace"] = moe_calls.workspace(op, device)
    elif device != "meta" and tensors.get("workspace", 0) is None:
        tensors["workspace"] = workspace(op, device)
    return tensors, numbers


def workspace(op: str, device: str) -> torch.Tensor | None:
    """Scratch for the sizes of this module."""
    from diffulex import ops

    kind = torch.device(device)
    if op == "block_attention":
        return ops.empty_workspace(
            ops.attention_workspace_bytes(R, HQ, HKV, D, 4, 8, 1, kind.type), kind
        )
    if op == "soft_embedding":
        return merge_calls.soft_embedding_workspace(device)
    return ops.empty_workspace(ops.token_stats_workspace_bytes(4, V, 3, kind.type), kind)


def run(op: str, tensors: Arguments, numbers: Keywords) -> None:
    """Calls the op with the tensors in schema order."""
    getattr(torch.ops.diffulex, op)(*tensors.values(), **numbers)


def written(op: str) -> list[str]:
    """Names of the arguments the schema marks as written."""
    schema = getattr(torch.ops.diffulex, op).default._schema
    return [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
