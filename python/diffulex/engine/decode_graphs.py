# SPDX-License-Identifier: Apache-2.0
"""The CUDA graphs of decode steps: one set of buckets for every number of rows a request may have.

All strategies but one have a single number of rows. fast_dllm_v2 runs whole blocks or sub-blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.engine.graph_runner import GraphRunner, graph_buckets
from diffulex.logging import get_logger, warn_once

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.config import Config
    from diffulex_ext import _core

__all__ = ["Bucket", "DecodeGraphs", "decode_buckets"]

logger = get_logger(__name__)

_MAX_EXACT_BUCKET = 512


class Bucket(NamedTuple):
    """Shape of a padded decode step."""

    num_reqs: int
    rows_per_request: int


def decode_buckets(config: Config) -> dict[int, tuple[int, ...]]:
    """Rows of a request -> ascending request counts to which decode steps are padded."""
    decoding, scheduler = config.decoding, config.scheduler
    is_dual = decoding.decoding_strategy == "fast_dllm_v2"
    row_counts = {config.decode_rows}
    if is_dual and decoding.fdv2_use_block_cache:
        row_counts.add(decoding.block_size)
    buckets = {}
    for rows in sorted(row_counts, reverse=True):
        # Row budgets bound a decode batch as well: larger buckets could never be used.
        most = min(scheduler.max_num_reqs, max(scheduler.max_num_batched_tokens // rows, 1))
        if is_dual and decoding.fdv2_exact_graph_buckets:
            # Padding changes the shape of products, the shape the last bits, and those a token.
            buckets[rows] = tuple(range(1, min(most, _MAX_EXACT_BUCKET) + 1))
        else:
            buckets[rows] = graph_buckets(most)
    return buckets


def _of_rows(
    forward: Callable[[Bucket, Tensor | None], Tensor], rows: int
) -> Callable[[int, Tensor | None], Tensor]:
    def run(num_reqs: int, workspace: Tensor | None) -> Tensor:
        return forward(Bucket(num_reqs, rows), workspace)

    return run


class DecodeGraphs:
    """Finds the bucket of a plan, and replays its graph if there is one.

    Without graphs, steps on CUDA are padded all the same: how kernels cut their work depends on the
    shape of the batch, and with it the last bits of a result.
    """

    def __init__(self, buckets: Mapping[int, tuple[int, ...]]) -> None:
        self.buckets = dict(buckets)
        self.num_steps = 0
        self.num_fallbacks = 0
        self._runners: dict[int, GraphRunner] = {}

    @property
    def is_captured(self) -> bool:
        """Whether there are graphs."""
        return bool(self._runners)

    @property
    def runners(self) -> Iterable[GraphRunner]:
        """The graphs of every number of rows."""
        return self._runners.values()

    @property
    def captured_buckets(self) -> tuple[int, ...]:
        """Request counts that have a graph, for the largest number of rows."""
        return self._runners[max(self._runners)].buckets if self._runners else ()

    def capture(
        self,
        config: Config,
        workspace_bytes: Callable[[tuple[int, ...], int], int],
        fill: Callable[[Bucket], None],
        forward: Callable[[Bucket, Tensor | None], Tensor],
    ) -> None:
        """Captures every bucket.

        Args:
            workspace_bytes: scratch that suffices for buckets of so many rows per request.
            fill: puts legal values into the static arrays of a step, for a bucket and smaller ones.
            forward: hidden states of a bucket from the static arrays of a step.
        """
        for rows, buckets in self.buckets.items():
            runner = GraphRunner(
                buckets,
                rows,
                config.model.spec.hidden_size,
                getattr(torch, config.model.dtype),
                torch.device(config.model.device),
                workspace_bytes(buckets, rows),
            )
            fill(Bucket(buckets[-1], rows))
            runner.capture(_of_rows(forward, rows))
            self._runners[rows] = runner

    def bucket_for(self, plan: _core.StepPlan) -> Bucket | None:
        """Shape a decode plan is padded to; None: run as it is."""
        if plan.kind.name != "DECODE":
            return None
        buckets = self.buckets.get(plan.uniform_q_len)
        if buckets is not None:
            for num_reqs in buckets:
                if num_reqs >= plan.num_reqs:
                    return Bucket(num_reqs, plan.uniform_q_len)
            reason = f"{plan.num_reqs} requests exceed the largest bucket {buckets[-1]}"
        else:
            counts = " or ".join(map(str, self.buckets))
            reason = f"requests have other than {counts} rows"
        if self._runners:
            self.count_fallback(reason)
        return None

    def count_fallback(self, reason: str) -> None:
        """A decode step runs without a graph although there are graphs."""
        self.num_fallbacks += 1
        warn_once(logger, f"graph fallback: {reason}", "eager decode step: %s", reason)

    def replay(self, bucket: Bucket) -> Tensor:
        """Hidden states of the bucket's rows; valid until the next replay."""
        self.num_steps += 1
        return self._runners[bucket.rows_per_request].replay(bucket.num_reqs)
