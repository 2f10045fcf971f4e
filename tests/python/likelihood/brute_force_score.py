# SPDX-License-Identifier: Apache-2.0
"""Likelihoods by the rules alone: one whole forward of an oracle per sample, nothing cached or shared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from fixtures.decoder_oracle import block_mask, full_mask

#: Tokens and which keys each row sees -> logits [n, V].
Logits = Callable[[list[int], torch.Tensor], torch.Tensor]


class BruteForce:
    """Scores one range of one sequence.

    Args:
        logits: of an oracle.
        mask_id: stands for what is not known.
        grid: block size; 0: everything sees everything.
        shift: 1 where the row of a position predicts the next one.
        guidance: scale of unsupervised guidance.
        forbidden: ids beside `mask_id` that decoding never chooses.
        is_renormalized: those are not in the normaliser of confidences.
    """

    def __init__(
        self,
        logits: Logits,
        mask_id: int,
        grid: int,
        shift: int,
        guidance: float = 0.0,
        forbidden: Sequence[int] = (),
        is_renormalized: bool = False,
    ) -> None:
        self._forbidden, self._is_renormalized = [mask_id, *forbidden], is_renormalized
        self._logits, self._mask_id = logits, mask_id
        self._grid, self._shift, self._guidance = grid, shift, guidance

    def rows(self, tokens: list[int], prompt_len: int) -> torch.Tensor:
        """Log-probabilities [n, V] of a sequence as it is seen."""
        sees = block_mask(len(tokens), self._grid) if self._grid else full_mask(len(tokens))
        logits = self._logits(tokens, sees).double()
        if self._guidance > 0:
            bare = [self._mask_id] * prompt_len + tokens[prompt_len:]
            without = self._logits(bare, sees).double()
            logits = without + (1 + self._guidance) * (logits - without)
        return torch.log_softmax(logits, -1)

    def masked_sum(
        self, tokens: Sequence[int], begin: int, masked: Sequence[int], end: int
    ) -> float:
        """Sum of log p(token) over masked positions, nothing at or after `end` being there."""
        seen = [self._mask_id if p in masked else token for p, token in enumerate(tokens[:end])]
        rows = self.rows(seen, begin)
        return math.fsum(float(rows[p - self._shift, tokens[p]]) for p in masked)

    def regions(self, length: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(range whose tokens are masked together, end of what is seen)."""
        if self._grid == 0:
            yield begin, end, length
            return
        for start in range(begin // self._grid * self._grid, end, self._grid):
            stop = start + self._grid
            yield max(start, begin), min(stop, end), min(stop, length)

    def exhaustive(self, tokens: Sequence[int], begin: int, end: int) -> float:
        """The mean over every number of masks and every choice of them."""
        total = 0.0
        for first, last, seen in self.regions(len(tokens), begin, end):
            count = last - first
            for k in range(1, count + 1):
                choices = list(itertools.combinations(range(first, last), k))
                sums = [self.masked_sum(tokens, begin, choice, seen) for choice in choices]
                total += count / k * math.fsum(sums) / len(sums) / count
        return total

    def sampled(
        self, tokens: Sequence[int], begin: int, end: int, *, mc_num: int, batch: int, seed: int,
        place: int,
    ) -> float:  # fmt: skip
        """The mean over samples, each with its own draws and its own forward."""
        total = 0.0
        regions = self.regions(len(tokens), begin, end)
        for block, (first, last, seen) in enumerate(regions):
            length = last - first
            if length == 1:
                total += self.masked_sum(tokens, begin, [first], seen)
                continue
            values = []
            for sample in range(mc_num):
                generator = np.random.Generator(
                    np.random.Philox(key=seed, counter=[0, block, sample, place])
                )
                j = sample % batch
                if j == 0:
                    k0 = int(generator.integers(1, length + 1))
                    size = min(batch, mc_num - sample)
                k = (math.floor(k0 + j * length / size + 0.5) - 1) % length + 1
                chosen = sorted(first + int(p) for p in generator.permutation(length)[:k])
                values.append(length / k * self.masked_sum(tokens, begin, chosen, seen))
            total += math.fsum(values) / mc_num
        return total

    def is_greedy(self, tokens: Sequence[int], begin: int, end: int) -> bool:
        """Whether filling the most confident position with its argmax gives the tokens."""
        current = [*tokens[:begin], *[self._mask_id] * (end - begin), *tokens[end:]]
        return self._filled(current, begin, end) == list(tokens)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What `is_greedy` compares with, after a prompt."""
        tokens = [*prompt, *[self._mask_id] * count]
        return self._filled(tokens, len(prompt), len(tokens))

    def _filled(self, tokens: list[int], begin: int, end: int) -> list[int]:
        for first, last, seen in self.regions(len(tokens), begin, end):
            left = list(range(first, last))
            while left:
                rows = self.rows(tokens[:seen], begin)
                rows[:, self._forbidden] = -torch.inf
                if self._is_renormalized:
                    rows = torch.log_softmax(rows, -1)
                best = {p: rows[p - self._shift].max(0) for p in left}
                position = max(left, key=lambda p: float(best[p].values))
                tokens[position] = int(best[position].indices)
                left.remove(position)
        return tokens
