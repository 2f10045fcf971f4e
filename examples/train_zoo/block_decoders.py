# SPDX-License-Identifier: Apache-2.0
"""Reference decoders without a cache for the strategies on the block buffer: d2f, edit and dmax.

They share the life cycle of ``reference_decoder``; d2f changes what the rows see, edit and dmax
change what a step writes and when a block is finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from model import additive_mask, block_causal_visible
from reference_decoder import BlockStatus, Completion, DecodingConfig, Request, run_requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from transformer import Transformer

#: dmax calls a block finished when every argmax has at least this probability.
ALL_CONFIDENT = 0.9


@torch.no_grad()
def choose(logits: Tensor, mask_token_id: int | None, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Greedy ids and their probabilities; the mask token and ids beyond the tokenizer may not be
    chosen but count in the normaliser.
    """
    logits = logits.float()
    normaliser = logits.logsumexp(dim=-1)
    if mask_token_id is not None:
        logits[..., mask_token_id] = float("-inf")
    logits[..., num_candidates:] = float("-inf")
    best, ids = logits.max(dim=-1)
    return ids, (best - normaliser).exp()


# -- d2f -------------------------------------------------------------------------------------------


def first_block_start(prompt_len: Tensor, size: int, on_grid: bool) -> Tensor:
    """Position of the first block that is decoded: the prompt's end, or a multiple of ``size``."""
    return prompt_len // size * size if on_grid else prompt_len


def prefix_full_rows(
    tokens: Tensor, prompt_len: Tensor, start: Tensor, size: int, max_prompt: int, is_first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a d2f forward: the sequence from the first block that is decoded, then the prompt.

    tokens: [batch, length] with length >= max_prompt; ``start`` [batch]: see first_block_start. The
    prompt rows see the whole prompt. The sequence rows see the prompt rows before ``start``, which a
    cache would hold, and each other by blocks. On the grid a prompt tail therefore occurs twice, as
    it does in an engine, and in the first forward (``is_first`` [batch]) it sees the prompt only.
    Returns tokens, positions and visibility; the first ``length`` rows are the sequence's.
    """
    device, (batch, length) = tokens.device, tokens.shape
    relative = torch.arange(length, device=device)
    positions = start[:, None] + relative
    padded = torch.cat([tokens, tokens.new_zeros(batch, length)], dim=1)
    prompt_positions = torch.arange(max_prompt, device=device).expand(batch, -1)
    block = (relative // size).expand(batch, -1)
    seq_to_seq = block[:, None, :] <= block[:, :, None]
    is_prompt = positions < prompt_len[:, None]
    seq_to_seq &= ~(is_first[:, None, None] & is_prompt[:, :, None] & ~is_prompt[:, None, :])
    seq_to_prompt = prompt_positions[:, None, :] < start[:, None, None]
    seq_to_prompt = seq_to_prompt.expand(-1, length, -1)
    inside = prompt_positions < prompt_len[:, None]
    own = torch.eye(max_prompt, dtype=torch.bool, device=device)
    prompt_to_prompt = inside[:, None, :] | own  # rows behind the prompt see themselves only
    prompt_to_prompt = prompt_to_prompt & (inside[:, :, None] | own)
    prompt_to_seq = torch.zeros_like(seq_to_prompt).transpose(1, 2)
    visible = torch.cat(
        [
            torch.cat([seq_to_seq, seq_to_prompt], dim=2),
            torch.cat([prompt_to_seq, prompt_to_prompt], dim=2),
        ],
        dim=1,
    )
    rows = torch.cat([padded.gather(1, positions), tokens[:, :max_prompt]], dim=1)
    return rows, torch.cat([positions, prompt_positions], dim=1), visible


def decode_d2f(
    model: Transformer,
    prompts: Sequence[list[int]],
    config: DecodingConfig,
    *,
    device: torch.device,
    num_candidates: int,
    max_batch: int = 1024,
    is_shifted: bool = False,
) -> list[Completion]:
    """Block decoding in which every prompt row of the context has seen the whole prompt.

    As published the blocks start where the prompt ends; on the grid (``config.starts_at_prompt`` is
    false) at multiples of the block size, so that a prompt tail is refined with its block. With
    ``is_shifted`` the row of a position predicts the next one.
    """
    size = config.block_size

    @torch.no_grad()
    def step(running: list[Request]) -> None:
        max_prompt = max(len(request.prompt) for request in running)
        num_rows = max(request.computed_length() for request in running)
        # Sequence rows start with the first block that is decoded, so few of them are real.
        length = max(max_prompt, num_rows)
        batch = torch.full((len(running), length), config.mask_token_id, dtype=torch.int64)
        for row, request in enumerate(running):
            known = request.tokens[:length]
            batch[row, : len(known)] = torch.tensor(known)
        prompt_len = torch.tensor([len(request.prompt) for request in running], device=device)
        is_first = torch.tensor([request.nfe == 0 for request in running], device=device)
        start = first_block_start(prompt_len, size, not config.starts_at_prompt)
        tokens, positions, visible = prefix_full_rows(
            batch.to(device), prompt_len, start, size, max_prompt, is_first
        )
        num_logits = length + max_prompt if is_shifted else length
        logits = model(tokens, positions, additive_mask(visible), num_logit_rows=num_logits)
        if is_shifted:
            before_first = logits[torch.arange(len(running), device=device), length + start - 1]
            logits = torch.cat([before_first[:, None], logits[:, : length - 1]], dim=1)
        ids, confidence = choose(logits, config.mask_token_id, num_candidates)
        id_rows, confidence_rows = ids.tolist(), confidence.tolist()
        for request, id_row, confidence_row in zip(running, id_rows, confidence_rows, strict=True):
            before = request.block_start(request.first_block)
            request.finish_step([0] * before + id_row, [0.0] * before + confidence_row)

    return run_requests([Request(config, list(p)) for p in prompts], step, max_batch)


# -- edit ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EditingConfig(DecodingConfig):
    """Thresholds of the strategies that may rewrite tokens."""

    edit_threshold: float = 0.5
    token_stability_threshold: float = 0.0
    max_post_edit_steps: int = 16


@dataclass
class BlockRecord:
    """What the editing samplers remember of one block."""

    open_steps: int = 0  # steps with an open gate
    post_edit_steps: int = 0  # steps that started without a mask
    same_token_ratio: float = 1.0
    commit_ready: bool = False


@dataclass
class EditingRequest(Request):
    """Life cycle of a request whose tokens are final only when their block is committed.

    A block that its last step did not change has run on its final tokens: where the inputs are the
    tokens (``runs_on_tokens``), nothing is left to be stored. It keeps its place while other blocks
    are refined, because the blocks opened later must not depend on it.
    """

    runs_on_tokens: ClassVar[bool] = True
    config: EditingConfig
    records: dict[int, BlockRecord] = field(default_factory=dict)

    def editable(self, block: int) -> range:
        """Positions of the block that may be written."""
        return range(max(self.block_start(block), len(self.prompt)), self.block_start(block + 1))

    def may_open_next(self, block: int) -> bool:
        """Progress and stability of the last block in flight allow another one."""
        ratio = self.records[block].same_token_ratio if block in self.records else 1.0
        is_stable = ratio >= self.config.token_stability_threshold
        return super().may_open_next(block) and is_stable

    def write_block(
        self, block: int, proposed: Sequence[int], confidence: Sequence[float]
    ) -> dict[int, int]:
        """Writes of one step to one block; updates its record. Reads the tokens before the step."""
        raise NotImplementedError

    def finish_step(self, proposed: Sequence[int], confidence: Sequence[float]) -> None:
        """Write to every active block at once, then move the blocks on."""
        self.nfe += 1
        writes: dict[int, int] = {}
        for block in self.active_blocks():
            record = self.records.setdefault(block, BlockRecord())
            record.open_steps += self.is_forced(block)
            old = [i for i in self.editable(block) if self.tokens[i] != self.config.mask_token_id]
            same = sum(proposed[i] == self.tokens[i] for i in old)
            record.same_token_ratio = same / len(old) if old else 1.0
            writes |= self.write_block(block, proposed, confidence)
        changed = {i for i, token in writes.items() if token != self.tokens[i]}
        final = [status is not BlockStatus.ACTIVE for status in self.statuses]
        for index, token in writes.items():
            self.tokens[index] = token
        for block, status in enumerate(self.statuses):
            if status is BlockStatus.TO_CACHE:
                self.statuses[block] = BlockStatus.IN_CACHE
            elif status is BlockStatus.ACTIVE and self.records[block].commit_ready:
                before = self.statuses[block - 1] if block else BlockStatus.IN_CACHE
                if before in (BlockStatus.TO_CACHE, BlockStatus.IN_CACHE):
                    self.statuses[block] = BlockStatus.TO_CACHE
                    is_next = block == 0 or final[block - 1]
                    final[block] = is_next and changed.isdisjoint(self.editable(block))
        if self.runs_on_tokens and BlockStatus.ACTIVE not in self.statuses and all(final):
            frozen = (BlockStatus.TO_CACHE, BlockStatus.IN_CACHE)
            self.statuses = [BlockStatus.IN_CACHE if s in frozen else s for s in self.statuses]

    def settled_end(self) -> int:
        """Only committed blocks are final."""
        stored = (BlockStatus.TO_CACHE, BlockStatus.IN_CACHE)
        for block in range(self.first_block, len(self.statuses)):
            if self.statuses[block] not in stored:
                return min(self.limit, max(self.block_start(block), len(self.prompt)))
        return self.limit


@dataclass
class EditRequest(EditingRequest):
    """Mask-to-token by threshold and token-to-token where another token is confident enough."""

    def write_block(
        self, block: int, proposed: Sequence[int], confidence: Sequence[float]
    ) -> dict[int, int]:
        config, record = self.config, self.records[block]
        opened = self.open_positions(block)
        record.post_edit_steps += not opened
        edited = [
            i
            for i in self.editable(block)
            if self.tokens[i] not in (config.mask_token_id, proposed[i])
            and confidence[i] > config.edit_threshold
        ]
        accepted = self.accepted(block, confidence) + edited
        limit = config.max_post_edit_steps
        timed_out = record.open_steps >= config.block_size + limit
        if timed_out:
            accepted = opened + edited
        is_full = timed_out or all(i in accepted for i in opened)
        is_done = not accepted or timed_out or limit == 0
        is_done |= not opened and record.post_edit_steps >= limit
        record.commit_ready = is_full and is_done
        return {i: proposed[i] for i in accepted}


# -- dmax ------------------------------------------------------------------------------------------


@dataclass
class DMaxRequest(EditingRequest):
    """Leftmost-prefix filling, full refresh, and soft inputs: position -> (token, probability)."""

    runs_on_tokens: ClassVar[bool] = False
    descriptors: dict[int, tuple[int, float]] = field(default_factory=dict)

    def write_block(
        self, block: int, proposed: Sequence[int], confidence: Sequence[float]
    ) -> dict[int, int]:
        config, record = self.config, self.records[block]
        opened = self.open_positions(block)
        accepted: list[int] = []
        for i in opened:
            if confidence[i] < config.accept_threshold:
                break
            accepted.append(i)
        if opened and not accepted and self.is_forced(block):
            accepted = opened[:1]
        timed_out = record.open_steps >= config.block_size
        if timed_out:
            accepted = opened
        positions = self.editable(block)
        filled = [i for i in positions if self.tokens[i] != config.mask_token_id]
        writes = {i: proposed[i] for i in accepted + filled}
        is_changed = bool(accepted) or any(self.tokens[i] != proposed[i] for i in filled)
        is_confident = all(confidence[i] >= ALL_CONFIDENT for i in positions)
        is_full = len(accepted) == len(opened)
        record.commit_ready = is_full and (is_confident or not is_changed or timed_out)
        for i in positions:
            self.descriptors.pop(i, None)
            if i in writes:
                self.descriptors[i] = (proposed[i], confidence[i])
        return writes

    def finish_step(self, proposed: Sequence[int], confidence: Sequence[float]) -> None:
        """As the base class; a block that leaves ACTIVE is stored from its hard tokens."""
        super().finish_step(proposed, confidence)
        for block, status in enumerate(self.statuses):
            if status in (BlockStatus.TO_CACHE, BlockStatus.IN_CACHE):
                for i in self.editable(block):
                    self.descriptors.pop(i, None)


def merge_embeddings(
    embeddings: Tensor, hard: Tensor, ids: Tensor, probabilities: Tensor, mask_token_id: int
) -> Tensor:
    """Norm-preserving mixture of token and mask embedding where ``ids`` >= 0, else ``hard``.

    embeddings: [vocabulary, hidden]; hard: [..., hidden]; ids, probabilities: [...].
    """
    token = F.embedding(ids.clamp(min=0), embeddings).float()
    mask = embeddings[mask_token_id].float()
    p = probabilities[..., None].float()
    residual = (1.0 - p).clamp(min=0.0)
    mixed = p * token + residual * mask
    goal = p * token.norm(dim=-1, keepdim=True) + residual * mask.norm()
    mixed = mixed * goal / (mixed.norm(dim=-1, keepdim=True) + 1e-6)
    return torch.where(ids[..., None] >= 0, mixed.to(hard.dtype), hard)


def decode_editing(
    model: Transformer,
    prompts: Sequence[list[int]],
    config: EditingConfig,
    request_type: type[EditingRequest],
    *,
    device: torch.device,
    num_candidates: int,
    max_batch: int = 1024,
) -> list[Completion]:
    """Decode with ``EditRequest`` or ``DMaxRequest`` under the block-causal mask."""

    @torch.no_grad()
    def step(running: list[EditingRequest]) -> None:
        length = max(request.computed_length() for request in running)
        batch = torch.full((len(running), length), config.mask_token_id, dtype=torch.int64)
        soft_ids = torch.full((len(running), length), -1, dtype=torch.int64)
        soft_p = torch.zeros(len(running), length)
        for row, request in enumerate(running):
            known = request.tokens[:length]
            batch[row, : len(known)] = torch.tensor(known)
            if isinstance(request, DMaxRequest):
                for i, (token, probability) in request.descriptors.items():
                    soft_ids[row, i], soft_p[row, i] = token, probability
        tokens = batch.to(device)
        hard = model.embed_tokens(tokens)
        embeddings = merge_embeddings(
            model.embed_tokens.weight,
            hard,
            soft_ids.to(device),
            soft_p.to(device),
            config.mask_token_id,
        )
        visible = block_causal_visible(length, config.block_size, device)
        positions = torch.arange(length, device=device)[None]
        logits = model(tokens, positions, additive_mask(visible), embeddings=embeddings)
        ids, confidence = choose(logits, config.mask_token_id, num_candidates)
        id_rows, confidence_rows = ids.tolist(), confidence.tolist()
        for request, id_row, confidence_row in zip(running, id_rows, confidence_rows, strict=True):
            request.finish_step(id_row, confidence_row)

    requests = [request_type(config, list(prompt)) for prompt in prompts]
    return run_requests(requests, step, max_batch)
