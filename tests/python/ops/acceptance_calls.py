# SPDX-License-Identifier: Apache-2.0
"""Valid calls of the rewriting acceptance ops and of the filters, in the form of `op_calls`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

B, V, K, R = 4, 40, 2, 8
MASK = V - 1

Call = tuple[dict[str, Any], dict[str, Any]]


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _logits() -> torch.Tensor:
    return torch.randn(R, V, generator=torch.Generator().manual_seed(7)) * 4


def _rows() -> dict[str, Any]:
    from diffulex.ops import token_stats

    result = token_stats(_logits(), forbidden_ids=torch.tensor([MASK]), top_k=K)
    return {
        "ids": result.ids,
        "stats": result.stats,
        "topk_ids": result.topk_ids,
        "topk_probs": result.topk_probs,
    }


def _blocks() -> dict[str, Any]:
    return {
        "tokens": torch.tensor([[MASK, MASK, 4, MASK], [3, MASK, 5, 5]]),
        "row_index": torch.arange(R, dtype=torch.int32).view(2, B),
    }


def _outputs() -> dict[str, Any]:
    return {
        "write_ids": torch.zeros(2, B, dtype=torch.int64),
        "confidence": torch.zeros(2, B),
        "masks_left": _ints(0, 0),
        "flags": _ints(0, 0),
        "same_token_ratio": torch.zeros(2),
    }


def accept_edit() -> Call:
    rows = _rows()
    tensors = _blocks() | {
        "editable_start": _ints(0, 1),
        "valid_len": _ints(4, 4),
        "gate": torch.tensor([1, 0], dtype=torch.uint8),
        "accept_threshold": torch.tensor([0.5, 0.9]),
        "edit_threshold": torch.tensor([0.25, 0.5]),
        "open_steps": _ints(0, 1),
        "post_edit_steps": _ints(0, 2),
        "max_post_edit_steps": _ints(16, 2),
        "ids": rows["ids"],
        "stats": rows["stats"],
        **_outputs(),
    }
    numbers = {
        "mask_token_id": MASK,
        "confidence_kind": 0,
        "raw_confidence": True,
    }
    return tensors, numbers


def accept_dmax() -> Call:
    rows = _rows()
    tensors = _blocks() | {
        "editable_start": _ints(0, 1),
        "valid_len": _ints(4, 4),
        "gate": torch.tensor([1, 0], dtype=torch.uint8),
        "accept_threshold": torch.tensor([0.5, 0.9]),
        "open_steps": _ints(0, 1),
        "ids": rows["ids"],
        "stats": rows["stats"],
        "argmax_ids": rows["topk_ids"][:, 0].contiguous(),
        "topk_ids": rows["topk_ids"],
        "topk_probs": rows["topk_probs"],
        **_outputs(),
        "merge_valid": torch.zeros(2, B, dtype=torch.uint8),
        "merge_ids": torch.zeros(2, B, K, dtype=torch.int64),
        "merge_probs": torch.zeros(2, B, K),
        "merge_residual": torch.zeros(2, B),
    }
    return tensors, {"mask_token_id": MASK, "fast_path": False}


def accept_gemma() -> Call:
    rows = _rows()
    tensors = _blocks() | {
        "valid_len": _ints(4, 3),
        "prev_argmax": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        "stable_run": _ints(-1, 2),
        "steps_left": _ints(48, 3),
        "renoise_ids": torch.tensor([[11, 12, 13, 14], [15, 16, 17, 18]]),
        "ids": rows["ids"],
        "stats": rows["stats"],
        "argmax_ids": rows["topk_ids"][:, 0].contiguous(),
        "write_ids": torch.zeros(2, B, dtype=torch.int64),
        "argmax": torch.zeros(2, B, dtype=torch.int64),
        "confidence": torch.zeros(2, B),
        "flags": _ints(0, 0),
    }
    numbers = {"entropy_bound": 0.1, "stability_threshold": 1, "confidence_threshold": 0.005}
    return tensors, numbers


def sample_filtered() -> Call:
    tensors = {
        "logits": _logits(),
        "extra_logits": _logits()[:2],
        "row_index": torch.tensor([0, 3, 9, 5]),
        "inv_temperature": torch.tensor([1.0, 2.0, 0.5, 1.0]),
        "uniforms": torch.tensor([0.1, 0.5, 0.7, 0.9], dtype=torch.float64),
        "top_k": _ints(5, 0, 3, 2),
        "top_p": torch.tensor([0.9, 0.5, 1.0, 0.8]),
        "min_p": torch.tensor([0.0, 0.1, 0.0, 0.2]),
        "forbidden_ids": torch.tensor([MASK]),
        "ids": torch.zeros(4, dtype=torch.int64),
        "stats": torch.zeros(4, 8),
        "workspace": None,
    }
    numbers = {
        "vocab_limit": 38,
        "softcap": 0.0,
        "exclusion": 0,
        "filter_order": 0,
        "confidence_space": 0,
    }
    return tensors, numbers


def entropy_bound_mask() -> Call:
    tensors = {
        "entropy": torch.tensor([0.2, 1.1, 0.1, 1.5, 0.3, 0.2]),
        "segments": _ints(0, 4, 6),
        "mask": torch.zeros(6, dtype=torch.uint8),
    }
    return tensors, {"bound": 0.25}


CALLS: dict[str, Callable[[], Call]] = {
    call.__name__: call
    for call in (accept_edit, accept_dmax, accept_gemma, sample_filtered, entropy_bound_mask)
}

#: First extents at which a call has nothing to do.
EMPTY: dict[str, dict[str, int]] = {
    "accept_edit": dict.fromkeys(
        (
            "tokens",
            "row_index",
            "editable_start",
            "valid_len",
            "gate",
            "accept_threshold",
            "edit_threshold",
            "open_steps",
            "post_edit_steps",
            "max_post_edit_steps",
            "write_ids",
            "confidence",
            "masks_left",
            "flags",
            "same_token_ratio",
        ),
        0,
    ),
    "accept_dmax": dict.fromkeys(
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
            "same_token_ratio",
            "merge_valid",
            "merge_ids",
            "merge_probs",
            "merge_residual",
        ),
        0,
    ),
    "accept_gemma": dict.fromkeys(
        (
            "tokens",
            "row_index",
            "valid_len",
            "prev_argmax",
            "stable_run",
            "steps_left",
            "renoise_ids",
            "write_ids",
            "argmax",
            "confidence",
            "flags",
        ),
        0,
    ),
    "sample_filtered": dict.fromkeys(
        ("row_index", "inv_temperature", "uniforms", "top_k", "top_p", "min_p", "ids", "stats"), 0
    ),
    "entropy_bound_mask": {"entropy": 0, "segments": 1, "mask": 0},
}
