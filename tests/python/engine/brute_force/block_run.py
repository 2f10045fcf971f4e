# SPDX-License-Identifier: Apache-2.0
"""Decoding in a buffer of blocks: multi_bd and d2f, shifted or not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from brute_force.draws import uniform
from brute_force.network import LayerKV, Network, cut
from brute_force.proposals import Proposal, propose
from brute_force.request_run import RequestRun
from brute_force.rules import acceptance_margin, accepted_positions
from brute_force.settings import RequestSettings, Settings

DUMMY, ACTIVE, TO_CACHE, IN_CACHE = "DUMMY", "ACTIVE", "TO_CACHE", "IN_CACHE"


@dataclass
class Block:
    """One block of positions [start, start + B)."""

    start: int
    status: str = DUMMY
    editable_start: int = 0
    steps: int = 0  # sampler steps taken
    open_steps: int = 0  # of those, with an open gate
    post_edit_steps: int = 0  # of those, without an open position at the start
    same_token_ratio: float = 1.0
    is_committable: bool = False


class BlockRun(RequestRun):
    """Fills masks; every step recomputes the whole sequence.

    The first step runs the prompt and the first block together. d2f as published has its first block
    where the prompt ends, and the prompt keeps the K and V of its own forward; on the grid blocks
    are those of the positions, and the end of the prompt that begins a block is run along with it.
    """

    #: Whether a step over the final tokens of a block makes its final K and V.
    makes_final_kv = False

    def __init__(
        self, network: Network, settings: Settings, prompt: list[int], request: RequestSettings
    ) -> None:
        super().__init__(settings, prompt, request)
        self.network = network
        self.prompt = prompt
        size = settings.block_size
        starts_at_prompt = settings.strategy == "d2f" and not settings.has_block_grid
        self.first = self.prompt_len if starts_at_prompt else 0
        self.blocks = [
            Block(self.first + i * size)
            for i in range(self.limit // size + settings.buffer_size + 2)
        ]
        full, tail = divmod(self.prompt_len - self.first, size)
        for block in self.blocks[:full]:
            block.status, block.editable_start = TO_CACHE, size
        self.head = full
        if tail:
            self.blocks[full].status = ACTIVE
            self.blocks[full].editable_start = tail
        #: End of the prompt whose K and V are those of the first forward (d2f).
        self.kept_end = self.first or full * size
        self.prompt_kv: list[LayerKV] | None = None  # d2f

    def step(self) -> None:
        self.nfe += 1
        self._activate()
        stored = [block for block in self.blocks if block.status == TO_CACHE]
        active = [b for b in self._buffer() if b.status == ACTIVE]
        num_filled = 0
        changed: set[int] = set()
        if active:
            rows = self._rows(active[-1].start + self.settings.block_size)
            writes: dict[int, int] = {}
            # Every block decides before any block is written.
            for block in active:
                writes.update(self.sample(block, rows))
            num_filled = sum(position not in self.tokens for position in writes)
            changed = {p for p, token in writes.items() if self.tokens.get(p) != token}
            self.tokens.update(writes)
        self.decided.append(num_filled)
        self._transition(stored, changed)

    def _buffer(self) -> list[Block]:
        return self.blocks[self.head : self.head + self.settings.buffer_size]

    def masks(self, block: Block) -> list[int]:
        """Open positions of a block, relative."""
        size = self.settings.block_size
        first = block.editable_start if block.status != TO_CACHE else size
        return [r for r in range(first, size) if block.start + r not in self.tokens]

    def is_gate_open(self, block: Block) -> bool:
        """Whether a position may be accepted that does not pass the threshold."""
        index = self._index(block)
        if index == 0 or self.settings.is_always_open:
            return True
        bound = np.float32(self.threshold("semi_complete"))
        return bool(np.float32(self._progress(self.blocks[index - 1])) >= bound)

    def _index(self, block: Block) -> int:
        return (block.start - self.first) // self.settings.block_size

    def _progress(self, block: Block) -> float:
        size = self.settings.block_size
        return (size - len(self.masks(block))) / size

    def _activate(self) -> None:
        buffer = self._buffer()
        valid = [block for block in buffer if block.status != DUMMY]
        if len(valid) == len(buffer):
            return
        following = buffer[len(valid)]
        if following.start >= self.limit or self.stop_position() is not None:
            return
        if not valid:
            is_ready = True  # what is before it is stored, at the latest by this step
        else:
            last = valid[-1]
            is_far = np.float32(self._progress(last)) >= np.float32(self.threshold("add_block"))
            stability = np.float32(self.threshold("token_stability"))
            is_ready = is_far and np.float32(last.same_token_ratio) >= stability
        if is_ready:
            following.status = ACTIVE

    def _sequence(self, end: int) -> list[int]:
        return [self.tokens.get(i, self.settings.mask_id) for i in range(end)]

    def embeddings(self) -> dict[int, torch.Tensor]:
        """Positions whose input is not the embedding of their token."""
        return {}

    def _rows(self, end: int) -> np.ndarray:
        """Logits rows of the positions [0, end), of which only those in the buffer are used."""
        size = self.settings.block_size
        sequence = self._sequence(end)
        if self.settings.strategy != "d2f":
            return self.network.block_causal(sequence, size, self.embeddings()).logits
        if self.prompt_kv is None:
            return self._run_prompt(sequence)
        # The stored part of the prompt keeps the K and V of its bidirectional forward.
        full = self.kept_end
        block = (torch.arange(full, end) - self.first) // size
        mask = torch.cat(
            [torch.ones(end - full, full, dtype=torch.bool), block[None, :] <= block[:, None]], 1
        )
        rows = self.network.run(sequence[full:], mask, first=full, past=self.prompt_kv).logits
        unused = np.full((full, rows.shape[1]), np.nan, rows.dtype)
        return np.concatenate([unused, rows])

    def _run_prompt(self, sequence: list[int]) -> np.ndarray:
        """The first forward of d2f: all of the prompt sees all of the prompt."""
        size, prompt_len = self.settings.block_size, self.prompt_len
        padded = self.first or -(-prompt_len // size) * size
        query = torch.arange(len(sequence))[:, None]
        key = torch.arange(len(sequence))[None, :]
        mask = torch.where(
            query < prompt_len,
            key < prompt_len,
            torch.where(
                query < padded,
                key < padded,
                key < self.first + ((query - self.first) // size + 1) * size,
            ),
        )
        result = self.network.run(sequence, mask)
        self.prompt_kv = cut(result.kv, 0, self.kept_end)
        return result.logits

    def row_of(self, rows: np.ndarray, position: int) -> np.ndarray:
        """The row that predicts a position."""
        row = rows[position - 1 if self.settings.is_shifted else position]
        if np.isnan(row).any():
            # d2f with shifted logits: the last row of a prompt that is kept as a whole.
            return self._last_prompt_row()
        return row

    def _last_prompt_row(self) -> np.ndarray:
        mask = torch.ones(self.prompt_len, self.prompt_len, dtype=torch.bool)
        return self.network.run(self.prompt, mask).logits[-1]

    def proposals(
        self, block: Block, positions: list[int], rows: np.ndarray
    ) -> dict[int, Proposal]:
        """What the rows of some positions of a block, relative, propose."""
        return {
            r: propose(
                self.row_of(rows, block.start + r),
                self.settings,
                self.request,
                uniform(self.request.seed, block.start + r, block.steps),
            )
            for r in positions
        }

    def sample(self, block: Block, rows: np.ndarray) -> dict[int, int]:
        """Writes of one block, by position."""
        is_open = self.is_gate_open(block)
        proposals = self.proposals(block, self.masks(block), rows)
        threshold = self.threshold("accept")
        open_steps = block.steps if self.settings.is_always_open else block.open_steps
        chosen = accepted_positions(proposals, self.settings, threshold, is_open, open_steps)
        self.note_margins([p.margin for p in proposals.values()])
        self.note_margins([acceptance_margin(proposals, self.settings, threshold, is_open)])
        block.steps += 1
        block.open_steps += is_open
        block.is_committable = True
        return {block.start + r: proposals[r].token for r in chosen}

    def committed(self, block: Block) -> None:
        """A block was frozen."""

    def _transition(self, stored: list[Block], changed: set[int]) -> None:
        for index, block in enumerate(self.blocks):
            before = self.blocks[index - 1].status if index else IN_CACHE
            is_ready = block.status == ACTIVE and block.is_committable and not self.masks(block)
            if is_ready and before in (TO_CACHE, IN_CACHE):
                block.status = TO_CACHE
                self.committed(block)
        for block in stored:
            block.status = IN_CACHE
        self._store_final(changed)
        while self.blocks[self.head].status == IN_CACHE:
            self.head += 1

    def _store_final(self, changed: set[int]) -> None:
        """Blocks that this step ran on their final tokens take no further one to be stored.

        While others are refined they keep their places all the same, because what is opened later
        must not depend on it.
        """
        frozen = [block for block in self._buffer() if block.status not in (DUMMY, IN_CACHE)]
        is_final = all(
            block.status == TO_CACHE
            and changed.isdisjoint(range(block.start, block.start + self.settings.block_size))
            for block in frozen
        )
        if self.makes_final_kv and is_final:
            for block in frozen:
                block.status = IN_CACHE
