# SPDX-License-Identifier: Apache-2.0
"""fp64 references of the ops, written from the specification, with plain loops and numpy.

They share nothing with the package: no torch reference, no kernel code.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

CAUSAL, BLOCK_CAUSAL, FULL, PREFIX_FULL, CACHE_ONLY = range(5)
HOLE = 0x100
ANCHOR = 0x200
FLOAT32_MAX = float(np.finfo(np.float32).max)


# --- attention -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Request:
    """One request of an attention call, as the specification names its numbers."""

    kind: int
    c: int
    nv: int
    a: int
    p: int = 0
    pp: int = 0


def visible(request: Request, i: int, j: int, block: int, window: int) -> bool:
    """Whether row i sees key j: cached for j < c, in flight for c <= j < c + nv."""
    c, nv, p, pp = request.c, request.nv, request.p, request.pp
    position = request.a + i
    # Blocks are counted from the end of the padded prefix; what lies before the first is one as well.
    origin = max(pp, 0) % block
    is_before = 0 <= position < origin
    end = origin if is_before else ((position - origin) // block + 1) * block + origin
    of_block = min(end, c + nv)
    kind = request.kind & 0xFF
    if kind == CAUSAL:
        high = min(position + 1, c + nv)
    elif kind == BLOCK_CAUSAL:
        high = of_block
    elif kind == FULL:
        high = c + nv
    elif kind == PREFIX_FULL:
        if position < p:
            high = min(p, c + nv)
        elif position < pp:
            high = min(pp, c + nv)
        else:
            high = of_block
    elif kind == CACHE_ONLY:
        high = c
    else:
        raise AssertionError(kind)
    window_end = request.a if request.kind & ANCHOR else position
    low = max(0, window_end - window + 1) if window > 0 else 0
    if not low <= j < high:
        return False
    return not (request.kind & HOLE and j < c and p <= j < pp)


def cached_row(cache: np.ndarray, which: str, layout: int, page: int, offset: int) -> np.ndarray:
    """[heads, D] of one slot of a K or V cache."""
    if layout == 0:
        return cache[page, offset]
    if which == "k":
        return cache[page, :, :, offset, :].reshape(cache.shape[1], -1)
    return cache[page, :, :, offset]


def gather(
    k: np.ndarray,
    v: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    pages: np.ndarray,
    first: int,
    request: Request,
    *,
    block: int,
    window: int = 0,
    layout: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values [c + nv, Hkv, D] of one request and the mask [nv, c + nv].

    Keys that no row sees are zero, so that poison in them cannot reach a sum.
    """
    num_kv_heads, head_dim = k.shape[1:]
    page_size = k_cache.shape[1] if layout == 0 else k_cache.shape[3]
    num_keys = request.c + request.nv
    keys = np.zeros((num_keys, num_kv_heads, head_dim))
    values = np.zeros_like(keys)
    mask = np.zeros((request.nv, num_keys), dtype=bool)
    for j in range(num_keys):
        page = int(pages[j // page_size]) if j < request.c else 0
        if j < request.c and not 0 <= page < k_cache.shape[0]:
            continue
        mask[:, j] = [visible(request, i, j, block, window) for i in range(request.nv)]
        if not mask[:, j].any():
            continue
        if j >= request.c:
            keys[j], values[j] = k[first + j - request.c], v[first + j - request.c]
        else:
            key = cached_row(k_cache, "k", layout, page, j % page_size)
            value = cached_row(v_cache, "v", layout, page, j % page_size)
            keys[j], values[j] = key[:num_kv_heads, :head_dim], value[:num_kv_heads, :head_dim]
    return keys, values, mask


def softmax_rows(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    *,
    scale: float,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """out [nv, Hq, D] and lse [nv, Hq] of one request."""
    num_rows, num_q_heads, _ = q.shape
    group = num_q_heads // keys.shape[1]
    out = np.zeros(q.shape)
    lse = np.full((num_rows, num_q_heads), -np.inf)
    for i in range(num_rows):
        seen = np.flatnonzero(mask[i])
        if len(seen) == 0:
            continue
        for head in range(num_q_heads):
            scores = scale * (keys[seen, head // group] @ q[i, head])
            if softcap > 0:
                scores = softcap * np.tanh(scores / softcap)
            top = scores.max()
            weights = np.exp(scores - top)
            out[i, head] = weights @ values[seen, head // group] / weights.sum()
            lse[i, head] = top + math.log(weights.sum())
    return out, lse


# --- norm, rotary, activation --------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray | None, eps: float, offset: float) -> np.ndarray:
    out = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return out if weight is None else out * (weight + offset)


def rotate(x: np.ndarray, angles: np.ndarray, neox: bool) -> np.ndarray:
    """x [T, heads, D], angles [T, rotary_dim] (cosines, then sines)."""
    rotary_dim = angles.shape[1]
    half = rotary_dim // 2
    out = x.copy()
    for d in range(half):
        first, second = (d, d + half) if neox else (2 * d, 2 * d + 1)
        cos, sin = angles[:, None, d], angles[:, None, half + d]
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def act_and_mul(x: np.ndarray, act: int) -> np.ndarray:
    gate, up = np.split(x, 2, -1)
    if act == 0:
        with np.errstate(over="ignore"):
            return gate / (1 + np.exp(-gate)) * up
    if act == 1:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + np.tanh(inner)) * up
    return 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) * up


# --- sampling ------------------------------------------------------------------------------------


@dataclasses.dataclass
class RowStats:
    """What token_stats says about one row."""

    id: int
    confidence: float = 0.0
    max_prob: float = 0.0
    second_prob: float = 0.0
    entropy: float = 0.0
    logsumexp: float = 0.0
    max_logit: float = 0.0
    raw_confidence: float = 0.0
    bad_count: int = 0
    topk_ids: list[int] = dataclasses.field(default_factory=list)
    topk_probs: list[float] = dataclasses.field(default_factory=list)
    cdf: np.ndarray | None = None
    gap: float = math.inf

    def columns(self) -> list[float]:
        return [
            self.confidence,
            self.max_prob,
            self.second_prob,
            self.entropy,
            self.logsumexp,
            self.max_logit,
            self.raw_confidence,
            self.bad_count,
        ]


def _lse(z: np.ndarray) -> float:
    top = z.max()
    return float(top + math.log(np.exp(z - top).sum()))


def token_stats_row(
    raw: np.ndarray,
    *,
    inv_temperature: float = 0.0,
    uniform: float = 0.5,
    forbidden: tuple[int, ...] = (),
    limit: int = -1,
    mode: str = "exclude",
    softcap: float = 0.0,
    penalty: float = 0.0,
    penalty_id: int = -1,
    top_k: int = 0,
) -> RowStats:
    """One row: soft cap, penalty, non-finite values, candidates, temperature, choice, statistics."""
    bad = int((~np.isfinite(raw)).sum())
    clean = np.nan_to_num(raw.astype(np.float64), nan=-np.inf, posinf=FLOAT32_MAX, neginf=-np.inf)
    compared = clean.copy()
    logits = softcap * np.tanh(clean / softcap) if softcap > 0 else clean.copy()
    logits[clean == -np.inf] = -np.inf
    if 0 <= penalty_id < len(raw):
        logits[penalty_id] -= penalty
        compared[penalty_id] -= penalty
    allowed = clean > -np.inf
    if mode != "off":
        if limit >= 0:
            allowed[limit:] = False
        for token in forbidden:
            if token >= 0:
                allowed[token] = False
    if not allowed.any():
        return RowStats(id=-1, bad_count=bad)
    counted = logits if mode != "renormalize" else np.where(allowed, logits, -np.inf)
    tempered = counted * inv_temperature if inv_temperature != 0 else counted
    # An infinite logit acts as the largest finite fp32 number at every temperature.
    tempered = np.clip(tempered, -FLOAT32_MAX, FLOAT32_MAX)
    tempered = np.where(counted == -np.inf, -np.inf, tempered)
    lse = _lse(tempered)
    weights = np.exp(tempered - tempered.max())
    probs = weights / weights.sum()
    order = sorted(np.flatnonzero(allowed), key=lambda t: (-compared[t], t))
    chosen = int(order[0])
    cdf = None
    if inv_temperature != 0:
        cdf = np.cumsum(np.where(allowed, probs, 0.0))
        cdf /= cdf[-1]
        above = np.flatnonzero(allowed & (cdf > uniform))
        chosen = int(above[0]) if len(above) else int(np.flatnonzero(allowed)[-1])
    positive = probs[probs > 0]
    best = [int(t) for t in order[:top_k]]
    return RowStats(
        id=chosen,
        confidence=float(probs[chosen]),
        max_prob=float(probs[order[0]]),
        second_prob=float(probs[order[1]]) if len(order) > 1 else 0.0,
        entropy=float(-(positive * np.log(positive)).sum()),
        logsumexp=lse,
        max_logit=float(logits[order[0]]),
        raw_confidence=float(
            np.exp(counted[chosen] - counted.max()) / np.exp(counted - counted.max()).sum()
        ),
        bad_count=bad,
        topk_ids=best + [-1] * (top_k - len(best)),
        topk_probs=[float(probs[t]) for t in best] + [0.0] * (top_k - len(best)),
        cdf=cdf,
        gap=float(compared[order[0]] - compared[order[1]]) if len(order) > 1 else math.inf,
    )


THRESHOLD, NON_STRICT, STATIC, DYNAMIC, SEQUENTIAL, FACTOR, ENTROPY, PREFIX, HIERARCHY = range(9)
COMMITTABLE, SAME, CONFIDENT, PROGRESSED, BAD, SKIPPED = 1, 2, 4, 8, 32, 64


@dataclasses.dataclass
class Position:
    """Proposal of one open position."""

    index: int
    id: int
    p: float
    rank: float
    entropy: float


def schedule(block_size: int, steps: int, step: int) -> int:
    """k_s of the static, dynamic and sequential rules."""
    if step >= steps:
        return max(1, schedule(block_size, steps, steps - 1))
    return block_size // steps + (1 if step < block_size % steps else 0)


def accept(
    positions: list[Position],
    *,
    rule: int,
    gate: bool,
    tau: float,
    count: int,
    factor: float,
    bound: float,
    open_set: list[int],
    low: float = 0.0,
    force_all: bool = False,
) -> set[int]:
    """Indices of the accepted positions; `positions` are those of `open_set` with a proposal."""

    def passes(position: Position) -> bool:
        return position.p >= tau if rule in (NON_STRICT, PREFIX) else position.p > tau

    high = {position.index for position in positions if passes(position)}
    ranked = [o.index for o in sorted(positions, key=lambda o: (-o.rank, o.index))]
    if rule in (THRESHOLD, NON_STRICT):
        taken = high or set(ranked[:1])
    elif rule == STATIC:
        taken = set(ranked[:count])
    elif rule == DYNAMIC:
        taken = high if len(high) >= count else set(ranked[:count])
    elif rule == SEQUENTIAL:
        taken = {position.index for position in positions[:count]}
    elif rule == FACTOR:
        taken = _by_factor(positions, factor)
    elif rule == PREFIX:
        taken = _prefix(open_set, high) or set(open_set[:1]) & {o.index for o in positions}
    elif rule == HIERARCHY:
        best = [o for o in positions if _leads_its_run(o.index, ranked, open_set)]
        taken = high | set(ranked[:1]) | {o.index for o in best if o.p > low}
    else:
        taken = _by_entropy(positions, bound)
    if force_all:
        taken = {position.index for position in positions}
    return taken if gate else taken & high


def _by_factor(positions: list[Position], factor: float) -> set[int]:
    by_p = sorted(positions, key=lambda o: (-o.p, o.index))
    largest = 0
    for n in range(1, len(by_p) + 1):
        if (n + 1) * (1 - by_p[n - 1].p) < factor:
            largest = n
    return {o.index for o in by_p[: max(1, largest)]}


def _by_entropy(positions: list[Position], bound: float) -> set[int]:
    taken = set[int]()
    before = 0.0
    for n, o in enumerate(sorted(positions, key=lambda o: (o.entropy, o.index))):
        if n == 0 or before <= bound:
            taken.add(o.index)
        before += o.entropy
    return taken


def _prefix(open_set: list[int], high: set[int]) -> set[int]:
    first_failure = min((i for i in open_set if i not in high), default=math.inf)
    return {i for i in open_set if i < first_failure}


def _leads_its_run(index: int, ranked: list[int], open_set: list[int]) -> bool:
    """No position reachable through open neighbours ranks before it."""
    left = next(i for i in range(index, -2, -1) if i not in open_set) + 1
    right = next(i for i in range(index, max(open_set) + 2) if i not in open_set)
    return next(i for i in ranked if left <= i < right) == index
