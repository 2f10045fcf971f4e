# SPDX-License-Identifier: Apache-2.0
"""MultiTF batches: teacher forcing over several noisy blocks at once, under one attention mask.

Each sequence is fed twice in one forward: a *noisy* copy of its response (from the block in which
the prompt ends) and a *clean* copy of everything. The response blocks are cut into groups of one to
four consecutive blocks. A noisy block sees

  (a) the clean copies of all blocks before its group,
  (b) the noisy copies of the blocks before it in its group,
  (c) itself, in both directions,

which is what a decoder with several blocks in flight shows it. The clean copy is block-causal on
itself. Mask ratios inside a group form a chain: ``t_1 ~ U(0,1)``, ``t_{k+1} ~ U(t_k,1)``, because in
decoding later blocks are never less noisy than earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model import additive_mask


@dataclass(frozen=True)
class MultiTFSpec:
    """Geometry of the objective, in tokens and blocks."""

    block_size: int
    noisy_len: int  # rows of the noisy copy; a multiple of block_size
    mask_token_id: int
    filler_token_id: int  # end-of-text: fills the last block and the blocks after it
    #: Probability of a group of 1, 2, ... blocks. Half of all blocks are the first of their group,
    #: whose context is clean: there the arithmetic is learnt.
    group_size_weights: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1)
    num_filler_blocks: int = 3  # blocks after the end that still count in the loss


@dataclass(frozen=True)
class MultiTFBatch:
    """Inputs of one forward. The first ``noisy_len`` rows are the noisy copy."""

    tokens: Tensor  # [batch, noisy_len + length] int64
    positions: Tensor  # [batch, noisy_len + length] int64, absolute
    mask: Tensor  # [batch, 1, rows, rows] additive
    targets: Tensor  # [batch, noisy_len] int64
    is_target: Tensor  # [batch, noisy_len] bool: masked response positions
    noise: Tensor  # [batch, noisy_len / block_size] mask ratio of each block
    group_start: Tensor  # [batch, noisy_len / block_size] first block of the group, relative


def draw_groups(
    batch: int, num_blocks: int, size_weights: tuple[float, ...], device: torch.device
) -> Tensor:
    """First block of the group of each block: consecutive groups of random size."""
    weights = torch.tensor(size_weights, device=device).expand(batch, -1)
    sizes = 1 + torch.multinomial(weights, num_blocks, replacement=True)
    starts = torch.cat([torch.zeros_like(sizes[:, :1]), sizes.cumsum(1)], dim=1)
    block = torch.arange(num_blocks, device=device)
    # The last group that starts at or before the block is its own.
    is_before = starts[:, None, :] <= block[None, :, None]
    return torch.where(is_before, starts[:, None, :], 0).amax(-1)


def draw_noise(group_start: Tensor) -> Tensor:
    """Chain-uniform mask ratios: each block of a group is at least as noisy as the one before."""
    uniform = torch.rand(group_start.shape, device=group_start.device)
    noise = [uniform[:, 0]]
    for block in range(1, group_start.shape[1]):
        before = torch.where(group_start[:, block] == block, 0.0, noise[-1])
        noise.append(before + (1.0 - before) * uniform[:, block])
    return torch.stack(noise, dim=1)


def make_batch(
    tokens: Tensor, prompt_len: Tensor, used_len: Tensor, spec: MultiTFSpec
) -> MultiTFBatch:
    """Draw groups and noise for sequences ``tokens`` [batch, length] and build one forward."""
    device, (batch, length), size = tokens.device, tokens.shape, spec.block_size
    num_blocks = spec.noisy_len // size
    first_block = prompt_len // size
    group_start = draw_groups(batch, num_blocks, spec.group_size_weights, device)
    noise = draw_noise(group_start)

    noisy_positions = first_block[:, None] * size + torch.arange(spec.noisy_len, device=device)
    filler = tokens.new_full((batch, spec.noisy_len), spec.filler_token_id)
    targets = torch.cat([tokens, filler], dim=1).gather(1, noisy_positions)
    is_response = noisy_positions >= prompt_len[:, None]
    is_masked = torch.rand(targets.shape, device=device) < noise.repeat_interleave(size, dim=1)
    is_masked &= is_response
    end = (-(-used_len // size) + spec.num_filler_blocks) * size
    is_target = is_masked & (noisy_positions < end[:, None])
    noisy_tokens = targets.masked_fill(is_masked, spec.mask_token_id)

    # Visibility. Blocks of noisy rows are relative to first_block, those of clean rows absolute.
    noisy_block = (torch.arange(spec.noisy_len, device=device) // size).expand(batch, -1)
    noisy_group = group_start.repeat_interleave(size, dim=1)
    clean_block = torch.arange(length, device=device) // size
    same_group = noisy_group[:, :, None] == noisy_group[:, None, :]
    noisy_to_noisy = same_group & (noisy_block[:, None, :] <= noisy_block[:, :, None])
    group_block = first_block[:, None] + noisy_group
    noisy_to_clean = clean_block[None, None, :] < group_block[:, :, None]
    clean_to_clean = (clean_block[None, :] <= clean_block[:, None]).expand(batch, -1, -1)
    clean_to_noisy = torch.zeros_like(noisy_to_clean).transpose(1, 2)
    visible = torch.cat(
        [
            torch.cat([noisy_to_noisy, noisy_to_clean], dim=2),
            torch.cat([clean_to_noisy, clean_to_clean], dim=2),
        ],
        dim=1,
    )
    clean_positions = torch.arange(length, device=device).expand(batch, -1)
    return MultiTFBatch(
        tokens=torch.cat([noisy_tokens, tokens], dim=1),
        positions=torch.cat([noisy_positions, clean_positions], dim=1),
        mask=additive_mask(visible),
        targets=targets,
        is_target=is_target,
        noise=noise,
        group_start=group_start,
    )
