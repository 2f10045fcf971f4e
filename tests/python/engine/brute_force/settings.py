# SPDX-License-Identifier: Apache-2.0
"""What decides the tokens of a request, and what comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: Two correct float32 implementations may differ by this much; a decision inside is undecidable.
PROBABILITY_ERROR = 1e-5
LOGIT_ERROR = 5e-5


@dataclass
class Settings:
    """Settings of an engine."""

    block_size: int
    buffer_size: int
    mask_id: int
    candidate_limit: int  # ids at or past it are never chosen
    stop_ids: frozenset[int]
    max_model_len: int
    add_block: float = 0.1
    semi_complete: float = 0.9
    accept: float = 0.95
    edit: float = 0.0
    token_stability: float = 0.0
    rule: str = "dynamic"
    denoising_steps: int | None = None
    ranking: str = "max_prob"
    factor: float = 1.0
    entropy_bound: float = 0.1
    low_threshold: float = 0.4
    suppressed: frozenset[int] = frozenset()
    demoted: frozenset[int] = frozenset()
    has_renormalisation: bool = False  # excluded ids leave the normaliser
    is_always_open: bool = False  # forced_gate = always
    confidence_space: str = "processed"
    filter_order: str = "p_then_k"
    is_shifted: bool = False
    strategy: str = "multi_bd"
    # edit
    max_post_edit_steps: int = 16
    penalty: float = 0.0
    # dmax
    merge_top_k: int = 1
    merge_mode: str = "dmax_topk"
    merge_weight: float = 1.0
    has_renormalised_merge: bool = True
    stores_soft_embeddings: bool = False
    has_fast_path: bool = False
    # d2f
    has_block_grid: bool = False
    # fast_dllm_v2
    has_block_cache: bool = True


@dataclass
class RequestSettings:
    """What a request says."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_ids: frozenset[int] = frozenset()
    max_nfe: int | None = None
    max_repetition_run: int | None = None
    accept: float | None = None
    edit: float | None = None
    add_block: float | None = None
    semi_complete: float | None = None
    token_stability: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass
class Outcome:
    """Result of a decoded request."""

    token_ids: list[int]
    reason: str
    nfe: int
    decided_per_step: list[int] = field(default_factory=list)
    # Smallest distance of a decision from flipping, in units of the float32 error.
    margin: float = math.inf
