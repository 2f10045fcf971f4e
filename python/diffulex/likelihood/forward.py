# SPDX-License-Identifier: Apache-2.0
"""Forwards over given tokens with a cache that lasts for one batch of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from diffulex.likelihood.rows import Scored
from diffulex.nn.attention_metadata import AttnMetadata
from diffulex.ops.attention import MaskKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.likelihood.rows import ScoreBatch, ScoreRows
    from diffulex.nn.kv_cache import KVCache

__all__ = ["RowRunner", "ScoreForward"]

#: Of float32 logits at a time; with guidance both of their kinds together.
_LOGITS_BYTES = 256 << 20


class RowRunner(NamedTuple):
    """What a worker has for rows that belong to no step.

    Attributes:
        max_logits_rows: most rows of a product with the head.
        new_cache: (pages) to a cache beside that of the steps.
        workspace: (sequences, most rows, longest context) to scratch of attention.
        hidden: (tokens [T], positions [T], metadata, cache) to hidden states [T, H].
        logits: (hidden states [n, H]) to logits [n, V].
    """

    max_logits_rows: int
    new_cache: Callable[[int], KVCache]
    workspace: Callable[[int, int, int], Tensor | None]
    hidden: Callable[[Tensor, Tensor, AttnMetadata, KVCache], Tensor]
    logits: Callable[[Tensor], Tensor]


class _Group(NamedTuple):
    """Rows of one forward, by their places in the batch."""

    places: list[int]
    rows: list[ScoreRows]


class ScoreForward:
    """Runs one batch after the other; nothing is left of a batch but its answers.

    Args:
        config: limits, device.
        runner: calls the model.
    """

    def __init__(self, config: Config, runner: RowRunner) -> None:
        self._config, self._runner = config, runner
        self._device = torch.device(config.model.device)
        self._page_size = config.cache.page_size
        self._forbidden = torch.tensor(config.forbidden_ids, device=self._device)
        self._cache: KVCache | None = None
        self._pages: dict[int, range] = {}

    def run(self, batch: ScoreBatch) -> Scored:
        """The answers to the queries of `batch`."""
        self._pages = self._page_ranges(batch.rows)
        last = max((pages.stop for pages in self._pages.values()), default=0)
        self._cache = self._runner.new_cache(max(last, 1))
        answers: list[tuple[int, Tensor]] = []
        num_forwards = 0
        try:
            for group in self._groups(batch):
                hidden = self._hidden(group, batch)
                num_forwards += 1
                answers += self._answers(group, batch, hidden)
        finally:
            self._cache, self._pages = None, {}
        values = [values for _, values in sorted(answers, key=lambda item: item[0])]
        table = torch.cat(values).cpu().numpy() if values else np.zeros((0, 3), np.float64)
        best = table if batch.wants_best else table[:0]
        return Scored(
            table[:, 0].astype(np.float32),
            best[:, 1].astype(np.int64),
            best[:, 2].astype(np.float32),
            num_forwards,
        )

    def _page_ranges(self, rows: Sequence[ScoreRows]) -> dict[int, range]:
        ranges: dict[int, range] = {}
        begin = 0
        for place, item in enumerate(rows):
            if item.is_stored:
                end = begin + -(-len(item.token_ids) // self._page_size)
                ranges[place], begin = range(begin, end), end
        return ranges

    def _groups(self, batch: ScoreBatch) -> list[_Group]:
        """As many rows per forward as a step may have; what others see is stored before them."""
        most = self._config.scheduler.max_num_batched_tokens
        groups: list[_Group] = []
        for is_stored in (True, False):
            count = most
            for place, item in enumerate(batch.rows):
                if item.is_stored != is_stored:
                    continue
                size = len(item.token_ids) * (1 if item.unprompted is None else 2)
                if count + size > most:
                    groups.append(_Group([], []))
                    count = 0
                groups[-1].places.append(place)
                groups[-1].rows.append(item)
                count += size
        return groups

    def _hidden(self, group: _Group, batch: ScoreBatch) -> Tensor:
        """Hidden states [T, H] of the rows of a group; those of unprompted rows come last."""
        runs = [(place, item, item.token_ids) for place, item in zip(*group, strict=True)]
        runs += [
            (place, item, item.unprompted)
            for place, item in zip(*group, strict=True)
            if item.unprompted is not None
        ]
        ids: list[int] = []
        positions: list[int] = []
        slots, tables, contexts, ends = [], [], [], [0]
        for place, item, token_ids in runs:
            span = range(item.start, item.start + len(token_ids))
            pages = self._pages.get(place if item.is_stored else item.prefix, range(0))
            ids += token_ids
            positions += span
            slots += [self._slot(pages, p) if item.is_stored else -1 for p in span]
            tables.append(pages)
            contexts.append(item.start)
            ends.append(ends[-1] + len(token_ids))
        width = max(1, *map(len, tables))
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        kind = MaskKind.BLOCK_CAUSAL if batch.block_grid else MaskKind.FULL
        cache = self._cache
        assert cache is not None
        metadata = AttnMetadata(
            page_tables=self._int32([[*t, *[-1] * (width - len(t))] for t in tables]),
            cu_seqlens_q=self._int32(ends),
            context_lens=self._int32(contexts),
            valid_slices=self._int32(ends[1:]),
            mask_kinds=self._int32([int(kind)] * len(runs)),
            prefix_lens=None,
            padded_prefix_lens=None,
            q_starts=None,
            slot_mapping=self._int32(slots),
            block_size=batch.block_grid or self._config.att_block_size,
            page_size=self._page_size,
            max_seqlen_q=max(lengths),
            max_context_len=max(contexts),
            num_splits=0,
            kv_layout=cache.kv_layout,
            workspace=self._runner.workspace(len(runs), max(lengths), max(contexts)),
        )
        where = torch.tensor(positions, dtype=torch.int64, device=self._device)
        tokens = torch.tensor(ids, dtype=torch.int64, device=self._device)
        return self._runner.hidden(tokens, where, metadata, cache)

    def _slot(self, pages: range, position: int) -> int:
        return pages[position // self._page_size] * self._page_size + position % self._page_size

    def _int32(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def _answers(
        self, group: _Group, batch: ScoreBatch, hidden: Tensor
    ) -> list[tuple[int, Tensor]]:
        """(place, float64 [queries, 3]: log-probability, likeliest token and its own) per sequence."""
        rows: list[int] = []
        tokens: list[int] = []
        begin = 0
        for item in group.rows:
            rows += [begin + row for row, _ in item.queries]
            tokens += [token for _, token in item.queries]
            begin += len(item.token_ids)
        if not rows:
            return []
        twin = begin if batch.guidance > 0 else None
        parts = []
        width = self._config.model.spec.vocab_size * 4 * (1 if twin is None else 2)
        most = max(1, min(self._runner.max_logits_rows, _LOGITS_BYTES // width))
        for first in range(0, len(rows), most):
            part = torch.tensor(rows[first : first + most], device=self._device)
            asked = torch.tensor(tokens[first : first + most], device=self._device)
            logits = self._logits(hidden, part)
            if twin is not None:
                without = self._logits(hidden, part + twin)
                logits = without + (1 + batch.guidance) * (logits - without)
            parts.append(self._answer(logits, asked, wants_best=batch.wants_best))
        table = torch.cat(parts)
        counts = [len(item.queries) for item in group.rows]
        return list(zip(group.places, torch.split(table, counts), strict=True))

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        logits = self._runner.logits(hidden.index_select(0, rows)).float()
        softcap = self._config.model.spec.final_logit_softcap
        return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits

    def _answer(self, logits: Tensor, tokens: Tensor, *, wants_best: bool) -> Tensor:
        """float64 [n, 3] of float32 logits [n, V], which are overwritten; without `wants_best` the last
        two are 0.

        The likeliest token is one that a sampler may choose.
        """
        total = logits.logsumexp(-1)
        table = logits.new_zeros(logits.size(0), 3, dtype=torch.float64)
        table[:, 0] = logits.gather(1, tokens[:, None])[:, 0] - total
        if wants_best:
            logits[:, self._forbidden] = -torch.inf
            logits[:, self._config.model.tokenizer_vocab_size :] = -torch.inf
            if self._config.sampler.mask_suppression == "renormalize":
                total = logits.logsumexp(-1)
            values, ids = logits.max(-1)
            table[:, 1], table[:, 2] = ids, values - total
        return table
