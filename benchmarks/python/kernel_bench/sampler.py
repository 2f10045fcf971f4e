# SPDX-License-Identifier: Apache-2.0
"""token_stats and sample_filtered. R rows of V logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from diffulex import ops
from kernel_bench import peers
from kernel_bench.agreement import Agreement, Tolerance
from kernel_bench.ceilings import NOMINAL_BANDWIDTH
from kernel_bench.report import Case
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHAPES = [
    (rows, vocab) for rows in (32, 256, 2048, 8192) for vocab in (126464, 151936, 157184, 262144)
]
#: Factor on the time of greedy rows.
FACTORS = {"greedy": 1.0, "drawn": 1.3, "top-8": 1.15, "top-64": 1.6}
#: Logits that are compared at once in float64.
CHECKED_LOGITS = 1 << 26
PROBABILITY = Tolerance(2e-5)
ENTROPY = Tolerance(2e-5, 2e-5)
LOG_SUM = Tolerance(1e-6)
#: How far a random number may lie outside the interval of the id it drew.
DRAW_SLACK = 1e-5
TOP_K, TOP_P = 50, 0.9

Calls = dict[str, list["Callable[[], object]"]]


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, CHECKED_LOGITS // logits.size(1))
    return (slice(start, start + step) for start in range(0, logits.size(0), step))


def _first_best(choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value of each row and the lowest id that has it."""
    best = choices.amax(-1)
    ids = torch.arange(choices.size(1), device=choices.device)
    return best, torch.where(choices == best[:, None], ids, choices.size(1)).amin(-1)


def _is_drawn(mass: torch.Tensor, ids: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Whether each id is the first whose cumulative mass, in order of ids, passes the number."""
    ends = mass.cumsum(-1)
    total = ends[:, -1]
    end = ends.gather(1, ids[:, None])[:, 0]
    own = mass.gather(1, ids[:, None])[:, 0]
    point, slack = uniforms * total, DRAW_SLACK * total
    return (own > 0) & (end - own <= point + slack) & (point - slack < end)


def _check_stats(
    logits: torch.Tensor, stats: ops.TokenStats, forbidden: int, draw: dict[str, torch.Tensor]
) -> Agreement:
    """Ids, probabilities, entropy and log-sum-exp of every row; of draws also the draw."""
    top_k = 0 if stats.topk_ids is None else stats.topk_ids.size(1)
    agreement = Agreement(logits.size(0) * (5 + 3 * bool(top_k) * top_k))
    for part in _chunks(logits):
        exact = logits[part].double()
        choices = exact.clone()
        choices[:, forbidden] = -float("inf")
        best, first = _first_best(choices)
        ids, got = stats.ids[part], stats.stats[part].double()
        if draw:
            beta = draw["inv_temperature"][part].double()[:, None]
            exact, choices, best = exact * beta, choices * beta, best * beta[:, 0]
        lse = torch.logsumexp(exact, -1)
        shares = (exact - lse[:, None]).exp_()
        entropy = -torch.special.xlogy(shares, shares).sum(-1)
        if draw:
            mass = shares.clone()
            mass[:, forbidden] = 0.0
            agreement.claim(_is_drawn(mass, ids, draw["uniforms"][part]))
        else:
            agreement.claim(ids == first)
        columns = ops.StatsColumn
        chosen = shares.gather(1, ids[:, None])[:, 0]
        agreement.add(got[:, columns.CONFIDENCE], chosen, PROBABILITY)
        agreement.add(got[:, columns.MAX_PROB], (best - lse).exp(), PROBABILITY)
        agreement.add(got[:, columns.ENTROPY], entropy, ENTROPY)
        agreement.add(got[:, columns.LOGSUMEXP], lse, LOG_SUM)
        if stats.topk_ids is not None and stats.topk_probs is not None:
            found = choices.gather(1, stats.topk_ids[part])
            values = choices.topk(top_k, sorted=True).values
            ordered = stats.topk_ids[part].sort(-1).values
            distinct = torch.ones_like(ordered, dtype=torch.bool)
            distinct[:, 1:] = ordered[:, 1:] > ordered[:, :-1]
            agreement.claim(distinct)
            agreement.claim(found == values)
            agreement.add(
                stats.topk_probs[part].double(), (values - lse[:, None]).exp(), PROBABILITY
            )
    return agreement


def _logits(rows: int, vocab: int, device: str) -> list[torch.Tensor]:
    count = num_rotations(2.0 * rows * vocab)
    big = torch.empty(count, rows, vocab, dtype=torch.bfloat16, device=device)
    return [part.normal_(0.0, 4.0) for part in big]


def _stats_peers(kind: str, logits: list[torch.Tensor]) -> tuple[Calls, dict[str, str]]:
    """Kernels that choose the same ids; none of them gives all the statistics."""
    rows, vocab = logits[0].shape
    if rows * vocab > 1024 * 151936:
        return {}, {}
    if kind == "greedy":
        return {"torch softmax+max": [lambda x=x: torch.softmax(x, -1).max(-1) for x in logits]}, {}
    if kind != "drawn":
        top_k = int(kind.split("-")[1])
        return {"torch topk": [lambda x=x: x.topk(top_k) for x in logits]}, {}
    name = "FlashInfer sampling_from_logits"
    sample, reason = peers.flashinfer_sampling("sampling_from_logits")
    if sample is None:
        return {}, {name: reason}
    seed = torch.ones(1, dtype=torch.int64, device=logits[0].device)
    return {name: [lambda x=x: sample(x, seed=seed, offset=seed) for x in logits]}, {}


def _stats_case(rows: int, vocab: int, device: str, kind: str) -> Case:
    logits = _logits(rows, vocab, device)
    forbidden = torch.tensor([vocab - 267], device=device)
    top_k = {"top-8": 8, "top-64": 64}.get(kind, 0)
    draw: dict[str, torch.Tensor] = {}
    if kind == "drawn":
        draw = {
            "inv_temperature": torch.full((rows,), 1.25, device=device),
            "uniforms": torch.rand(rows, dtype=torch.float64, device=device),
        }
    kwargs: dict[str, Any] = {"forbidden_ids": forbidden, "top_k": top_k, **draw}
    out = ops.token_stats(logits[0], **kwargs)
    space = ops.empty_workspace(
        ops.token_stats_workspace_bytes(rows, vocab, top_k, device), torch.device(device)
    )
    calls: list[Callable[[], object]] = [
        lambda x=x: ops.token_stats(x, out=out, workspace=space, **kwargs) for x in logits
    ]

    def check() -> Agreement:
        return _check_stats(logits[0], ops.token_stats(logits[0], **kwargs), vocab - 267, draw)

    factor = FACTORS[kind]
    num_bytes = 2.0 * rows * vocab
    found, absent = _stats_peers(kind, logits)
    return Case(
        "sampler", f"token_stats {kind}", f"R {rows}, V {vocab}", calls, check, num_bytes,
        rotated_bytes=len(logits) * num_bytes, peers=found, absent=absent,
        formula_us=factor * (6.0 + 1e6 * num_bytes / (0.85 * NOMINAL_BANDWIDTH)),
        goal_us=1.2 * factor * (5.0 + 1e6 * num_bytes / NOMINAL_BANDWIDTH),
    )  # fmt: skip


def _check_filtered(logits: torch.Tensor, out: ops.TokenStats, uniforms: torch.Tensor) -> Agreement:
    """Of every row: the id is drawn from what the filters keep, with its share of that."""
    agreement = Agreement(2 * logits.size(0))
    for part in _chunks(logits):
        shares = torch.softmax(logits[part].double(), -1)
        values, order = torch.sort(shares, stable=True, descending=True)
        kept = (values.cumsum(-1) - values <= TOP_P) & (values >= values[:, TOP_K - 1 : TOP_K])
        mass = torch.zeros_like(shares).scatter_(1, order, torch.where(kept, values, 0.0))
        ids = out.ids[part]
        agreement.claim(_is_drawn(mass, ids, uniforms[part]))
        share = mass.gather(1, ids[:, None])[:, 0] / mass.sum(-1)
        confidence = out.stats[part, ops.StatsColumn.CONFIDENCE]
        agreement.add(confidence, share, PROBABILITY)
    return agreement


def _filter_case(rows: int, vocab: int, device: str) -> Case:
    logits = _logits(rows, vocab, device)
    out = ops.token_stats(logits[0])
    inverse = torch.ones(rows, device=device)
    uniforms = torch.rand(rows, dtype=torch.float64, device=device)
    filters = {
        "top_k": torch.full((rows,), TOP_K, dtype=torch.int32, device=device),
        "top_p": torch.full((rows,), TOP_P, device=device),
    }
    calls: list[Callable[[], object]] = [
        lambda x=x: ops.sample_filtered(x, inverse, uniforms, out, **filters) for x in logits
    ]

    def check() -> Agreement:
        out.ids.fill_(-1)
        calls[0]()
        return _check_filtered(logits[0], out, uniforms)

    name = "FlashInfer top_k_top_p_sampling_from_logits"
    found: Calls = {}
    absent: dict[str, str] = {}
    sample, reason = peers.flashinfer_sampling("top_k_top_p_sampling_from_logits")
    if sample is None:
        absent[name] = reason
    else:
        seed = torch.ones(1, dtype=torch.int64, device=device)
        settings = {**filters, "filter_apply_order": "joint", "seed": seed, "offset": seed}
        found[name] = [lambda x=x: sample(x, **settings) for x in logits]
    num_bytes = 2.0 * rows * vocab
    return Case(
        "sampler", "sample_filtered", f"R {rows}, V {vocab}, top-k {TOP_K}, top-p {TOP_P}", calls,
        check, num_bytes, rotated_bytes=len(logits) * num_bytes, peers=found, absent=absent,
        goal_us=60.0 if rows == 32 else None,
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Every shape, or tiny ones."""
    if is_small:
        for kind in FACTORS:
            yield _stats_case(3, 5000, device, kind)
        yield _filter_case(3, 5000, device)
        return
    for rows, vocab in SHAPES:
        yield _stats_case(rows, vocab, device, "greedy")
    for kind in ("drawn", "top-8", "top-64"):
        for rows in (32, 256, 2048):
            yield _stats_case(rows, 151936, device, kind)
    for rows in (1, 32, 256):
        yield _filter_case(rows, 151936, device)
