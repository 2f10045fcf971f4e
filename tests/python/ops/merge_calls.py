# SPDX-License-Identifier: Apache-2.0
"""Valid calls of the embedding mixes, in the form of `op_calls`."""

from __future__ import annotations

from typing import Any

import torch

T, V, H, K, R = 5, 40, 24, 2, 4

Call = tuple[dict[str, Any], dict[str, Any]]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _descriptors() -> dict[str, Any]:
    return {
        "merge_mask": torch.tensor([1, 0, 1, 0, 1], dtype=torch.uint8),
        "topk_ids": torch.tensor([[3, 7], [39, 39], [-1, 12], [39, 39], [0, 38]]),
        "topk_probs": torch.tensor([[0.6, 0.3], [0.0, 0.0], [0.5, 0.25], [0.0, 0.0], [0.9, 0.0]]),
        "residual_probs": torch.tensor([0.1, 0.0, 0.25, 0.0, 0.0]),
    }


def token_merge_embed() -> Call:
    tensors = {"hidden": _normal(T, H), "embedding": _normal(V, H), **_descriptors()}
    numbers = {"mask_token_id": 39, "merge_kind": 0, "renormalize": True, "weight": 1.0}
    return tensors, numbers


def token_merge_partial() -> Call:
    tensors = {
        "embedding": _normal(V, H),
        **_descriptors(),
        "partial": torch.zeros(T, H + 1),
    }
    return tensors, {"mask_token_id": 39, "merge_kind": 0, "vocab_start": 0}


def token_merge_finalize() -> Call:
    tensors = {
        "partial": _normal(T, H + 1),
        "merge_mask": _descriptors()["merge_mask"],
        "hidden": _normal(T, H),
    }
    return tensors, {"merge_kind": 0, "renormalize": True, "weight": 1.0}


def _softmax() -> dict[str, Any]:
    logits = _normal(R, V)
    return {
        "logits": logits,
        "lse": torch.logsumexp(logits * 2, 1),
        "inv_temperature": torch.full((R,), 2.0),
    }


def soft_probabilities() -> Call:
    valid = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)
    tensors = {**_softmax(), "row_valid": valid, "out": torch.zeros(R, V)}
    return tensors, {"softcap": 30.0, "vocab_limit": -1, "vocab_start": 0}


def soft_embedding() -> Call:
    tensors = {
        **_softmax(),
        "embedding": _normal(V, H),
        "row_valid": torch.tensor([1, 0, 1, 1], dtype=torch.uint8),
        "out": torch.zeros(R, H),
        "workspace": None,
    }
    numbers = {"normalizer": 3.0, "softcap": 30.0, "vocab_limit": -1, "vocab_start": 0}
    return tensors, numbers


CALLS = {
    call.__name__: call
    for call in (
        token_merge_embed,
        token_merge_partial,
        token_merge_finalize,
        soft_probabilities,
        soft_embedding,
    )
}


def soft_embedding_workspace(device: str) -> torch.Tensor | None:
    """Scratch for `soft_embedding` above."""
    from diffulex import ops

    kind = torch.device(device)
    needed = ops.soft_embedding_workspace_bytes(R, V, H, "float32", kind.type)
    return ops.empty_workspace(needed, kind)
