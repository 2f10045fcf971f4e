# SPDX-License-Identifier: Apache-2.0
"""Every documented argument error, from the real kernels and from the fakes alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import acceptance_calls
import op_calls

Change = Callable[[Any], Any]


def wider(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], -1)


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], 0)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half()


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double()


def long(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.long()


def value(constant: Any) -> Change:
    return lambda _: constant


def one_scale(_: Any) -> torch.Tensor:
    return torch.ones(1)


# op, argument to change, change, what the message has to say after the argument
CASES: list[tuple[str, str, Change, str]] = [
    ("block_attention", "q", double, "expected dtype"),
    ("block_attention", "q", flat, "expected shape"),
    ("block_attention", "k", half, "expected dtype float32, got float16"),
    ("block_attention", "k", longer, "expected shape"),
    ("block_attention", "k", wider, "expected shape"),
    ("block_attention", "v", lambda v: v[:, :1], "expected shape"),
    ("block_attention", "k_cache", half, "expected dtype"),
    ("block_attention", "v_cache", half, "expected dtype"),
    ("block_attention", "k_cache", flat, "expected"),
    ("block_attention", "k_cache", lambda c: c[:, :3], "expected"),
    ("block_attention", "k_cache", lambda c: c[..., :32], "expected"),
    ("block_attention", "page_table", long, "expected dtype int32, got int64"),
    ("block_attention", "page_table", flat, "expected shape"),
    ("block_attention", "cu_seqlens_q", longer, "expected shape"),
    ("block_attention", "cu_seqlens_q", long, "expected dtype int32, got int64"),
    ("block_attention", "context_lens", longer, "expected shape"),
    ("block_attention", "valid_slices", longer, "expected shape"),
    ("block_attention", "mask_kinds", longer, "expected shape"),
    ("block_attention", "prefix_lens", longer, "expected shape"),
    ("block_attention", "padded_prefix_lens", long, "expected dtype"),
    ("block_attention", "q_starts", value(torch.zeros(2)), "expected dtype int32, got float32"),
    ("block_attention", "k_scale", one_scale, "expected dtype uint8, got float32"),
    ("block_attention", "v_scale", one_scale, "expected none without k_scale, got a tensor"),
    ("block_attention", "out", half, "expected dtype"),
    ("block_attention", "out", longer, "expected shape"),
    ("block_attention", "lse", half, "expected dtype float32, got float16"),
    ("block_attention", "lse", longer, "expected shape"),
    ("block_attention", "scale", value(0.0), "expected"),
    ("block_attention", "scale", value(float("nan")), "expected"),
    ("block_attention", "softcap", value(-1.0), "expected"),
    ("block_attention", "block_size", value(0), "expected a value >= 1, got 0"),
    ("block_attention", "sliding_window", value(-1), "expected a value >= 0, got -1"),
    ("block_attention", "max_seqlen_q", value(0), "expected a value >= 1, got 0"),
    ("block_attention", "max_context_len", value(-1), "expected a value >= 0, got -1"),
    ("block_attention", "num_splits", value(-1), "expected a value >= 0, got -1"),
    ("block_attention", "kv_layout", value(2), "expected"),
    ("store_kv_cache", "k", double, "expected dtype"),
    ("store_kv_cache", "v", half, "expected dtype"),
    ("store_kv_cache", "v", longer, "expected shape"),
    ("store_kv_cache", "slot_mapping", longer, "expected shape"),
    ("store_kv_cache", "slot_mapping", lambda s: s.float(), "expected dtype"),
    ("store_kv_cache", "k_scale", one_scale, "expected dtype uint8, got float32"),
    ("store_kv_cache", "v_scale", one_scale, "expected none without k_scale, got a tensor"),
    ("store_kv_cache", "k_cache", lambda c: c[:, :, :1], "expected"),
    ("store_kv_cache", "kv_layout", value(-1), "expected"),
    ("load_kv_cache", "k_new", double, "expected dtype"),
    ("load_kv_cache", "v_new", longer, "expected shape"),
    ("load_kv_cache", "page_table", long, "expected dtype"),
    ("load_kv_cache", "context_lens", longer, "expected shape"),
    ("load_kv_cache", "cu_seqlens_q", longer, "expected shape"),
    ("load_kv_cache", "cu_seqlens_k", longer, "expected shape"),
    ("load_kv_cache", "k_scale", one_scale, "expected dtype uint8, got float32"),
    ("load_kv_cache", "k_out", half, "expected dtype"),
    ("load_kv_cache", "v_out", longer, "expected shape"),
    ("copy_kv_pages", "src_dst", long, "expected dtype"),
    ("copy_kv_pages", "src_dst", flat, "expected shape"),
    ("copy_kv_pages", "v_cache", longer, "expected"),
    ("copy_kv_pages", "k_scale", one_scale, "expected dtype uint8, got float32"),
    ("copy_kv_pages", "v_scale", one_scale, "expected none without k_scale, got a tensor"),
    ("rms_norm", "x", double, "expected dtype"),
    ("rms_norm", "x", lambda x: x[:, :0], "expected a last dimension >= 1"),
    ("rms_norm", "weight", wider, "expected shape"),
    ("rms_norm", "weight", half, "expected dtype"),
    ("rms_norm", "out", longer, "expected"),
    ("rms_norm", "out", half, "expected dtype"),
    ("rms_norm", "eps", value(-1.0), "expected a value >= 0, got -1"),
    ("rms_norm", "codes", half, "expected dtype float8_e4m3fn or int8, got float16"),
    ("rms_norm", "codes", longer, "expected shape"),
    ("rms_norm", "scale", lambda s: s[:, :1], "expected at least 6 columns"),
    ("rms_norm", "scale", value(None), "expected"),
    ("add_rms_norm", "residual", half, "expected dtype float32, got float16"),
    ("add_rms_norm", "residual", longer, "expected"),
    ("add_rms_norm", "weight", wider, "expected shape"),
    ("add_rms_norm", "eps", value(-1.0), "expected a value >= 0, got -1"),
    ("add_rms_norm", "codes", half, "expected dtype float8_e4m3fn or int8, got float16"),
    ("add_rms_norm", "codes", longer, "expected shape"),
    ("add_rms_norm", "scale", lambda s: s[:, :1], "expected at least 6 columns"),
    ("add_rms_norm", "scale", value(None), "expected"),
    ("sum_add_rms_norm", "parts", lambda x: x[0], "expected"),
    ("sum_add_rms_norm", "parts", lambda x: x[..., :60], "expected"),
    ("sum_add_rms_norm", "residual", half, "expected dtype float32, got float16"),
    ("sum_add_rms_norm", "weight", wider, "expected shape"),
    ("sum_add_rms_norm", "out", longer, "expected"),
    ("sum_add_rms_norm", "eps", value(-1.0), "expected a value >= 0, got -1"),
    ("rms_norm_add", "residual", longer, "expected"),
    ("rms_norm_add", "out_scale", longer, "expected"),
    ("rms_norm_add", "out", longer, "expected"),
    ("rotary_embedding", "q", double, "expected dtype"),
    ("rotary_embedding", "k", half, "expected dtype"),
    ("rotary_embedding", "k", longer, "expected"),
    ("rotary_embedding", "positions", lambda p: p.float(), "expected dtype"),
    ("rotary_embedding", "cos_sin_cache", half, "expected dtype float32, got float16"),
    ("rotary_embedding", "cos_sin_cache", lambda c: c[:, :7], "expected an even rotary"),
    ("rotary_embedding", "cos_sin_cache", lambda c: wider(wider(wider(c))), "expected"),
    ("rotary_embedding", "head_dim", value(0), "expected a value >= 1, got 0"),
    ("qk_norm_rope", "qkv", double, "expected dtype"),
    ("qk_norm_rope", "qkv", wider, "expected shape"),
    ("qk_norm_rope", "positions", longer, "expected shape"),
    ("qk_norm_rope", "cos_sin_cache", half, "expected dtype float32, got float16"),
    ("qk_norm_rope", "q_weight", wider, "expected shape"),
    ("qk_norm_rope", "k_weight", half, "expected dtype"),
    ("qk_norm_rope", "v_out", value(torch.zeros(6, 2, 64)), "expected none"),
    ("qk_norm_rope", "num_q_heads", value(0), "expected a value >= 1, got 0"),
    ("qk_norm_rope", "num_kv_heads", value(0), "expected a value >= 1, got 0"),
    ("qk_norm_rope", "eps", value(-1.0), "expected a value >= 0, got -1"),
    ("qk_norm_rope_store", "slot_mapping", longer, "expected shape"),
    ("qk_norm_rope_store", "k_scale", one_scale, "expected dtype uint8, got float32"),
    ("qk_norm_rope_store", "kv_layout", value(5), "expected"),
    ("act_and_mul", "x", double, "expected dtype"),
    ("act_and_mul", "x", lambda x: x[:, :7], "expected an even last dimension"),
    ("act_and_mul", "out", half, "expected dtype"),
    ("act_and_mul", "out", longer, "expected shape"),
    ("act_and_mul", "act", value(3), "expected"),
    ("act_and_mul", "codes", half, "expected dtype float8_e4m3fn or int8, got float16"),
    ("act_and_mul", "codes", longer, "expected shape"),
    ("act_and_mul", "scale", lambda s: s[:, :1], "expected at least 6 columns"),
    ("act_and_mul", "scale", value(None), "expected"),
    ("linear_few_rows", "x", double, "expected dtype bfloat16 or float16, got float64"),
    ("linear_few_rows", "x", lambda x: x[:, :32], "expected at most 128 rows of a multiple of 64"),
    ("linear_few_rows", "weight", half, "expected dtype bfloat16, got float16"),
    ("linear_few_rows", "weight", lambda w: w[:100], "expected a multiple of 16 rows"),
    ("linear_few_rows", "bias", longer, "expected shape"),
    ("linear_few_rows", "act", value(3), r"expected -1 \(none\), 0 \(silu\)"),
    ("linear_few_rows", "out", longer, "expected shape"),
    ("linear_packed", "x", half, "expected dtype float32, got float16"),
    ("linear_packed", "x", flat, "expected shape"),
    ("linear_packed", "x", lambda x: x[:, :0], "expected a last dimension >= 1"),
    ("linear_packed", "packed_weight", half, "expected dtype"),
    ("linear_packed", "packed_weight", longer, "expected shape"),
    ("linear_packed", "packed_weight", lambda w: w[:, :8], "expected shape"),
    ("linear_packed", "out", half, "expected dtype float32, got float16"),
    ("linear_packed", "out", longer, "expected shape"),
    ("linear_packed", "out_features", value(0), "expected a value >= 1, got 0"),
    ("quantize_rows", "x", double, "expected dtype"),
    ("quantize_rows", "x", lambda x: x[:, :0], "expected a last dimension >= 1"),
    ("quantize_rows", "out", half, "expected dtype float8_e4m3fn or int8, got float16"),
    ("quantize_rows", "out", longer, "expected shape"),
    ("quantize_rows", "scale", lambda s: s[:, :1], "expected at least"),
    ("quantize_rows", "scale", longer, "expected shape"),
    ("quantize_rows", "group", value(0), "expected a value >= 1, got 0"),
    ("quantize_weight", "w", double, "expected dtype"),
    ("quantize_weight", "out", half, "expected dtype int8, got float16"),
    ("quantize_weight", "scale", longer, "expected shape"),
    ("quantize_weight", "scheme", value(4), r"expected 0 \(fp8\)"),
    ("linear_scaled", "x", half, "expected dtype float8_e4m3fn or int8, got float16"),
    ("linear_scaled", "x_scale", lambda s: s[:, :1], "expected at least"),
    ("linear_scaled", "weight", half, "expected dtype int8, got float16"),
    ("linear_scaled", "weight", wider, "expected shape"),
    ("linear_scaled", "weight", lambda w: w.view(torch.uint8)[None, None], "expected shape"),
    ("linear_scaled", "weight_scale", longer, "expected shape"),
    ("linear_scaled", "bias", longer, "expected shape"),
    ("linear_scaled", "act", value(3), r"expected -1 \(none\), 0 \(silu\), 1"),
    ("linear_scaled", "out", longer, "expected shape"),
    ("linear_scaled", "out", double, "expected dtype"),
    ("linear_w4a16", "x", double, "expected dtype"),
    ("linear_w4a16", "weight", half, "expected dtype uint8, got float16"),
    ("linear_w4a16", "weight", wider, "expected shape"),
    ("linear_w4a16", "weight", lambda w: w[None, None], "expected shape"),
    ("linear_w4a16", "scales", longer, "expected shape"),
    ("linear_w4a16", "zeros", half, "expected dtype uint8, got float16"),
    ("linear_w4a16", "out", longer, "expected shape"),
    ("linear_w4a16", "group", value(3), "expected a divisor of"),
    ("dequantize_nibbles", "weight", half, "expected dtype uint8, got float16"),
    ("dequantize_nibbles", "weight", wider, "expected shape"),
    ("dequantize_nibbles", "scales", longer, "expected shape"),
    ("dequantize_nibbles", "zeros", half, "expected dtype uint8, got float16"),
    ("dequantize_nibbles", "out", half, "expected dtype bfloat16, got float16"),
    ("dequantize_nibbles", "group", value(3), "expected a divisor of"),
    ("token_stats", "logits", double, "expected dtype"),
    ("token_stats", "logits", flat, "expected shape"),
    ("token_stats", "extra_logits", half, "expected dtype"),
    ("token_stats", "extra_logits", wider, "expected shape"),
    ("token_stats", "row_index", lambda r: r.float(), "expected dtype"),
    ("token_stats", "inv_temperature", longer, "expected shape"),
    ("token_stats", "uniforms", lambda u: u.float(), "expected dtype float64, got float32"),
    ("token_stats", "uniforms", value(None), "expected a tensor with inv_temperature, got none"),
    ("token_stats", "forbidden_ids", lambda f: f.repeat(5), "expected at most 8 ids, got 10"),
    ("token_stats", "penalty_ids", longer, "expected shape"),
    ("token_stats", "penalties", longer, "expected shape"),
    ("token_stats", "penalties", torch.Tensor.double, "expected dtype float32, got float64"),
    ("token_stats", "ids", lambda i: i.int(), "expected dtype int64, got int32"),
    ("token_stats", "stats", wider, "expected shape"),
    ("token_stats", "topk_ids", lambda t: t.repeat(1, 30), "expected 1 to 64 columns, got 90"),
    ("token_stats", "topk_probs", value(None), "expected a tensor with topk_ids, got none"),
    ("token_stats", "topk_probs", wider, "expected shape"),
    ("token_stats", "vocab_limit", value(-2), "expected a value >= -1, got -2"),
    ("token_stats", "vocab_start", value(-1), "expected a value >= 0, got -1"),
    ("token_stats", "softcap", value(-1.0), "expected"),
    ("token_stats", "exclusion", value(3), "expected"),
    ("merge_token_stats", "part_ids", lambda p: p.int(), "expected dtype int64, got int32"),
    ("merge_token_stats", "part_stats", longer, "expected shape"),
    ("merge_token_stats", "part_topk_ids", wider, "expected shape"),
    ("merge_token_stats", "part_topk_vals", double, "expected dtype"),
    ("merge_token_stats", "ids", longer, "expected shape"),
    ("merge_token_stats", "stats", longer, "expected shape"),
    ("accept_mask_fill", "tokens", lambda t: t.int(), "expected dtype int64, got int32"),
    ("accept_mask_fill", "tokens", flat, "expected shape"),
    ("accept_mask_fill", "row_index", long, "expected dtype int32, got int64"),
    ("accept_mask_fill", "row_index", longer, "expected shape"),
    ("accept_mask_fill", "editable_start", longer, "expected shape"),
    ("accept_mask_fill", "valid_len", longer, "expected shape"),
    ("accept_mask_fill", "gate", lambda g: g.int(), "expected dtype uint8, got int32"),
    ("accept_mask_fill", "accept_threshold", half, "expected dtype"),
    ("accept_mask_fill", "open_steps", long, "expected dtype"),
    ("accept_mask_fill", "ids", longer, "expected"),
    ("accept_mask_fill", "stats", wider, "expected shape"),
    ("accept_mask_fill", "write_ids", longer, "expected shape"),
    ("accept_mask_fill", "confidence", longer, "expected shape"),
    ("accept_mask_fill", "masks_left", longer, "expected shape"),
    ("accept_mask_fill", "flags", long, "expected dtype"),
    ("accept_mask_fill", "rule", value(9), "expected"),
    ("accept_mask_fill", "confidence_kind", value(3), "expected"),
    ("accept_mask_fill", "denoising_steps", value(-1), "expected a value >= 0, got -1"),
]

# A wrong size of these shows up as a mismatch of the argument that is compared with it.
_BLAMED = {
    ("accept_mask_fill", "ids"): "stats",
    ("block_attention", "k_cache"): "k_cache|v_cache",
    ("store_kv_cache", "k_cache"): "k_cache|v_cache",
}


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("op", "argument", "change", "message"),
    CASES,
    ids=[f"{op}-{argument}-{index}" for index, (op, argument, _, _) in enumerate(CASES)],
)
def test_argument_error(op: str, argument: str, change: Change, message: str, device: str) -> None:
    tensors, numbers = op_calls.make(op, device)
    before = {name: t.clone() for name, t in tensors.items() if t is not None}
    group = tensors if argument in tensors else numbers
    changed = change(group[argument])
    group[argument] = changed.to(device) if isinstance(changed, torch.Tensor) else changed
    blamed = _BLAMED.get((op, argument), argument)
    with pytest.raises(RuntimeError, match=rf"^diffulex::{op}: ({blamed}): {message}"):
        op_calls.run(op, tensors, numbers)
    if device != "meta":
        for name in op_calls.written(op):
            if tensors[name] is not None and name not in (argument, "workspace"):
                assert torch.equal(tensors[name], before[name]), f"{name} was written"


@pytest.mark.parametrize("op", sorted(op_calls.CALLS))
def test_mixed_devices(op: str) -> None:
    tensors, numbers = op_calls.make(op, "cpu")
    names = [name for name, t in tensors.items() if t is not None]
    # The fake answers, because meta tensors take part; the first tensor names the device.
    tensors[names[-1]] = tensors[names[-1]].to("meta")
    with pytest.raises(
        RuntimeError, match=rf"^diffulex::{op}: {names[-1]}: expected a tensor on cpu, got meta"
    ):
        op_calls.run(op, tensors, numbers)


@pytest.mark.cuda
@pytest.mark.parametrize("op", sorted(op_calls.CALLS))
def test_mixed_devices_with_cuda(op: str) -> None:
    for first, second, name in (("cuda", "cpu", "cpu"), ("cpu", "cuda", "cuda:0")):
        tensors, numbers = op_calls.make(op, first)
        names = [n for n, t in tensors.items() if t is not None and n != "workspace"]
        tensors[names[-1]] = tensors[names[-1]].to(second)
        with pytest.raises(
            RuntimeError,
            match=rf"^diffulex::{op}: {names[-1]}: expected a tensor on {first}.*, got {name}",
        ):
            op_calls.run(op, tensors, numbers)


@pytest.mark.parametrize("op", sorted(op_calls.CALLS))
def test_unsupported_dtype(op: str) -> None:
    tensors, numbers = op_calls.make(op, "cpu")
    name = next(n for n, t in tensors.items() if t is not None)
    tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match=rf"^diffulex::{op}: {name}: expected float32, .*, got"):
        op_calls.run(op, tensors, numbers)


def test_too_many_dimensions() -> None:
    x = torch.zeros(1, 1, 1, 1, 1, 4)
    with pytest.raises(RuntimeError, match="rms_norm: x: expected at most 5 dimensions, got 6"):
        torch.ops.diffulex.rms_norm(x, None, x, eps=1e-6)


def test_integers_past_32_bits() -> None:
    tensors, numbers = op_calls.make("block_attention", "cpu")
    numbers["block_size"] = 2**31
    with pytest.raises(RuntimeError, match="block_size: expected a 32-bit integer, got 2147483648"):
        op_calls.run("block_attention", tensors, numbers)


def test_fp8_cache_is_not_supported() -> None:
    tensors, numbers = op_calls.make("store_kv_cache", "cpu")
    tensors["k_cache"] = tensors["k_cache"].to(torch.float8_e4m3fn)
    tensors["v_cache"] = tensors["v_cache"].to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=r"^diffulex::store_kv_cache: k_cache: expected"):
        op_calls.run("store_kv_cache", tensors, numbers)


def test_outputs_that_are_inputs() -> None:
    tensors, numbers = op_calls.make("block_attention", "cpu")
    tensors["out"] = tensors["q"]
    with pytest.raises(RuntimeError, match="out: expected memory of its own"):
        op_calls.run("block_attention", tensors, numbers)
    tensors, numbers = op_calls.make("add_rms_norm", "cpu")
    tensors["residual"] = tensors["x"]
    with pytest.raises(RuntimeError, match="residual: expected memory of its own"):
        op_calls.run("add_rms_norm", tensors, numbers)
    tensors, numbers = op_calls.make("store_kv_cache", "cpu")
    tensors["v_cache"] = tensors["k_cache"]
    with pytest.raises(RuntimeError, match="v_cache: expected memory of its own"):
        op_calls.run("store_kv_cache", tensors, numbers)


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        ("block_attention", "q"),
        ("store_kv_cache", "k"),
        ("rms_norm", "x"),
        ("act_and_mul", "x"),
        ("linear_packed", "x"),
        ("token_stats", "logits"),
    ],
)
def test_last_dimension_has_to_be_contiguous(device: str, op: str, argument: str) -> None:
    tensors, numbers = op_calls.make(op, device)
    tensor = tensors[argument]
    spaced = torch.empty(*tensor.shape, 2, dtype=tensor.dtype, device=device)[..., 0]
    tensors[argument] = spaced.copy_(tensor)
    with pytest.raises(RuntimeError, match=rf"^diffulex::{op}: {argument}: expected .*contiguous"):
        op_calls.run(op, tensors, numbers)


def test_workspace_errors(device: str) -> None:
    for op in ("block_attention", "token_stats"):
        tensors, numbers = op_calls.make(op, device)
        tensors["workspace"] = torch.zeros(1024, dtype=torch.int8, device=device)
        with pytest.raises(RuntimeError, match=rf"^diffulex::{op}: workspace: expected a contig"):
            op_calls.run(op, tensors, numbers)
        storage = torch.zeros(2048, dtype=torch.uint8, device=device)
        skip = -storage.data_ptr() % 256 + 64
        tensors["workspace"] = storage[skip : skip + 512]
        with pytest.raises(RuntimeError, match=rf"^diffulex::{op}: workspace: expected an address"):
            op_calls.run(op, tensors, numbers)


@pytest.mark.cuda
def test_small_workspace_names_the_needed_bytes() -> None:
    from diffulex import ops

    logits = torch.zeros(4, 5000, device="cuda")
    needed = ops.token_stats_workspace_bytes(4, 5000, 0)
    assert needed > 256
    workspace = torch.zeros(256, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match=f"workspace: expected at least {needed} bytes, got 256"):
        ops.token_stats(logits, workspace=workspace)


#: Lengths of the first dimensions with which a call of an op has no rows.
EMPTY: dict[str, dict[str, int]] = {
    "block_attention": dict.fromkeys(("q", "k", "v", "out", "lse"), 0)
    | dict.fromkeys(
        (
            "page_table",
            "context_lens",
            "valid_slices",
            "mask_kinds",
            "prefix_lens",
            "padded_prefix_lens",
        ),
        0,
    )
    | {"cu_seqlens_q": 1},
    "store_kv_cache": {"k": 0, "v": 0, "slot_mapping": 0},
    "load_kv_cache": {
        "k_new": 0,
        "v_new": 0,
        "page_table": 0,
        "context_lens": 0,
        "cu_seqlens_q": 1,
        "cu_seqlens_k": 1,
        "k_out": 0,
        "v_out": 0,
    },
    "copy_kv_pages": {"src_dst": 0},
    "rms_norm": {"x": 0, "out": 0, "codes": 0},
    "add_rms_norm": {"x": 0, "residual": 0, "codes": 0},
    "sum_add_rms_norm": {"residual": 0, "out": 0},
    "rms_norm_add": {"x": 0, "residual": 0, "out": 0},
    "rotary_embedding": {"positions": 0, "q": 0, "k": 0},
    "qk_norm_rope": {"qkv": 0, "positions": 0},
    "qk_norm_rope_store": {"qkv": 0, "positions": 0, "slot_mapping": 0},
    "act_and_mul": {"x": 0, "out": 0, "codes": 0},
    "linear_packed": {"x": 0, "out": 0},
    "quantize_rows": {"x": 0, "out": 0},
    "quantize_weight": {"w": 0, "out": 0, "scale": 0},
    "linear_scaled": {"x": 0, "out": 0},
    "linear_w4a16": {"x": 0, "out": 0},
    "dequantize_nibbles": {"weight": 0, "out": 0},
    "token_stats": dict.fromkeys(
        (
            "row_index",
            "inv_temperature",
            "uniforms",
            "penalty_ids",
            "penalties",
            "ids",
            "stats",
            "topk_ids",
            "topk_probs",
        ),
        0,
    ),
    "accept_mask_fill": dict.fromkeys(
        (
            "tokens",
            "row_index",
            "editable_start",
            "valid_len",
            "gate",
            "accept_threshold",
            "open_steps",
            "write_ids",
            "confidence",
            "masks_left",
            "flags",
        ),
        0,
    ),
    # Emptied in other dimensions, or by `num_reqs`.
    "merge_token_stats": {},
    "advance_decode": {},
    "linear_few_rows": {"x": 0, "out": 0},
    "router_gemm": {"x": 0, "logits": 0},
    "moe_topk": {"logits": 0, "token_valid": 0, "weights": 0, "ids": 0},
    "moe_permute": {"topk_ids": 0, "sorted_slots": 0, "tile_expert": 0, "tile_start": 0},
    "moe_combine": {"slot_out": 0, "topk_weights": 0, "topk_ids": 0, "addend": 0, "out": 0},
    "fused_moe": {"x": 0, "topk_weights": 0, "topk_ids": 0, "addend": 0, "out": 0},
    "fused_experts_packed": {"x": 0, "row_weights": 0, "out": 0},
    "soft_probabilities": dict.fromkeys(
        ("logits", "lse", "inv_temperature", "row_valid", "out"), 0
    ),
    "soft_embedding": dict.fromkeys(("logits", "lse", "inv_temperature", "row_valid", "out"), 0),
    "token_merge_embed": dict.fromkeys(
        ("hidden", "merge_mask", "topk_ids", "topk_probs", "residual_probs"), 0
    ),
    "token_merge_partial": dict.fromkeys(
        ("merge_mask", "topk_ids", "topk_probs", "residual_probs", "partial"), 0
    ),
    "token_merge_finalize": {"partial": 0, "merge_mask": 0, "hidden": 0},
} | acceptance_calls.EMPTY


#: Ops whose errors are in another file, which calls them by name.
_ELSEWHERE = {
    "advance_decode": "test_advance_errors.py",
    "moe_topk": "test_routing.py",
    "router_gemm": "test_routing.py",
    "sample_filtered": "test_acceptance_errors.py",
    **dict.fromkeys(
        ("accept_dmax", "accept_edit", "accept_gemma", "entropy_bound_mask"),
        "test_acceptance_errors.py",
    ),
    **dict.fromkeys(
        ("fused_experts_packed", "fused_moe", "moe_combine", "moe_permute"), "test_moe_errors.py"
    ),
    **dict.fromkeys(
        (
            "soft_embedding",
            "soft_probabilities",
            "token_merge_embed",
            "token_merge_finalize",
            "token_merge_partial",
        ),
        "test_merge_errors.py",
    ),
}


def test_every_op_has_errors_and_an_empty_call() -> None:
    assert {op for op, *_ in CASES} | _ELSEWHERE.keys() == op_calls.CALLS.keys()
    for op, name in _ELSEWHERE.items():
        text = (Path(__file__).parent / name).read_text()
        assert "pytest.raises(" in text
        assert re.search(rf"\b{op}\b", text), f"{name}: expected errors of {op}, got none"
    assert op_calls.CALLS.keys() == EMPTY.keys()


@pytest.mark.parametrize("op", sorted(op_calls.CALLS))
def test_empty_inputs_are_legal(device: str, op: str) -> None:
    tensors, numbers = op_calls.make(op, device)
    if "num_reqs" in numbers:
        numbers["num_reqs"] = 0
    if op == "merge_token_stats":
        for name, tensor in tensors.items():
            tensors[name] = tensor[:, :0] if name.startswith("part") else tensor[:0]
    if op == "sum_add_rms_norm":
        tensors["parts"] = tensors["parts"][:, :0]
    if op == "fused_experts_packed":
        tensors["expert_offsets"].zero_()
    if op == "dequantize_nibbles":
        tensors |= {name: tensors[name][:, :0] for name in ("scales", "zeros")}
    for name, length in EMPTY[op].items():
        tensors[name] = tensors[name][:length].contiguous()
    caches = {n: t.clone() for n, t in tensors.items() if n in ("k_cache", "v_cache")}
    op_calls.run(op, tensors, numbers)
    for name, before in caches.items():
        assert torch.equal(tensors[name], before)
