# SPDX-License-Identifier: Apache-2.0
"""Samplers that rewrite tokens of open blocks: edit (LLaDA2.1) and dmax."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from brute_force.block_run import ACTIVE, IN_CACHE, TO_CACHE, Block, BlockRun
from brute_force.proposals import Proposal
from brute_force.rules import acceptance_margin, accepted_positions
from brute_force.settings import PROBABILITY_ERROR


class EditingRun(BlockRun):
    """Tokens settle when their block is frozen."""

    def is_settled(self, position: int) -> bool:
        block = self.blocks[position // self.settings.block_size]
        return position < self.prompt_len or block.status in (TO_CACHE, IN_CACHE)

    def editable(self, block: Block) -> list[int]:
        """Positions of a block the sampler looks at, relative."""
        return list(range(block.editable_start, self.settings.block_size))

    def note_ratio(self, block: Block, proposals: dict[int, Proposal], masks: list[int]) -> None:
        """How much of what stood before is proposed again."""
        known = [r for r in proposals if r not in masks]
        same = sum(proposals[r].token == self.tokens[block.start + r] for r in known)
        block.same_token_ratio = same / len(known) if known else 1.0


class EditRun(EditingRun):
    """Mask to token above one threshold, token to token above another."""

    makes_final_kv = True

    def sample(self, block: Block, rows: np.ndarray) -> dict[int, int]:
        settings, tokens = self.settings, self.tokens
        is_open = self.is_gate_open(block)
        masks = self.masks(block)
        proposals = self.proposals(block, self.editable(block), self._penalised(block, rows))
        block.steps += 1
        block.open_steps += is_open
        block.post_edit_steps += not masks
        open_steps = block.steps if settings.is_always_open else block.open_steps
        accept, edit = self.threshold("accept"), np.float32(self.threshold("edit"))
        opened = {r: proposals[r] for r in masks}
        rule = dataclasses.replace(settings, rule="threshold")
        filled = accepted_positions(opened, rule, accept, is_open, 0)
        edits = {
            r
            for r, p in proposals.items()
            if r not in masks and p.token != tokens[block.start + r] and p.probability > edit
        }
        self.note_margins([p.margin for p in proposals.values()])
        self.note_margins([acceptance_margin(opened, rule, accept, is_open)])
        self.note_margins(
            [
                abs(float(p.probability) - float(edit)) / PROBABILITY_ERROR
                for r, p in proposals.items()
                if r not in masks and p.token != tokens[block.start + r]
            ]
        )
        self.note_ratio(block, proposals, masks)
        most = settings.max_post_edit_steps
        is_timed_out = open_steps >= settings.block_size + most
        if is_timed_out:
            chosen = set(masks) | edits
        elif not masks and block.post_edit_steps > most:
            chosen = set()
        else:
            chosen = filled | edits
        is_full = set(masks) <= chosen
        is_settled = not masks and block.post_edit_steps >= most
        is_done = not (filled | edits) or is_timed_out or most == 0 or is_settled
        block.is_committable = is_full and is_done
        return {block.start + r: proposals[r].token for r in chosen}

    def _penalised(self, block: Block, rows: np.ndarray) -> np.ndarray:
        if self.settings.penalty == 0:
            return rows
        rows = rows.copy()
        for r in range(1, self.settings.block_size):
            before = self.tokens.get(block.start + r - 1)
            # A mask id inside the prompt counts as the mask it looks like.
            if before is not None and before != self.settings.mask_id:
                rows[block.start + r, before] -= np.float32(self.settings.penalty)
        return rows


class DmaxRun(EditingRun):
    """Fills from the left, refreshes everything else, and mixes the embeddings it feeds back."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.descriptors: dict[int, tuple[list[int], list[float], float]] = {}
        self.makes_final_kv = self.settings.merge_weight == 0  # else the inputs are mixtures

    def sample(self, block: Block, rows: np.ndarray) -> dict[int, int]:
        settings = self.settings
        is_open = self.is_gate_open(block)
        masks, act = self.masks(block), self.editable(block)
        proposals = self.proposals(block, act, rows)
        block.steps += 1
        block.open_steps += is_open
        open_steps = block.steps if settings.is_always_open else block.open_steps
        threshold = self.threshold("accept")
        rule = dataclasses.replace(settings, rule="leftmost_prefix")
        opened = {r: proposals[r] for r in masks}
        chosen = accepted_positions(opened, rule, threshold, is_open, 0) | (set(act) - set(masks))
        is_last = open_steps >= settings.block_size
        if is_last:
            chosen |= set(masks)
        before = {r: self.tokens.get(block.start + r) for r in act}
        self.note_ratio(block, proposals, masks)
        changed = any(proposals[r].token != before[r] for r in chosen)
        sure = {r: proposals[r].argmax_probability for r in act}
        if settings.has_fast_path:
            sure.update({r: 1.0 for r in act if r not in masks})
        block.is_committable = set(masks) <= chosen and (
            is_last or not changed or all(np.float32(q) >= np.float32(0.9) for q in sure.values())
        )
        self.note_margins([p.margin for p in proposals.values()])
        self.note_margins(
            [abs(float(p.probability) - threshold) / PROBABILITY_ERROR for p in opened.values()]
        )
        self.note_margins([abs(q - 0.9) / PROBABILITY_ERROR for q in sure.values()])
        for r in act:
            self.descriptors.pop(block.start + r, None)
            if r in chosen:
                p = proposals[r]
                ids, probabilities = p.top_ids, p.top_probabilities
                residual = max(0.0, 1.0 - sum(probabilities))
                if settings.has_fast_path and r not in masks:
                    ids, probabilities, residual = [p.token], [1.0], 0.0
                self.descriptors[block.start + r] = (ids, probabilities, residual)
        return {block.start + r: proposals[r].token for r in chosen}

    def committed(self, block: Block) -> None:
        if not self.settings.stores_soft_embeddings:
            for position in range(block.start, block.start + self.settings.block_size):
                self.descriptors.pop(position, None)

    def embeddings(self) -> dict[int, torch.Tensor]:
        if self.settings.merge_weight == 0:
            return {}
        visible = {
            block.start // self.settings.block_size
            for block in self.blocks
            if block.status in (ACTIVE, TO_CACHE, IN_CACHE)
        }
        return {
            position: self._mixed(position)
            for position in self.descriptors
            if position // self.settings.block_size in visible
        }

    def _mixed(self, position: int) -> torch.Tensor:
        settings, table = self.settings, self.network.embedding
        ids, probabilities, residual = self.descriptors[position]
        parts = [p * table[i] for i, p in zip(ids, probabilities, strict=True)]
        if settings.merge_mode == "iter_smooth_topk":
            token = table[self.tokens[position]]
            return token + settings.merge_weight * torch.stack(parts).sum(0)
        mask = table[settings.mask_id]
        mixed = torch.stack([*parts, residual * mask]).sum(0)
        if settings.has_renormalised_merge:
            norms = [p * table[i].norm() for i, p in zip(ids, probabilities, strict=True)]
            target = sum(norms) + residual * mask.norm()
            mixed = mixed * target / (mixed.norm() + 1e-6)
        return mixed
