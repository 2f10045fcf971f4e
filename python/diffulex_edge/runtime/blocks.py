# SPDX-License-Identifier: Apache-2.0
"""Blocks as the edge documents describe them: records that follow an engine's snapshots.

The engine decides; these say what a block is at the moment. A caller may also drive them by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex.engine.output import DenoiseSnapshot

__all__ = ["BlockStatus", "DiffusionBlock", "DiffusionBlockManager"]


class BlockStatus(Enum):
    """Life of a block."""

    PENDING = "pending"
    ACTIVE = "active"
    COMPLETE = "complete"
    CONFIRMED = "confirmed"


#: Status of a snapshot's block -> status here.
_STATUS: Mapping[str, BlockStatus] = {
    "ACTIVE": BlockStatus.ACTIVE,
    "TO_CACHE": BlockStatus.COMPLETE,
    "IN_CACHE": BlockStatus.CONFIRMED,
}


@dataclass(slots=True)
class DiffusionBlock:
    """Tokens of a block and which of them are still masked.

    Raises:
        ValueError: an empty block, or one before position 0.
    """

    start_pos: int
    length: int
    mask_token_id: int
    accept_threshold: float = 0.95
    pre_block_complete: bool = False
    block_id: int = 0
    #: First position of the block that may change; the prompt's tail lies before it.
    editable_start: int = 0
    status: BlockStatus = BlockStatus.PENDING
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length: expected >= 1, got {self.length}")
        if self.start_pos < 0:
            raise ValueError(f"start_pos: expected >= 0, got {self.start_pos}")
        if not self.tokens:
            self.tokens = [self.mask_token_id] * self.length
        if len(self.tokens) != self.length:
            raise ValueError(f"tokens: expected {self.length}, got {len(self.tokens)}")

    @property
    def local_mask_token_ids(self) -> list[int]:
        """Positions in the block that are still open, ascending."""
        places = range(self.editable_start, self.length)
        return [i for i in places if self.tokens[i] == self.mask_token_id]

    @property
    def global_mask_token_ids(self) -> list[int]:
        """The same as absolute positions."""
        return [self.start_pos + i for i in self.local_mask_token_ids]

    @property
    def is_active(self) -> bool:
        """Whether it is being denoised."""
        return self.status is BlockStatus.ACTIVE

    @property
    def is_complete(self) -> bool:
        """Whether no position is open."""
        return not self.local_mask_token_ids

    @property
    def accepted_token_ids(self) -> list[int]:
        """Decided tokens after the prompt, in order."""
        return [t for t in self.tokens[self.editable_start :] if t != self.mask_token_id]

    def get_sequence_tokens(self) -> list[int]:
        """All tokens, masks included."""
        return list(self.tokens)

    def activate(self) -> None:
        """Begins denoising; ValueError unless it was pending."""
        if self.status is not BlockStatus.PENDING:
            raise ValueError(f"activate: expected a pending block, got {self.status.value}")
        self.status = BlockStatus.ACTIVE
        self._settle()

    def accept_token(self, local: int, token: int) -> None:
        """Decides one position.

        Raises:
            IndexError: no position of the block.
            ValueError: the block is not active, the position not open, or the token the mask.
        """
        if not 0 <= local < self.length:
            raise IndexError(f"accept_token: expected [0, {self.length}), got {local}")
        if self.status is not BlockStatus.ACTIVE:
            raise ValueError(f"accept_token: expected an active block, got {self.status.value}")
        if local not in self.local_mask_token_ids:
            raise ValueError(f"accept_token: expected an open position, got {local}")
        if token == self.mask_token_id:
            raise ValueError(f"accept_token: expected a token other than the mask, got {token}")
        self.tokens[local] = token
        self._settle()

    def confirm(self) -> None:
        """Marks the block as cached; ValueError while a position is open."""
        if not self.is_complete:
            raise ValueError(
                f"confirm: expected a complete block, got {len(self.local_mask_token_ids)} masks"
            )
        self.status = BlockStatus.CONFIRMED

    def _settle(self) -> None:
        if self.status is BlockStatus.ACTIVE and self.is_complete:
            self.status = BlockStatus.COMPLETE


class DiffusionBlockManager:
    """The blocks of one request, in order."""

    def __init__(self, mask_token_id: int) -> None:
        self.mask_token_id = mask_token_id
        self._blocks: list[DiffusionBlock] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def reset(self) -> None:
        """Forgets all blocks."""
        self._blocks.clear()

    def create_block(self, start: int, length: int, **fields: object) -> int:
        """Appends a block and returns its number."""
        block = DiffusionBlock(start, length, self.mask_token_id, **fields)  # type: ignore[arg-type]
        block.block_id = len(self._blocks)
        block.pre_block_complete = block.pre_block_complete or not self._blocks
        self._blocks.append(block)
        return block.block_id

    def create_blocks(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        block_size: int,
        accept_threshold: float = 0.95,
    ) -> list[int]:
        """Blocks on the absolute grid: the first one begins with the prompt's tail.

        Raises:
            ValueError: blocks of less than one token.
        """
        if block_size < 1:
            raise ValueError(f"block_size: expected >= 1, got {block_size}")
        start = len(prompt) // block_size * block_size
        end = len(prompt) + max_new_tokens
        numbers = []
        for begin in range(start, end, block_size):
            tail = list(prompt[begin : begin + block_size])
            tokens = tail + [self.mask_token_id] * (block_size - len(tail))
            numbers.append(
                self.create_block(
                    begin,
                    block_size,
                    tokens=tokens,
                    editable_start=len(tail),
                    accept_threshold=accept_threshold,
                )
            )
        self._open_next()
        return numbers

    def follow(self, snapshot: DenoiseSnapshot) -> None:
        """Takes over the blocks of an engine's snapshot; earlier ones stay as they were."""
        known = {block.start_pos: block for block in self._blocks}
        for item in snapshot.blocks:
            if item.start not in known:
                number = self.create_block(item.start, len(item.token_ids))
                known[item.start] = self._blocks[number]
            block = known[item.start]
            block.length, block.tokens = len(item.token_ids), list(item.token_ids)
            block.status = _STATUS.get(item.status.rpartition(".")[2].upper(), BlockStatus.PENDING)
            block.editable_start = min(max(0, snapshot.prompt_len - item.start), block.length)
        # What has left the engine's buffer is cached.
        first = min((item.start for item in snapshot.blocks), default=0)
        for block in self._blocks:
            if block.start_pos < first and block.is_complete:
                block.status = BlockStatus.CONFIRMED
        self.update_pre_block_complete()

    def get_block(self, block_id: int) -> DiffusionBlock:
        """A block by its number; IndexError for no such block."""
        if not 0 <= block_id < len(self._blocks):
            raise IndexError(f"block_id: expected [0, {len(self._blocks)}), got {block_id}")
        return self._blocks[block_id]

    def get_active_blocks(self) -> list[DiffusionBlock]:
        """Blocks being denoised."""
        return [block for block in self._blocks if block.is_active]

    def get_active_block(self) -> DiffusionBlock | None:
        """The first of them."""
        return next(iter(self.get_active_blocks()), None)

    @property
    def has_active_blocks(self) -> bool:
        """Whether any block is being denoised."""
        return bool(self.get_active_blocks())

    def update_block(self, block_id: int, positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Accepts several tokens at positions of a block; errors as `accept_token`.

        Raises:
            ValueError: not a token for every position; nothing is accepted then.
        """
        block = self.get_block(block_id)
        if len(positions) != len(tokens):
            raise ValueError(f"tokens: expected {len(positions)}, got {len(tokens)}")
        for position, token in zip(positions, tokens, strict=True):
            block.accept_token(position, token)

    def confirm_current_block(self) -> bool:
        """Confirms the first complete block and opens the next one; whether there is one."""
        for block in self._blocks:
            if block.status is BlockStatus.CONFIRMED:
                continue
            block.confirm()
            break
        self.update_pre_block_complete()
        self._open_next()
        return any(block.status is not BlockStatus.CONFIRMED for block in self._blocks)

    def _open_next(self) -> None:
        waiting = [block for block in self._blocks if block.status is BlockStatus.PENDING]
        if waiting and not self.has_active_blocks:
            waiting[0].activate()

    def update_pre_block_complete(self) -> None:
        """Recomputes, for every block, whether the one before it has no open position."""
        for before, block in zip(self._blocks, self._blocks[1:]):
            block.pre_block_complete = before.is_complete

    def get_all_mask_positions(self) -> list[int]:
        """Open positions of all blocks, absolute."""
        return [i for block in self._blocks for i in block.global_mask_token_ids]

    def build_sequence(self, prompt: Sequence[int]) -> list[int]:
        """Prompt and blocks as one sequence; the prompt's tail is not repeated."""
        sequence = list(prompt)
        for block in self._blocks:
            sequence += block.tokens[max(0, len(sequence) - block.start_pos) :]
        return sequence
