# SPDX-License-Identifier: Apache-2.0
"""token_stats and sample_filtered. R rows of V logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex import ops
from kernel_bench.report import BANDWIDTH, Case
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = [
    (rows, vocab) for rows in (32, 256, 2048, 8192) for vocab in (126464, 151936, 157184, 262144)
]
#: Rows whose statistics are checked.
CHECKED_ROWS = 4


def _check(logits: torch.Tensor, stats: ops.TokenStats, forbidden: int) -> float:
    """Largest deviation of id, confidence, entropy and log-sum-exp of some rows from float64."""
    step = max(1, logits.size(0) // CHECKED_ROWS)
    rows = torch.arange(0, logits.size(0), step)[:CHECKED_ROWS]
    exact = logits[rows].double()
    lse = torch.logsumexp(exact, -1)
    shares = (exact - lse[:, None]).exp()
    entropy = -(shares * (exact - lse[:, None])).sum(-1)
    choices = exact.clone()
    choices[:, forbidden] = -float("inf")
    best, ids = choices.max(-1)
    if not torch.equal(stats.ids[rows], ids):
        return float("nan")
    got = stats.stats[rows].double()
    errors = torch.stack(
        [
            got[:, 0] / (best - lse).exp() - 1.0,
            (got[:, 3] - entropy) / entropy.clamp_min(1.0),
            got[:, 4] - lse,
        ]
    )
    return float(errors.abs().max())


def _logits(rows: int, vocab: int, device: str) -> list[torch.Tensor]:
    count = num_rotations(2.0 * rows * vocab)
    big = torch.empty(count, rows, vocab, dtype=torch.bfloat16, device=device)
    return [part.normal_(0.0, 4.0) for part in big]


def _stats_case(rows: int, vocab: int, device: str, kind: str) -> Case:
    logits = _logits(rows, vocab, device)
    forbidden = torch.tensor([vocab - 267], device=device)
    top_k = {"top-8": 8, "top-64": 64}.get(kind, 0)
    draw = {}
    if kind == "drawn":
        draw = {
            "inv_temperature": torch.full((rows,), 1.25, device=device),
            "uniforms": torch.rand(rows, dtype=torch.float64, device=device),
        }
    kwargs = {"forbidden_ids": forbidden, "top_k": top_k, **draw}
    out = ops.token_stats(logits[0], **kwargs)
    space = ops.empty_workspace(
        ops.token_stats_workspace_bytes(rows, vocab, top_k, device), torch.device(device)
    )
    calls = [lambda x=x: ops.token_stats(x, out=out, workspace=space, **kwargs) for x in logits]

    def check() -> float:
        plain = ops.token_stats(logits[0], forbidden_ids=forbidden, top_k=top_k)
        return _check(logits[0], plain, vocab - 267)

    factor = {"greedy": 1.0, "drawn": 1.3, "top-8": 1.15, "top-64": 1.6}[kind]
    num_bytes = 2.0 * rows * vocab
    target = 1.2 * factor * (num_bytes / BANDWIDTH * 1e6 + 5.0)
    peers = {}
    if kind == "greedy" and rows * vocab <= 1024 * 151936:
        peers["torch softmax+max"] = [lambda x=x: torch.softmax(x, -1).max(-1) for x in logits]
    return Case(
        "sampler", f"token_stats {kind}", f"R {rows}, V {vocab}", calls, check, 2e-5, num_bytes,
        peers=peers, target=lambda _: target,
    )  # fmt: skip


def _filter_case(rows: int, vocab: int, device: str) -> Case:
    logits = _logits(rows, vocab, device)
    out = ops.token_stats(logits[0])
    inverse = torch.ones(rows, device=device)
    uniforms = torch.rand(rows, dtype=torch.float64, device=device)
    filters = {
        "top_k": torch.full((rows,), 50, dtype=torch.int32, device=device),
        "top_p": torch.full((rows,), 0.9, device=device),
    }
    calls = [lambda x=x: ops.sample_filtered(x, inverse, uniforms, out, **filters) for x in logits]

    def check() -> float:
        calls[0]()
        shares = torch.softmax(logits[0][:CHECKED_ROWS].double(), -1)
        values, ids = torch.sort(shares, stable=True, descending=True)
        kept = (values.cumsum(-1) - values <= 0.9) & (values >= values[:, 49:50])
        kept_shares = torch.where(kept, values, 0.0)
        kept_shares /= kept_shares.sum(-1, keepdim=True)
        error = 0.0
        for row in range(min(CHECKED_ROWS, rows)):
            place = (ids[row] == out.ids[row]).nonzero()
            share = float(kept_shares[row, place[0, 0]]) if len(place) else 0.0
            error = max(error, abs(float(out.stats[row, 0]) - share) / max(share, 1e-12))
        return error

    return Case(
        "sampler", "sample_filtered", f"R {rows}, V {vocab}, top-k 50, top-p 0.9", calls, check,
        1e-4, 2.0 * rows * vocab, target=lambda _: 60.0 if rows == 32 else None,
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Every shape, or two tiny ones."""
    if is_small:
        yield _stats_case(3, 5000, device, "greedy")
        yield _filter_case(3, 5000, device)
        return
    for rows, vocab in SHAPES:
        yield _stats_case(rows, vocab, device, "greedy")
    for kind in ("drawn", "top-8", "top-64"):
        for rows in (32, 256, 2048):
            yield _stats_case(rows, 151936, device, kind)
    for rows in (1, 32, 256):
        yield _filter_case(rows, 151936, device)
