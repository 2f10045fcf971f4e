# SPDX-License-Identifier: Apache-2.0
"""One block over the worked rows, and random blocks, for the acceptance ops that rewrite."""

from __future__ import annotations

import random
from typing import Any

import torch

import sampling_vectors as vectors
from diffulex import ops

MASK = vectors.MASK

Tensors = dict[str, torch.Tensor]


def ints(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def writes(write_ids: torch.Tensor, block: int = 0) -> dict[int, int]:
    return {i: t for i, t in enumerate(write_ids[block].tolist()) if t >= 0}


def one_block(
    device: str,
    tokens: list[int],
    *,
    start: int = 0,
    valid_len: int = 4,
    gate: bool = True,
    tau: float = 0.5,
    step: int = 0,
    rows: list[int] | None = None,
    logits: torch.Tensor | None = None,
    exclusion: int = ops.ExclusionMode.EXCLUDE,
) -> Tensors:
    """Arguments that accept_edit and accept_dmax share, over the proposals of R0..R3."""
    stats = ops.token_stats(
        vectors.logits(device) if logits is None else logits,
        forbidden_ids=vectors.mask_ids(device),
        exclusion=exclusion,
    )
    return {
        "tokens": torch.tensor([tokens], device=device),
        "row_index": ints(device, *(rows or range(4)))[None],
        "editable_start": ints(device, start),
        "gate": torch.tensor([gate], device=device).to(torch.uint8),
        "accept_threshold": torch.tensor([tau], device=device),
        "open_steps": ints(device, step),
        "ids": stats.ids,
        "stats": stats.stats,
        "valid_len": ints(device, valid_len),
    }


def random_blocks(seed: int) -> tuple[Tensors, Tensors]:
    """Arguments that accept_edit and accept_dmax share, and greedy lists of the rows."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_blocks, block_size = rng.randrange(1, 6), rng.choice([1, 4, 8, 32, 64])
    num_rows = num_blocks * block_size
    spread = rng.choice([0.5, 3.0, 8.0])
    # A coarse grid makes equal confidences common.
    logits = (torch.randn(num_rows, 8, generator=generator) * spread).round()
    if rng.random() < 0.3:
        logits[rng.randrange(num_rows)] = torch.nan
    exclusion = rng.choice([ops.ExclusionMode.EXCLUDE, ops.ExclusionMode.OFF])
    forbidden = torch.tensor([MASK])
    stats = ops.token_stats(
        logits,
        forbidden_ids=forbidden,
        exclusion=exclusion,
        inv_temperature=torch.full((num_rows,), rng.choice([0.0, 2.0])),
        uniforms=torch.rand(num_rows, generator=generator, dtype=torch.float64),
    )
    greedy = ops.token_stats(logits, forbidden_ids=forbidden, exclusion=exclusion, top_k=4)
    assert greedy.topk_ids is not None
    assert greedy.topk_probs is not None
    masked = torch.rand(num_blocks, block_size, generator=generator) < rng.choice([0.0, 0.5, 1.0])
    tokens = torch.randint(0, 7, (num_blocks, block_size), generator=generator)
    row_index = torch.randperm(num_rows, generator=generator).int().view(num_blocks, block_size)
    if rng.random() < 0.5:
        # Decoded positions that propose themselves.
        tokens = stats.ids[row_index.long()].clamp(min=0)
    tokens[masked] = MASK
    if rng.random() < 0.3:
        row_index[rng.randrange(num_blocks), rng.randrange(block_size)] = -1

    def choices(*values: Any) -> list[Any]:
        return [rng.choice(values) for _ in range(num_blocks)]

    tensors = {
        "tokens": tokens,
        "row_index": row_index,
        "editable_start": torch.tensor(choices(0, 0, rng.randrange(block_size))).int(),
        "gate": torch.tensor(choices(0, 1), dtype=torch.uint8),
        "accept_threshold": torch.tensor(choices(0.0, 0.3, 0.9)),
        "open_steps": torch.tensor(choices(0, 3, block_size - 1, block_size + 1)).int(),
        "ids": stats.ids,
        "stats": stats.stats,
        "valid_len": torch.tensor(choices(block_size, block_size, rng.randrange(block_size))).int(),
    }
    return tensors, {"topk_ids": greedy.topk_ids, "topk_probs": greedy.topk_probs}


def moved(tensors: Tensors, device: str) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
