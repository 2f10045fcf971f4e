# SPDX-License-Identifier: Apache-2.0
"""Reference decoder: block diffusion with up to N blocks in flight, without a KV cache.

Every forward recomputes the whole sequence under the block-causal mask, so a block never sees a
later one and the tokens equal those of a cached engine. The block life cycle is followed exactly,
because the number of forwards (NFE) depends on it: the first one runs the prompt and the first
block, and a finished block spends one more forward to be stored, during which later blocks are
refined.

Many requests share one forward per step; they do not influence one another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from model import additive_mask, block_causal_visible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model import SDARForCausalLM


@dataclass(frozen=True)
class DecodingConfig:
    """Block geometry and thresholds; ``buffer_size`` is N, the number of blocks in flight."""

    block_size: int
    mask_token_id: int
    stop_ids: tuple[int, ...]
    buffer_size: int = 1
    accept_threshold: float = 0.95
    add_block_threshold: float = 0.1
    semi_complete_threshold: float = 0.9
    max_tokens: int = 96
    max_model_len: int = 512
    starts_at_prompt: bool = False  # block 0 starts where the prompt ends, not at position 0


class BlockStatus(Enum):
    """Life cycle of one block of the buffer."""

    DUMMY = "dummy"
    ACTIVE = "active"
    TO_CACHE = "to_cache"
    IN_CACHE = "in_cache"


@dataclass
class Completion:
    """Result of one request: tokens before the stop id, forwards used, why it ended."""

    token_ids: list[int]
    nfe: int
    reason: str


@dataclass
class Request:
    """Decoding state of one request. ``tokens`` always covers whole blocks."""

    config: DecodingConfig
    prompt: list[int]
    tokens: list[int] = field(init=False)
    statuses: list[BlockStatus] = field(init=False)
    nfe: int = 0

    def __post_init__(self) -> None:
        size, length = self.config.block_size, len(self.prompt)
        if not 0 < length < self.config.max_model_len:
            raise ValueError(
                "Request: expected a prompt length in "
                f"[1, {self.config.max_model_len - 1}], got {length}"
            )
        self.limit = min(length + self.config.max_tokens, self.config.max_model_len)
        self.origin = length if self.config.starts_at_prompt else 0
        self.first_block = (length - self.origin) // size
        num_blocks = -(-(self.limit - self.origin) // size)
        num_masks = self.block_start(num_blocks) - length
        self.tokens = self.prompt + [self.config.mask_token_id] * num_masks
        self.statuses = [BlockStatus.DUMMY] * num_blocks
        for block in range(self.first_block):
            self.statuses[block] = BlockStatus.TO_CACHE
        if self.block_start(self.first_block) < length:
            self.statuses[self.first_block] = BlockStatus.ACTIVE

    def block_start(self, block: int) -> int:
        """First position of the block."""
        return self.origin + block * self.config.block_size

    # -- derived quantities, all on the tokens before the writes of the current step -------------

    def open_positions(self, block: int) -> list[int]:
        """Masked positions of the block that may be written (prompt positions never are)."""
        start = max(self.block_start(block), len(self.prompt))
        mask = self.config.mask_token_id
        return [i for i in range(start, self.block_start(block + 1)) if self.tokens[i] == mask]

    def progress(self, block: int) -> float:
        """Filled share of the block; prompt positions count as filled."""
        size = self.config.block_size
        return (size - len(self.open_positions(block))) / size

    def is_forced(self, block: int) -> bool:
        """Whether the best position is accepted although no confidence passes the threshold."""
        if block == 0:
            return True
        return self.progress(block - 1) >= self.config.semi_complete_threshold

    def stop_position(self) -> int | None:
        """First generated position that holds a stop id, settled or not."""
        for index in range(len(self.prompt), self.limit):
            if self.tokens[index] in self.config.stop_ids:
                return index
        return None

    def active_blocks(self) -> list[int]:
        """Blocks that are denoised in the current forward."""
        return [b for b, status in enumerate(self.statuses) if status is BlockStatus.ACTIVE]

    def computed_length(self) -> int:
        """End of the last block that is not DUMMY: what a forward has to compute."""
        dummy = BlockStatus.DUMMY
        num_blocks = self.statuses.index(dummy) if dummy in self.statuses else len(self.statuses)
        return self.block_start(num_blocks)

    # -- one step ----------------------------------------------------------------------------------

    def may_open_next(self, block: int) -> bool:
        """Whether the last block in flight is filled enough for another one."""
        return self.progress(block) >= self.config.add_block_threshold

    def begin_step(self) -> None:
        """Activate at most one block, if the last one in flight is filled enough."""
        in_flight = [
            b
            for b in range(self.first_block, len(self.statuses))
            if self.statuses[b] in (BlockStatus.ACTIVE, BlockStatus.TO_CACHE)
        ]
        if len(in_flight) == self.config.buffer_size or self.stop_position() is not None:
            return
        if BlockStatus.DUMMY not in self.statuses:
            return
        block = self.statuses.index(BlockStatus.DUMMY)
        if in_flight and not self.may_open_next(in_flight[-1]):
            return
        self.statuses[block] = BlockStatus.ACTIVE

    def accepted(self, block: int, confidence: Sequence[float]) -> list[int]:
        """Positions accepted by the threshold rule with the gated forced pick."""
        positions = self.open_positions(block)
        above = [i for i in positions if confidence[i] > self.config.accept_threshold]
        if above or not positions or not self.is_forced(block):
            return above
        return [max(positions, key=lambda i: (confidence[i], -i))]

    def finish_step(self, proposed: Sequence[int], confidence: Sequence[float]) -> None:
        """Write the accepted tokens of every active block and move the blocks on."""
        self.nfe += 1
        writes = {
            i: proposed[i] for b in self.active_blocks() for i in self.accepted(b, confidence)
        }
        for index, token in writes.items():
            self.tokens[index] = token
        for block, status in enumerate(self.statuses):
            if status is BlockStatus.TO_CACHE:
                self.statuses[block] = BlockStatus.IN_CACHE  # stored by this forward
            elif status is BlockStatus.ACTIVE and not self.open_positions(block):
                before = self.statuses[block - 1] if block else BlockStatus.IN_CACHE
                if before in (BlockStatus.TO_CACHE, BlockStatus.IN_CACHE):
                    self.statuses[block] = BlockStatus.TO_CACHE

    def settled_end(self) -> int:
        """First generated position whose token may still change."""
        mask = self.config.mask_token_id
        open_positions = (i for i in range(len(self.prompt), self.limit) if self.tokens[i] == mask)
        return next(open_positions, self.limit)

    def completion(self) -> Completion | None:
        """The result if the request has ended, else None."""
        length, settled_end = len(self.prompt), self.settled_end()
        stop = self.stop_position()
        if stop is not None and stop < settled_end:
            return Completion(self.tokens[length:stop], self.nfe, "eos_token_generated")
        if settled_end < self.limit:
            return None
        is_token_limit = self.limit == length + self.config.max_tokens
        reason = "max_new_tokens_reached" if is_token_limit else "max_model_len_reached"
        return Completion(self.tokens[length : self.limit], self.nfe, reason)


@torch.no_grad()
def propose(
    model: SDARForCausalLM, tokens: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy token and its probability at every position of ``tokens`` [batch, length].

    The mask token may not be chosen but stays in the normaliser; so do ids from ``num_candidates``
    on, which the tokenizer does not know. Equal logits: the lowest id wins.
    """
    config = model.config
    length = tokens.shape[1]
    mask = additive_mask(block_causal_visible(length, config.block_size, tokens.device))
    positions = torch.arange(length, device=tokens.device)[None]
    logits = model(tokens, positions, mask).float()
    normaliser = logits.logsumexp(dim=-1)
    logits[..., config.mask_token_id] = float("-inf")
    logits[..., num_candidates:] = float("-inf")
    best, ids = logits.max(dim=-1)
    return ids, (best - normaliser).exp()


def propose_block_causal(
    model: SDARForCausalLM, requests: Sequence[Request], device: torch.device, num_candidates: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Proposals of one forward for every position of every request, under the block-causal mask."""
    config = requests[0].config
    # Shorter requests are filled with masks; no block of theirs can see the filling.
    length = max(request.computed_length() for request in requests)
    batch = torch.full((len(requests), length), config.mask_token_id, dtype=torch.int64)
    for row, request in enumerate(requests):
        known = request.tokens[:length]
        batch[row, : len(known)] = torch.tensor(known)
    ids, confidence = propose(model, batch.to(device), num_candidates)
    return ids.tolist(), confidence.tolist()


class Decodable(Protocol):
    """One request of any strategy, as ``run_requests`` drives it."""

    def begin_step(self) -> None: ...
    def completion(self) -> Completion | None: ...


R = TypeVar("R", bound=Decodable)


def run_requests(
    requests: Sequence[R],
    step: Callable[[list[R]], None],
    max_batch: int,
    on_progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Run all requests to their end, at most ``max_batch`` in one ``step`` (forward and writes)."""
    waiting = list(enumerate(requests))[::-1]
    running: list[tuple[int, R]] = []
    results: dict[int, Completion] = {}
    while waiting or running:
        while waiting and len(running) < max_batch:
            running.append(waiting.pop())
        for _, request in running:
            request.begin_step()
        step([request for _, request in running])
        still_running = []
        for index, request in running:
            completion = request.completion()
            if completion is None:
                still_running.append((index, request))
            else:
                results[index] = completion
        running = still_running
        if on_progress is not None:
            on_progress(len(results))
    return [results[index] for index in range(len(requests))]


def decode(
    model: SDARForCausalLM,
    prompts: Sequence[list[int]],
    config: DecodingConfig,
    *,
    device: torch.device,
    num_candidates: int,
    max_batch: int = 1024,
    on_progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Decode all prompts; ``on_progress`` is told the number of finished requests."""

    def step(running: list[Request]) -> None:
        ids, confidence = propose_block_causal(model, running, device, num_candidates)
        for request, id_row, confidence_row in zip(running, ids, confidence, strict=True):
            request.finish_step(id_row, confidence_row)

    requests = [Request(config, list(prompt)) for prompt in prompts]
    return run_requests(requests, step, max_batch, on_progress)
