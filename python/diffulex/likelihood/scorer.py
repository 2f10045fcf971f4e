# SPDX-License-Identifier: Apache-2.0
"""From tokens to score to the forwards of their estimate."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diffulex.errors import ConfigError, PromptError
from diffulex.families.listing import family_named
from diffulex.likelihood.estimator import Estimate, is_int, sample_masks
from diffulex.likelihood.rows import ScoreBatch, ScoreRows
from diffulex.log import get_logger, warn_once

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from diffulex.config.config import Config
    from diffulex.distributed.executor import Executor

__all__ = ["OneScore", "Scorer", "Scores", "native_grid"]

logger = get_logger(__name__)

#: Forwards of rows that are made into one batch: the last of them may be small.
_GROUPS = 4
#: Requests whose greedy decoding is looked at together.
_FILLED_TOGETHER = 32


class OneScore(NamedTuple):
    """What became of one sequence, told as soon as it is known.

    Attributes:
        place: of the sequence among those that are scored.
        value: as in `Scores`.
        is_greedy: as there; False where it is not looked at.
        forward_passes: so far, of all sequences.
    """

    place: int
    value: float
    is_greedy: bool
    forward_passes: int


class Scores(Sequence[float]):
    """Log-likelihoods in the order of the requests, and what they cost.

    `numpy.asarray` takes it as its float32 array.

    Attributes:
        values: float32 [N].
        is_greedy: whether greedy decoding gives these tokens, per request; None: not looked at.
        forward_passes: calls of the model.
        seconds: spent.
        block_grid: size of the blocks that were estimated one after the other; 0: ranges as a whole.
    """

    def __init__(
        self,
        values: NDArray[np.float32],
        is_greedy: tuple[bool, ...] | None,
        forward_passes: int,
        seconds: float,
        block_grid: int,
    ) -> None:
        self.values, self.is_greedy = values, is_greedy
        self.forward_passes, self.seconds = forward_passes, seconds
        self.block_grid = block_grid

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.values, dtype=dtype, copy=True)

    def __repr__(self) -> str:
        return f"Scores({self.values.tolist()}, forward_passes={self.forward_passes})"


@dataclass(slots=True)
class _Request:
    """Tokens of which those in [begin, end) are scored; `key` is that of its draws."""

    place: int
    key: int
    token_ids: tuple[int, ...]
    begin: int
    end: int


@dataclass(slots=True)
class _Pending:
    """Rows that wait for a batch, and what becomes of the answers to their queries.

    Equal rows, and clean rows of which one begins with the other, are there once for all requests.
    """

    rows: list[ScoreRows] = field(default_factory=list)
    #: Place of the request and factor of each query, per entry of `rows`.
    terms: list[list[tuple[int, float]]] = field(default_factory=list)
    num_tokens: int = 0
    num_stored: int = 0
    _queries: list[list[tuple[int, int]]] = field(default_factory=list)
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _clean: int = -1

    def add(self, rows: ScoreRows, terms: Sequence[tuple[int, float]]) -> None:
        """Appends rows with one term per query, or their queries to equal rows."""
        unprompted = None if rows.unprompted is None else tuple(rows.unprompted)
        key = (tuple(rows.token_ids), rows.start, rows.prefix, unprompted)
        place = self._known.setdefault(key, len(self.rows))
        if place == len(self.rows):
            self._append(rows, (2 if unprompted else 1) * len(rows.token_ids))
        self._queries[place] += rows.queries
        self.terms[place] += terms

    def add_clean(
        self,
        token_ids: tuple[int, ...],
        queries: Sequence[tuple[int, int]],
        terms: Sequence[tuple[int, float]],
    ) -> int:
        """Place of stored rows that begin with `token_ids`; new ones follow earlier rows if they can."""
        place = self._clean
        known = self.rows[place].token_ids if place >= 0 else ()
        shared = min(len(known), len(token_ids))
        if shared == 0 or known[:shared] != token_ids[:shared]:
            self._clean = place = len(self.rows)
            self._append(ScoreRows(token_ids, is_stored=True), len(token_ids))
            self.num_stored += len(token_ids)
        elif shared < len(token_ids):
            self.rows[place] = self.rows[place]._replace(token_ids=token_ids)
            self.num_tokens += len(token_ids) - shared
            self.num_stored += len(token_ids) - shared
        self._queries[place] += queries
        self.terms[place] += terms
        return place

    def _append(self, rows: ScoreRows, num_tokens: int) -> None:
        self.rows.append(rows)
        self._queries.append([])
        self.terms.append([])
        self.num_tokens += num_tokens

    def batch(self, block_grid: int, guidance: float) -> ScoreBatch:
        """Everything that was added."""
        rows = [
            rows._replace(queries=queries)
            for rows, queries in zip(self.rows, self._queries, strict=True)
        ]
        return ScoreBatch(rows, block_grid, guidance)


def native_grid(config: Config) -> int:
    """Block size of the attention the model was trained with; 0: it attends to everything.

    Where neither the checkpoint nor its family says it, it is that of the engine.

    Raises:
        ConfigError: it denoises a canvas of tokens, whose likelihood has no estimate of this form.
    """
    if config.decoding.traits.has_canvas:
        raise ConfigError(
            "score: expected a model that fills masks, got one that denoises a canvas"
            f" ({config.model.spec.family}), for which there is no such estimate"
        )
    family = family_named(config.model.spec.family)
    if family is not None and family.is_bidirectional:
        return 0
    block_size = config.model.spec.block_size
    if block_size is None:
        block_size = config.att_block_size
        warn_once(
            logger, "block grid",
            "score: the checkpoint does not say its block size; blocks of %d, as the engine decodes",
            block_size,
        )  # fmt: skip
    return block_size


def _bounds(place: int, span: Sequence[int]) -> tuple[int, int]:
    is_pair = isinstance(span, (tuple, list, np.ndarray)) and len(span) == 2
    if not is_pair or not all(isinstance(bound, (int, np.integer)) for bound in span):
        raise PromptError(
            f"score: sequence {place}: expected a range of two integers, got {span!r}"
        )
    return int(span[0]), int(span[1])


class Scorer:
    """Estimates log-likelihoods over the forwards of an executor.

    Args:
        config: of the engine.
        executor: runs the forwards.
        block_grid: block size of a block-causal estimate, 0 for one over the whole range, None for
            what the model was trained with.
        estimate: number of samples and seed.

    Raises:
        ConfigError: the model has no estimate of this form.
        ValueError: the grid is none, or does not go with guidance.
    """

    def __init__(
        self, config: Config, executor: Executor, block_grid: int | None, estimate: Estimate
    ) -> None:
        native = native_grid(config)
        grid = native if block_grid is None else block_grid
        if not isinstance(grid, int) or isinstance(grid, bool) or grid < 0:
            raise ValueError(f"score: expected block_grid of at least 0 or None, got {grid!r}")
        if grid > 0 and estimate.guidance > 0:
            raise ValueError(
                f"score: expected guidance 0 with a block grid, got {estimate.guidance!r}"
            )
        self._config, self._executor = config, executor
        self._grid, self._estimate = grid, estimate
        self._shift = int(config.model.spec.shift)
        self._mask = config.model.mask_token_id
        self._most = config.scheduler.max_num_batched_tokens
        self._num_forwards = 0
        self._is_greedy: dict[int, bool] = {}

    def run(
        self,
        token_ids: Sequence[Sequence[int]],
        target_ranges: Sequence[tuple[int, int]],
        *,
        request_ids: Sequence[int] | None = None,
        on_progress: Callable[[int], None] | None = None,
        on_scored: Callable[[OneScore], None] | None = None,
    ) -> Scores:
        """Log-likelihoods of ``token_ids[i][begin:end]`` given the tokens around them.

        Raises:
            PromptError: tokens or a range that cannot be scored; then none was.
            ValueError: an id of a request is none.
        """
        start = time.perf_counter()
        requests = self._requests(token_ids, target_ranges, request_ids)
        values = np.zeros(len(requests))
        num_done = 0
        for done in self._scored(requests, values):
            num_done += len(done)
            if on_scored is not None:
                for request in done:
                    place, value = request.place, float(np.float32(values[request.place]))
                    is_same = self._is_greedy.get(place, False)
                    on_scored(OneScore(place, value, is_same, self._num_forwards))
            if on_progress is not None:
                on_progress(num_done)
        is_greedy = None
        if self._estimate.check_greedy:
            is_greedy = tuple(self._is_greedy[place] for place in range(len(requests)))
        seconds = time.perf_counter() - start
        values_f32 = values.astype(np.float32)
        return Scores(values_f32, is_greedy, self._num_forwards, seconds, self._grid)

    def _scored(
        self, requests: Sequence[_Request], values: NDArray[np.float64]
    ) -> Iterator[Sequence[_Request]]:
        """Requests that are done, some at a time.

        Those with the same context stand beside each other, and contexts of the same length do: they
        share rows, and forwards of sequences of one length.
        """
        ordered = sorted(
            requests, key=lambda r: (r.begin, r.token_ids[: r.begin], len(r.token_ids))
        )
        pending, waiting = _Pending(), []
        for count, request in enumerate(ordered, 1):
            self._add(request, pending)
            waiting.append(request)
            is_last = count == len(ordered)
            is_full = pending.num_stored >= self._most
            if not (is_full or is_last or pending.num_tokens >= _GROUPS * self._most):
                continue
            self._flush(pending, values)
            pending = _Pending()
            if self._estimate.check_greedy:
                if len(waiting) < _FILLED_TOGETHER and not is_last:
                    continue
                self._compare_greedy(waiting)
            yield waiting
            waiting = []

    def _requests(
        self,
        token_ids: Sequence[Sequence[int]],
        target_ranges: Sequence[tuple[int, int]],
        request_ids: Sequence[int] | None,
    ) -> list[_Request]:
        if len(token_ids) != len(target_ranges):
            raise PromptError(
                f"score: expected one range per sequence, got {len(token_ids)} sequences and"
                f" {len(target_ranges)} ranges"
            )
        keys = range(len(token_ids)) if request_ids is None else request_ids
        if len(keys) != len(token_ids):
            raise ValueError(
                f"score: expected one of request_ids per sequence, got {len(token_ids)} sequences and"
                f" {len(keys)} ids"
            )
        for key in keys:
            if not is_int(key) or not 0 <= key < 2**63:
                raise ValueError(f"score: expected request_ids in [0, 2**63), got {key!r}")
        return [
            self._request(place, int(keys[place]), tuple(ids), *_bounds(place, span))
            for place, (ids, span) in enumerate(zip(token_ids, target_ranges, strict=True))
        ]

    def _request(
        self, place: int, key: int, ids: tuple[int, ...], begin: int, end: int
    ) -> _Request:
        where = f"score: sequence {place}"
        most, vocab_size = self._config.scheduler.max_model_len, self._config.model.spec.vocab_size
        if not 1 <= len(ids) <= most:
            raise PromptError(f"{where}: expected 1 to {most} tokens, got {len(ids)}")
        for token in ids:
            if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
                raise PromptError(f"{where}: expected ids in [0, {vocab_size}), got {token!r}")
        if self._estimate.guidance > 0 and 2 * len(ids) > self._most:
            raise PromptError(
                f"{where}: expected at most {self._most // 2} tokens with guidance (half of"
                f" max_num_batched_tokens), got {len(ids)}"
            )
        if not 0 <= begin <= end <= len(ids):
            raise PromptError(f"{where}: expected a range in [0, {len(ids)}], got [{begin}, {end})")
        if self._shift and begin == 0 and end > 0:
            raise PromptError(
                f"{where}: expected a token before the range (logits predict the next position),"
                " got none"
            )
        if self._mask in ids[begin:end]:
            raise PromptError(f"{where}: expected no mask id {self._mask} in its range, got one")
        return _Request(place, key, tuple(int(token) for token in ids), begin, end)

    # The estimate.

    def _add(self, request: _Request, pending: _Pending) -> None:
        if request.begin == request.end:
            return
        if self._grid == 0:
            self._add_samples(request, pending, request.begin, request.end)
        else:
            self._add_blocks(request, pending)

    def _add_samples(self, request: _Request, pending: _Pending, begin: int, end: int) -> None:
        """Samples of a range within the whole sequence."""
        for mask, factor in sample_masks(end - begin, self._estimate, request.key):
            masked = (np.flatnonzero(mask) + begin).tolist()
            rows = self._masked_rows(request, masked, 0, len(request.token_ids))
            pending.add(rows, [(request.place, factor)] * len(masked))

    def _blocks(self, request: _Request) -> Iterator[tuple[int, int, int]]:
        """(start of a block, range in it) of the blocks of a request."""
        for start in range(request.begin // self._grid * self._grid, request.end, self._grid):
            yield start, max(start, request.begin), min(start + self._grid, request.end)

    def _add_blocks(self, request: _Request, pending: _Pending) -> None:
        """Samples of every block, each behind the clean tokens of those before it."""
        plans = [
            (start, begin, sample_masks(end - begin, self._estimate, request.key, index))
            for index, (start, begin, end) in enumerate(self._blocks(request))
        ]
        last, place = plans[-1][0], -1
        if last > 0:
            queries, terms = self._leading(request, plans)
            place = pending.add_clean(request.token_ids[:last], queries, terms)
        for start, begin, masks in plans:
            end = min(start + self._grid, len(request.token_ids))
            for mask, factor in masks:
                masked = (np.flatnonzero(mask) + begin).tolist()
                rows = self._masked_rows(request, masked, start, end)
                rows = rows._replace(prefix=place if start > 0 else -1)
                pending.add(rows, [(request.place, factor)] * len(rows.queries))

    def _leading(
        self, request: _Request, plans: Sequence[tuple[int, int, Sequence[Any]]]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, float]]]:
        """Queries for first tokens of blocks, which shifted rows of the block before predict."""
        queries, terms = [], []
        if self._shift:
            for start, begin, masks in plans:
                if begin == start:
                    factor = sum(factor for mask, factor in masks if mask[0])
                    queries.append((start - 1, request.token_ids[start]))
                    terms.append((request.place, factor))
        return queries, terms

    def _masked_rows(
        self, request: _Request, masked: Sequence[int], start: int, end: int
    ) -> ScoreRows:
        """Rows of [start, end) with masks, which ask for the masked tokens that they predict."""
        ids = list(request.token_ids[start:end])
        queries = []
        for position in masked:
            ids[position - start] = self._mask
            if position - self._shift >= start:
                queries.append((position - self._shift - start, request.token_ids[position]))
        unprompted = None
        if self._estimate.guidance > 0:
            unprompted = [self._mask] * request.begin + ids[request.begin :]
        return ScoreRows(ids, queries, start, unprompted=unprompted)

    def _flush(self, pending: _Pending, values: NDArray[np.float64]) -> None:
        if not pending.rows:
            return
        scored = self._executor.score(pending.batch(self._grid, self._estimate.guidance))
        self._num_forwards += scored.num_forwards
        terms = itertools.chain.from_iterable(pending.terms)
        for (place, factor), logprob in zip(terms, scored.logprobs.tolist(), strict=True):
            values[place] += factor * logprob

    # Greedy decoding.

    def _compare_greedy(self, requests: Sequence[_Request]) -> None:
        """Whether filling the likeliest position first, block by block, gives the tokens."""
        self._is_greedy |= {request.place: True for request in requests}
        left = {request.place: list(self._regions(request)) for request in requests}
        while True:
            active = [request for request in requests if left[request.place]]
            if not active:
                return
            for first in range(0, len(active), _FILLED_TOGETHER):
                self._fill_one(active[first : first + _FILLED_TOGETHER], left)

    def _regions(self, request: _Request) -> Iterator[tuple[int, list[int]]]:
        """(end of the rows, open positions) of what is filled together, in order."""
        if self._grid > 0:
            for start, begin, end in self._blocks(request):
                most = min(start + self._grid, len(request.token_ids))
                yield most, list(range(begin, end))
        elif request.end > request.begin:
            yield len(request.token_ids), list(range(request.begin, request.end))

    def _fill_one(
        self,
        requests: Sequence[_Request],
        left: dict[int, list[tuple[int, list[int]]]],
    ) -> None:
        """Fills one position of every request; the first wrong token ends its check."""
        regions = [left[request.place][0] for request in requests]
        rows = [
            self._masked_rows(request, masked, 0, end)
            for request, (end, masked) in zip(requests, regions, strict=True)
        ]
        batch = ScoreBatch(rows, self._grid, self._estimate.guidance, wants_best=True)
        scored = self._executor.score(batch)
        self._num_forwards += scored.num_forwards
        first = 0
        for request, (_, masked) in zip(requests, regions, strict=True):
            best = first + int(np.argmax(scored.best_logprobs[first : first + len(masked)]))
            position = masked[best - first]
            first += len(masked)
            masked.remove(position)
            if int(scored.best_ids[best]) != request.token_ids[position]:
                self._is_greedy[request.place] = False
                left[request.place] = []
            elif not masked:
                left[request.place].pop(0)
