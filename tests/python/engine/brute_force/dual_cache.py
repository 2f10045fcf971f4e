# SPDX-License-Identifier: Apache-2.0
"""fast_dllm_v2 with two caches kept by hand: committed blocks, and the block being decoded."""

from __future__ import annotations

import numpy as np
import torch

from brute_force.draws import uniform
from brute_force.network import LayerKV, Network, Pass, cut, join
from brute_force.proposals import candidates_of, propose
from brute_force.request_run import RequestRun
from brute_force.rules import acceptance_margin, accepted_positions
from brute_force.settings import LOGIT_ERROR, RequestSettings, Settings


class DualCacheRun(RequestRun):
    """Whole-block, sub-block and commit forwards, each over explicit keys and values."""

    def __init__(
        self, network: Network, settings: Settings, prompt: list[int], request: RequestSettings
    ) -> None:
        super().__init__(settings, prompt, request)
        self.network = network
        self.size = settings.block_size * settings.buffer_size
        self.base = self.prompt_len // self.size * self.size
        self.sub = 0
        self.committed: list[LayerKV] | None = None  # positions [0, base)
        self.block_kv: list[LayerKV] | None = None  # positions [base, base + D)
        self.sampler_steps: dict[int, int] = {}  # start of a sub-block -> steps
        self.is_prefilled = self.base == 0

    def step(self) -> None:
        self.nfe += 1
        before = len(self.tokens)
        if not self.is_prefilled:
            self._prefill()
        else:
            self._decode()
        self.decided.append(len(self.tokens) - before)

    def _prefill(self) -> None:
        prompt = [self.tokens[i] for i in range(self.base)]
        result = self.network.block_causal(prompt, self.size)
        self.committed, self.is_prefilled = result.kv, True
        if self.base == self.prompt_len:
            self._seed(result.logits[-1])

    def _decode(self) -> None:
        count, size = self.settings.buffer_size, self.settings.block_size
        while self.sub < count - 1 and not self._masks(self.sub):
            self.sub += 1
        start = self.base + self.sub * size
        if not any(self._masks(sub) for sub in range(count)):
            result = self._whole_block()
            self.committed = self._context(result.kv)
            self.block_kv = None
            self.base, self.sub = self.base + self.size, 0
            self._seed(result.logits[-1])
        elif self.block_kv is None or start not in self.tokens or not self.settings.has_block_cache:
            result = self._whole_block()
            self.block_kv = result.kv
            self._sample(result.logits, self.base)
        else:
            self._sample(self._sub_block(start), start)

    def _seed(self, row: np.ndarray) -> None:
        """The first token of a block is the best one of the row before it, whatever the request."""
        candidates = candidates_of(len(row), self.settings)
        self.tokens[self.base] = int(candidates[np.argmax(row[candidates])])
        runner_up, best = np.partition(row[candidates], -2)[-2:]
        self.note_margins([float(best - runner_up) / LOGIT_ERROR])

    def _masks(self, sub: int) -> list[int]:
        start = self.base + sub * self.settings.block_size
        return [i for i in range(start, start + self.settings.block_size) if i not in self.tokens]

    def _ids(self, begin: int, end: int) -> list[int]:
        return [self.tokens.get(i, self.settings.mask_id) for i in range(begin, end)]

    def _context(self, kv: list[LayerKV]) -> list[LayerKV]:
        return kv if self.committed is None else join([self.committed, kv])

    def _whole_block(self) -> Pass:
        """All rows of the block over the committed cache; they see each other."""
        mask = torch.ones(self.size, self.base + self.size, dtype=torch.bool)
        ids = self._ids(self.base, self.base + self.size)
        return self.network.run(ids, mask, first=self.base, past=self.committed)

    def _sub_block(self, start: int) -> np.ndarray:
        """The rows of one sub-block; those of the others are what they last were."""
        assert self.block_kv is not None
        size, offset = self.settings.block_size, start - self.base
        others = join([cut(self.block_kv, 0, offset), cut(self.block_kv, offset + size, self.size)])
        past = self._context(others)
        mask = torch.ones(size, self.base + self.size, dtype=torch.bool)
        result = self.network.run(self._ids(start, start + size), mask, first=start, past=past)
        self.block_kv = join(
            [
                cut(self.block_kv, 0, offset),
                result.kv,
                cut(self.block_kv, offset + size, self.size),
            ]
        )
        return result.logits

    def _sample(self, rows: np.ndarray, first: int) -> None:
        """Fills the current sub-block from rows that start at position `first`."""
        start = self.base + self.sub * self.settings.block_size
        steps = self.sampler_steps.get(start, 0)
        # Row 0 of a forward has no row before it and keeps its own logits.
        proposals = {
            i: propose(
                rows[max(i - first - 1, 0)],
                self.settings,
                self.request,
                uniform(self.request.seed, i, steps),
            )
            for i in self._masks(self.sub)
        }
        threshold = self.threshold("accept")
        chosen = accepted_positions(proposals, self.settings, threshold, True, steps)
        self.note_margins([p.margin for p in proposals.values()])
        self.note_margins([acceptance_margin(proposals, self.settings, threshold, True)])
        self.sampler_steps[start] = steps + 1
        self.tokens.update({i: proposals[i].token for i in chosen})
