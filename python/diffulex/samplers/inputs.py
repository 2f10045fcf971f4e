# SPDX-License-Identifier: Apache-2.0
"""What one step gives a sampler, and where the sampler writes.

Symbols: n logits rows, R requests, Nb blocks of B positions, V columns, K merged candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CanvasArrays",
    "CarryArrays",
    "EditArrays",
    "MergeArrays",
    "RowFilters",
    "SamplerInputs",
    "SeedArrays",
]


@dataclass(slots=True)
class RowFilters:
    """Filters of sampled rows; greedy rows have none."""

    top_k: Tensor  # [n] int32, <= 0 = off
    top_p: Tensor  # [n] float32, >= 1 = off
    min_p: Tensor  # [n] float32, 0 = off


@dataclass(slots=True)
class CarryArrays:
    """Rows that later steps need: models whose logits predict the next position."""

    last_row_index: Tensor  # [R] int32 into the logits rows, -1 = nothing to save
    request_slots: Tensor  # [R] int32
    logits_source: Tensor  # [n] int32, request slot whose saved logits row it is, -1 = own row
    num_saved_sources: int  # entries of logits_source that are not -1
    has_sampled_requests: bool  # a request that draws is running: logits rows must be saved


@dataclass(slots=True)
class SeedArrays:
    """fast_dllm_v2: the token after a committed block."""

    seed_row: Tensor  # [R] int32 into the logits rows, -1 = none
    pending_next_token: Tensor  # [R] int64 out, -1 = none


@dataclass(slots=True)
class EditArrays:
    """The edit sampler: when a token is overwritten, and how long a filled block may change."""

    edit_threshold: Tensor  # [Nb] float32
    post_edit_steps: Tensor  # [Nb] int32, before this step
    max_post_edit_steps: Tensor  # [Nb] int32
    penalty: Tensor | None  # [Nb] float32, of the token before; None = of no request


@dataclass(slots=True)
class MergeArrays:
    """dmax: descriptors of the mixed embeddings of the next step, all out."""

    valid: Tensor  # [Nb, B] uint8
    topk_ids: Tensor  # [Nb, B, K] int64
    topk_probs: Tensor  # [Nb, B, K] float32
    residual: Tensor  # [Nb, B] float32


@dataclass(slots=True)
class CanvasArrays:
    """diffusion_gemma: the state of each canvas."""

    prev_argmax: Tensor  # [Nb, B] int64
    stable_run: Tensor  # [Nb] int32, -1 = no canvas before
    steps_left: Tensor  # [Nb] int32, N..1
    renoise_ids: Tensor  # [Nb, B] int64
    request_slots: Tensor  # [Nb] int32, -1 = padding without rows
    argmax: Tensor  # [Nb, B] int64 out
    signals: (
        Tensor  # [max_num_reqs * B + 1, H] out, self-conditioning of the next step; the last row
    )
    # takes rows that belong to no canvas


@dataclass(slots=True)
class SamplerInputs:
    """What one step gives a sampler: views of device memory, trimmed to the used length.

    `write_ids`, `confidence`, `masks_left` and `flags` are the outputs, written in full. The
    optional parts are there for the strategies and models that have them.
    """

    logits: Tensor  # [n, V]
    inv_temperature: Tensor | None  # [n] float32, 0 = greedy; None = all greedy
    uniforms: Tensor | None  # [n] float64, present exactly with inv_temperature
    tokens: Tensor  # [Nb, B] int64
    row_index: Tensor  # [Nb, B] int32 into the row records, -1 = no row
    editable_start: Tensor  # [Nb] int32
    valid_len: Tensor  # [Nb] int32
    gate: Tensor  # [Nb] uint8, predecessor semi-complete
    accept_threshold: Tensor  # [Nb] float32
    open_steps: Tensor  # [Nb] int32
    total_steps: Tensor  # [Nb] int32, this forward included
    write_ids: Tensor  # [Nb, B] int64, -1 = unchanged
    confidence: Tensor  # [Nb, B] float32
    masks_left: Tensor  # [Nb] int32
    flags: Tensor  # [Nb] int32, AcceptFlag bits
    rows: Tensor | None = None  # [n] int32 row of `logits`, -1 = nothing reads it; None = in order
    same_token_ratio: Tensor | None = None  # [Nb] float32 out of samplers that rewrite tokens
    filters: RowFilters | None = None
    carry: CarryArrays | None = None
    seeds: SeedArrays | None = None
    edit: EditArrays | None = None
    merge: MergeArrays | None = None
    canvas: CanvasArrays | None = None
