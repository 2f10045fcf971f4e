# SPDX-License-Identifier: Apache-2.0
"""Likelihood tasks of lm-eval: from texts to tokens to score, and what the scores cost."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.bench.config import EvalConfig
from diffulex.bench.harness import EvaluationError
from diffulex.bench.live import ScoreLive
from diffulex.log import get_logger, warn_once

if TYPE_CHECKING:
    from diffulex.engine.engine import Diffulex
    from diffulex.likelihood.scorer import OneScore, Scores

__all__ = ["LikelihoodCalls", "Pair", "context_pair", "prefix_token", "request_id", "rolling_pairs"]

logger = get_logger(__name__)

_BOUND = "lower bound of the log-likelihood, in expectation"


class Pair(NamedTuple):
    """Token ids of a context and of what is scored after it."""

    context: list[int]
    continuation: list[int]


def prefix_token(tokenizer: Any) -> int:
    """The token that stands before a text without a context.

    Raises:
        EvaluationError: the tokenizer has neither a begin token nor an end token.
    """
    for token_id in (tokenizer.backend.bos_token_id, tokenizer.backend.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise EvaluationError("likelihood: expected a begin or an end token for an empty context")


def context_pair(
    encode: Callable[[str], list[int]],
    encode_plain: Callable[[str], list[int]],
    first: int,
    context: str,
    continuation: str,
) -> Pair:
    """Tokens of a text in its context; spaces at the end of the context go to the text.

    Args:
        encode: of prompts, with begin tokens.
        encode_plain: without them.
        first: stands for an empty context.
        context: before the text.
        continuation: the text to score.
    """
    if not context:
        ids = encode_plain(continuation)
        return Pair([first], ids[1:] if ids[:1] == [first] else ids)
    bare = context.rstrip()
    if not bare:
        return Pair([first], encode_plain(context + continuation))
    known = encode(bare)
    return Pair(known, encode(context + continuation)[len(known) :])


def rolling_pairs(token_ids: Sequence[int], first: int, max_model_len: int) -> list[Pair]:
    """A text in windows of at most `max_model_len` tokens: `first` stands before the first one, the
    token before it before every other one, and what is left of the last one is context."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: PLC0415

    windows = get_rolling_token_windows(list(token_ids), first, max_model_len - 1, 1)
    return [Pair(*make_disjoint_window(window)) for window in windows]


def request_id(token_ids: Sequence[int], begin: int) -> int:
    """63 bits that tokens fix, and from where on they are scored."""
    digest = hashlib.sha256(json.dumps([begin, *token_ids]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class LikelihoodCalls:
    """Scores pairs with an engine, and counts what that costs.

    Args:
        engine: the model.
        settings: number of samples, seed.
    """

    def __init__(self, engine: Diffulex, settings: EvalConfig) -> None:
        self._engine, self._settings = engine, settings
        self._num_requests = self._num_forwards = self._num_cut = 0
        self._seconds = 0.0
        self._block_grid = 0

    def score(
        self,
        pairs: Sequence[Pair],
        on_scored: Callable[[OneScore], None] = lambda score: None,
        style: str = "none",
    ) -> Scores:
        """Estimates for all pairs; contexts that are too long lose their first tokens.

        The draws of a pair are those of its tokens, whatever pairs stand beside it: what is left of a
        run that was interrupted is scored as it would have been.

        Args:
            pairs: what to score.
            on_scored: receives the score of each pair as it is done.
            style: of the progress, as for `Live`.

        Raises:
            EvaluationError: a pair has nothing to score, more than the engine can see, or the mask.
        """
        most = self._engine.config.scheduler.max_model_len
        mask = self._engine.config.model.mask_token_id
        for place, pair in enumerate(pairs):
            if not 1 <= len(pair.continuation) < most:
                raise EvaluationError(
                    f"likelihood: expected 1 to {most - 1} tokens to score in request {place},"
                    f" got {len(pair.continuation)}"
                )
            if mask in pair.continuation:
                raise EvaluationError(
                    f"likelihood: expected no mask id {mask} to score in request {place}, got one"
                )
        is_cut = [len(pair.context) + len(pair.continuation) > most for pair in pairs]
        sequences = [[*pair.context, *pair.continuation][-most:] for pair in pairs]
        ranges = [
            (len(ids) - len(pair.continuation), len(ids))
            for ids, pair in zip(sequences, pairs, strict=True)
        ]
        if any(is_cut):
            warn_once(
                logger, "likelihood context",
                "likelihoods: contexts of more than %d tokens lose their first ones", most,
            )  # fmt: skip
        live = ScoreLive("likelihoods", len(pairs), style)
        start, before = time.perf_counter(), self._num_forwards

        def scored(score: OneScore) -> None:
            self._num_requests += 1
            self._num_cut += is_cut[score.place]
            self._num_forwards = before + score.forward_passes
            on_scored(score)
            live.scored(score)

        try:
            scores = self._call(sequences, ranges, scored)
        finally:
            live.close()
            self._seconds += time.perf_counter() - start
        self._num_forwards = before + scores.forward_passes
        self._block_grid = scores.block_grid
        return scores

    def _call(
        self,
        sequences: Sequence[Sequence[int]],
        ranges: Sequence[tuple[int, int]],
        on_scored: Callable[[OneScore], None],
    ) -> Scores:
        settings = self._settings
        return self._engine.score(
            sequences,
            ranges,
            request_ids=[
                request_id(ids, begin) for ids, (begin, _) in zip(sequences, ranges, strict=True)
            ],
            on_scored=on_scored,
            mc_num=settings.mc_num,
            batch_size=settings.mc_batch_size,
            seed=settings.seed or 0,
            guidance=settings.likelihood_guidance,
            check_greedy=settings.check_greedy,
        )

    def go_on(self, before: Mapping[str, Any]) -> None:
        """Counts on from the ``likelihood`` of the statistics of an interrupted run."""
        self._num_requests = before["requests"]
        self._num_forwards, self._seconds = before["forward_passes"], before["seconds"]
        self._num_cut, self._block_grid = before["cut_contexts"], before["block_grid"]

    def stats(self) -> dict[str, Any]:
        """What was estimated and what it cost; empty if nothing was."""
        if self._num_requests == 0:
            return {}
        return {
            "likelihood": {
                "value": _BOUND,
                "requests": self._num_requests,
                "forward_passes": self._num_forwards,
                "seconds": self._seconds,
                "cut_contexts": self._num_cut,
                "block_grid": self._block_grid,
                "mc_num": self._settings.mc_num,
                "mc_batch_size": self._settings.mc_batch_size,
                "seed": self._settings.seed or 0,
            }
        }
