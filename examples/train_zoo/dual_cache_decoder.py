# SPDX-License-Identifier: Apache-2.0
"""Reference decoder of fast_dllm_v2: the dual cache spelled out without a cache.

What an engine would find in its caches is recomputed in every forward: the committed blocks from
their final tokens, and the block cache from a snapshot of the block's tokens at its last full-buffer
forward. A refinement forward then sees the other sub-blocks exactly as stale as an engine does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch

from block_decoders import choose
from model import additive_mask
from reference_decoder import Completion, run_requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from transformer import Transformer


@dataclass(frozen=True)
class DualCacheConfig:
    """``sub_block`` positions are refined at a time, ``num_sub_blocks`` of them form a block."""

    sub_block: int
    num_sub_blocks: int
    mask_token_id: int
    stop_ids: tuple[int, ...]
    accept_threshold: float = 0.9
    use_block_cache: bool = True
    max_tokens: int = 96
    max_model_len: int = 512

    @property
    def block(self) -> int:
        """Positions of one block."""
        return self.sub_block * self.num_sub_blocks


class Mode(Enum):
    """Kind of the next forward."""

    PREFILL = "prefill"
    INIT = "init"
    REFINE = "refine"
    COMMIT = "commit"


@dataclass
class DualCacheRequest:
    """State of one request; ``tokens`` covers whole blocks."""

    config: DualCacheConfig
    prompt: list[int]
    tokens: list[int] = field(init=False)
    snapshot: list[int] = field(init=False)
    base: int = field(init=False)
    limit: int = field(init=False)
    mode: Mode = field(init=False)
    sub_idx: int = 0
    is_initialised: bool = False
    nfe: int = 0

    def __post_init__(self) -> None:
        size, length = self.config.block, len(self.prompt)
        if not 0 < length < self.config.max_model_len:
            raise ValueError(
                "DualCacheRequest: expected a prompt length in "
                f"[1, {self.config.max_model_len - 1}], got {length}"
            )
        self.limit = min(length + self.config.max_tokens, self.config.max_model_len)
        num_masks = -(-self.limit // size) * size - length
        self.tokens = self.prompt + [self.config.mask_token_id] * num_masks
        self.base = length // size * size
        self.snapshot = [self.config.mask_token_id] * size

    def sub_range(self) -> range:
        """Positions of the current sub-block."""
        start = self.base + self.sub_idx * self.config.sub_block
        return range(start, start + self.config.sub_block)

    def open_positions(self) -> list[int]:
        """Masks of the current sub-block."""
        return [i for i in self.sub_range() if self.tokens[i] == self.config.mask_token_id]

    def block_tokens(self) -> list[int]:
        """Tokens of the current block."""
        return self.tokens[self.base : self.base + self.config.block]

    def begin_step(self) -> None:
        """Choose the mode of the next forward."""
        if self.nfe == 0 and self.base:
            self.mode = Mode.PREFILL
            return
        while not self.open_positions() and self.sub_idx < self.config.num_sub_blocks - 1:
            self.sub_idx += 1
        if not self.open_positions():
            self.mode = Mode.COMMIT
        elif (
            not self.is_initialised or self.tokens[self.sub_range()[0]] == self.config.mask_token_id
        ):
            self.mode = Mode.INIT
        else:
            self.mode = Mode.REFINE
        if self.mode is not Mode.REFINE or not self.config.use_block_cache:
            self.snapshot = self.block_tokens()

    def uses_sub_rows(self) -> bool:
        """Whether the forward runs the sub-block alone against the block cache."""
        return self.mode is Mode.REFINE and self.config.use_block_cache

    def finish_step(
        self,
        block_rows: tuple[Sequence[int], Sequence[float]],
        sub_rows: tuple[Sequence[int], Sequence[float]],
        last_committed: int,
    ) -> None:
        """Write what the forward found. Rows are (ids, confidence); a row predicts the next token.

        ``last_committed`` is the proposal of the last row before the current block.
        """
        self.nfe += 1
        size = self.config.block
        if self.mode is Mode.PREFILL:
            if len(self.prompt) == self.base:
                self.tokens[self.base] = last_committed
            return
        if self.mode is Mode.COMMIT:
            self.base += size
            self.sub_idx, self.is_initialised = 0, False
            if self.base < self.limit:
                self.tokens[self.base] = block_rows[0][size - 1]
            return
        if self.uses_sub_rows():
            (ids, confidence), start = sub_rows, self.sub_range()[0]
        else:
            (ids, confidence), start = block_rows, self.base
        opened = self.open_positions()
        row = {i: i - start - 1 for i in opened}
        accepted = [i for i in opened if confidence[row[i]] > self.config.accept_threshold]
        if not accepted:
            accepted = [max(opened, key=lambda i: (confidence[row[i]], -i))]
        for i in accepted:
            self.tokens[i] = ids[row[i]]
        self.is_initialised = True

    def completion(self) -> Completion | None:
        """The result if the request has ended, else None."""
        length, mask = len(self.prompt), self.config.mask_token_id
        generated = range(length, self.limit)
        settled_end = next((i for i in generated if self.tokens[i] == mask), self.limit)
        stop = next((i for i in generated if self.tokens[i] in self.config.stop_ids), None)
        if stop is not None and stop < settled_end:
            return Completion(self.tokens[length:stop], self.nfe, "eos_token_generated")
        if settled_end < self.limit:
            return None
        is_token_limit = self.limit == length + self.config.max_tokens
        reason = "max_new_tokens_reached" if is_token_limit else "max_model_len_reached"
        return Completion(self.tokens[length : self.limit], self.nfe, reason)


def dual_cache_rows(
    base: Tensor, sub_start: Tensor, num_blocks: int, block: int, sub_block: int, clean_len: int
) -> tuple[Tensor, Tensor]:
    """Positions and visibility of the rows [blocks from ``base`` | one sub-block each | clean].

    base: [batch], a multiple of ``block``; sub_start: [batch, num_blocks], absolute. A block row sees
    its block and the clean blocks before it; a sub-block row sees the clean blocks before its block,
    the block rows of the other sub-blocks, and its sub-block rows.
    """
    device, batch = base.device, base.shape[0]
    block_pos = base[:, None] + torch.arange(num_blocks * block, device=device)
    sub_pos = (sub_start[..., None] + torch.arange(sub_block, device=device)).flatten(1)
    clean_pos = torch.arange(clean_len, device=device).expand(batch, -1)
    positions = torch.cat([block_pos, sub_pos, clean_pos], dim=1)
    kinds = (block_pos.shape[1], sub_pos.shape[1], clean_len)
    kind = torch.repeat_interleave(
        torch.arange(3, device=device), torch.tensor(kinds, device=device), output_size=sum(kinds)
    )
    is_block, is_sub, is_clean = kind == 0, kind == 1, kind == 2
    part = positions // block
    same = part[:, :, None] == part[:, None, :]
    before = part[:, None, :] < part[:, :, None]
    same_sub = (positions // sub_block)[:, :, None] == (positions // sub_block)[:, None, :]
    visible = is_clean & before  # every row sees the clean blocks before its own
    visible = visible | (is_clean[:, None] & is_clean & same)
    visible = visible | (is_block[:, None] & is_block & same)
    visible = visible | (is_sub[:, None] & is_block & same & ~same_sub)
    visible = visible | (is_sub[:, None] & is_sub & same)
    return positions, visible


def decode_dual_cache(
    model: Transformer,
    prompts: Sequence[list[int]],
    config: DualCacheConfig,
    *,
    device: torch.device,
    num_candidates: int,
    max_batch: int = 1024,
) -> list[Completion]:
    """Decode all prompts with the modes of the dual cache."""
    size, sub = config.block, config.sub_block

    @torch.no_grad()
    def step(running: list[DualCacheRequest]) -> None:
        clean_len = max(size, *(request.base for request in running))
        mask = config.mask_token_id
        rows = []
        for request in running:
            clean = request.tokens[:clean_len]
            clean = clean + [mask] * (clean_len - len(clean))
            current = [request.tokens[i] for i in request.sub_range()]
            # A prefill before the first block has been touched runs no block rows of interest.
            rows.append([*request.snapshot, *current, *clean])
        base = torch.tensor([request.base for request in running], device=device)
        sub_start = torch.tensor([[r.sub_range()[0]] for r in running], device=device)
        positions, visible = dual_cache_rows(base, sub_start, 1, size, sub, clean_len)
        logits = model(torch.tensor(rows, device=device), positions, additive_mask(visible))
        ids, confidence = choose(logits, mask, num_candidates)
        id_rows, confidence_rows = ids.tolist(), confidence.tolist()
        for request, id_row, p_row in zip(running, id_rows, confidence_rows, strict=True):
            last = id_row[size + sub + request.base - 1] if request.base else -1
            request.finish_step(
                (id_row[:size], p_row[:size]),
                (id_row[size : size + sub], p_row[size : size + sub]),
                last,
            )

    return run_requests([DualCacheRequest(config, list(p)) for p in prompts], step, max_batch)
