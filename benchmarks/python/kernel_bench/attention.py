# SPDX-License-Identifier: Apache-2.0
"""Block attention, decode and prefill. R requests of n query tokens over c cached tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diffulex import ops
from kernel_bench import peers
from kernel_bench.agreement import Agreement
from kernel_bench.ceilings import NOMINAL_BANDWIDTH
from kernel_bench.report import Case, Limit
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 32
#: Scores that the check holds at once.
CHECKED_SCORES = 1 << 26
#: Largest relative difference between our output and that of a peer with the same mask.
PEER_TOLERANCE = 1e-2

Calls = dict[str, list["Callable[[], object]"]]


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention problem: requests that are alike, and perhaps one chunk of a prompt."""

    requests: int
    context: int
    query: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    window: int = 0
    page: int = 32
    #: Tokens of a prompt without context that run in the same call.
    chunk: int = 0

    @property
    def text(self) -> str:
        parts = [f"{self.requests} x ctx {self.context}, {self.query} tokens"]
        if self.chunk:
            parts[0] += f" and a prompt's {self.chunk}"
        parts[0] += f", {self.q_heads}/{self.kv_heads} x {self.head_dim}"
        if self.window:
            parts.append(f"window {self.window}")
        if self.page != 32:
            parts.append(f"pages of {self.page}")
        return ", ".join(parts)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Context and query tokens of every request."""
        return [(self.context, self.query)] * self.requests + [(0, self.chunk)] * bool(self.chunk)

    @property
    def is_causal(self) -> bool:
        """Whether a peer without block masks is run with the causal one.

        Of a prompt about half is visible; the last blocks of a context see nearly all of it.
        """
        return any(query >= 512 for _, query in self.parts)

    @property
    def is_one_block(self) -> bool:
        """Whether every row sees every key, as under a peer that has no mask."""
        return not self.window and not any(
            context % BLOCK or query > BLOCK for context, query in self.parts
        )

    def _visible(self, context: int, query: int) -> int:
        """Visible (query, key) pairs of one request under the block-causal mask."""
        total = 0
        for position in range(context, context + query):
            high = min((position // BLOCK + 1) * BLOCK, context + query)
            low = max(0, position - self.window + 1) if self.window else 0
            total += high - low
        return total

    @property
    def read_bytes(self) -> float:
        total = 0
        for context, query in self.parts:
            keys = context + query
            seen = min(keys, self.window + query) if self.window else keys
            total += 2 * self.kv_heads * seen + query * self.q_heads
        return 2.0 * self.head_dim * total

    @property
    def written_bytes(self) -> float:
        return 2.0 * self.head_dim * self.q_heads * sum(query for _, query in self.parts)

    @property
    def flops(self) -> float:
        counted = {part: self._visible(*part) for part in set(self.parts)}
        return 4.0 * self.q_heads * self.head_dim * sum(counted[part] for part in self.parts)


#: Microseconds that were set for some shapes.
GOALS = {
    Shape(1, 1024, 32): 9.0,
    Shape(1, 4096, 256, q_heads=16, kv_heads=2, head_dim=512): 100.0,
    Shape(8, 32768, 32, window=1024): 18.0,
}


class Buffers:
    """One set of tensors. The cache also holds the keys of the step, for peers that read them there."""

    def __init__(self, shape: Shape, device: str) -> None:
        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, dtype=torch.bfloat16, device=device)

        counts = [-(-(context + query) // shape.page) for context, query in shape.parts]
        rows = sum(query for _, query in shape.parts)
        cache = (sum(counts), shape.page, shape.kv_heads, shape.head_dim)
        self.k_cache, self.v_cache = normal(*cache), normal(*cache)
        order = torch.randperm(sum(counts), device=device, dtype=torch.int32)
        self.pages = order.split(counts)
        # Behind the pages of a request stands one that nothing reads, valid for every peer.
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
        for row, pages in zip(self.table, self.pages):
            row[: len(pages)] = pages
        self.q = normal(rows, shape.q_heads, shape.head_dim)
        slots = []
        for pages, (context, query) in zip(self.pages, shape.parts):
            positions = torch.arange(context, context + query, device=device)
            slots.append(
                pages[positions // shape.page].long() * shape.page + positions % shape.page
            )
        self.slots = torch.cat(slots)
        self.k, self.v = self.step_rows()
        self.out = torch.empty_like(self.q)

    def step_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the step, as the cache holds them."""
        return self.k_cache.flatten(0, 1)[self.slots], self.v_cache.flatten(0, 1)[self.slots]


class Problem:
    """What the calls of one shape share."""

    #: What gets the codes of the result.
    rows: ops.QuantizedRows | None = None

    def __init__(self, shape: Shape, device: str) -> None:
        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        contexts, queries = ([part[i] for part in shape.parts] for i in range(2))
        self.shape = shape
        self.ends = torch.cumsum(tensor(queries), 0, dtype=torch.int32)
        self.starts = torch.cat((torch.zeros_like(self.ends[:1]), self.ends))
        self.context = tensor(contexts)
        self.kinds = tensor([int(ops.MaskKind.BLOCK_CAUSAL)] * len(contexts))
        self.keys = tensor([sum(part) for part in shape.parts])
        self.max_query, self.max_context = max(queries), max(contexts)
        self.max_keys = max(map(sum, shape.parts))
        self.space = ops.empty_workspace(
            ops.attention_workspace_bytes(
                len(contexts), shape.q_heads, shape.kv_heads, shape.head_dim, self.max_query,
                self.max_context, 0,
            ),
            torch.device(device),
        )  # fmt: skip

    def call(self, part: Buffers) -> None:
        """Our op."""
        ops.block_attention(
            part.q, part.k, part.v, part.k_cache, part.v_cache, part.table, self.starts,
            self.context, self.ends, self.kinds, block_size=BLOCK, max_seqlen_q=self.max_query,
            max_context_len=self.max_context, sliding_window=self.shape.window, out=part.out,
            workspace=self.space, rows=self.rows,
        )  # fmt: skip

    def _visible(self, context: int, rows: range, keys: int, device: torch.device) -> torch.Tensor:
        """[len(rows), keys] bool: the block-causal mask, with the window if there is one."""
        positions = torch.arange(context + rows.start, context + rows.stop, device=device)[:, None]
        columns = torch.arange(keys, device=device)[None]
        visible = columns < (positions // BLOCK + 1) * BLOCK
        if self.shape.window:
            visible &= columns > positions - self.shape.window
        return visible

    def check(self, part: Buffers) -> Agreement:
        """Every row and head of every request."""
        part.out.fill_(float("nan"))
        self.call(part)
        agreement = Agreement(part.out.numel())
        start = 0
        for pages, (context, query) in zip(part.pages, self.shape.parts):
            for head in range(self.shape.kv_heads):
                self._check_head(agreement, part, pages.long(), start, context, query, head)
            start += query
        return agreement

    def _check_head(
        self, agreement: Agreement, part: Buffers, pages: torch.Tensor, start: int, context: int,
        query: int, head: int,
    ) -> None:  # fmt: skip
        """One request and one head of its keys."""
        group = self.shape.q_heads // self.shape.kv_heads
        keys = context + query
        heads = slice(head * group, (head + 1) * group)
        k = part.k_cache[pages, :, head].flatten(0, 1)[:keys].double()
        v = part.v_cache[pages, :, head].flatten(0, 1)[:keys].double()
        step = max(1, CHECKED_SCORES // (keys * group))
        for first in range(0, query, step):
            rows = range(first, min(query, first + step))
            place = slice(start + rows.start, start + rows.stop)
            scores = part.q[place, heads].double() @ k.T / self.shape.head_dim**0.5
            visible = self._visible(context, rows, keys, k.device)[:, None]
            weights = scores.masked_fill_(~visible, -float("inf")).softmax(-1)
            agreement.add(part.out[place, heads], weights @ v)


def _fa3_calls(problem: Problem, sets: list[Buffers], found: Calls, absent: dict[str, str]) -> None:
    """FlashAttention-3 over the same caches, with and without its metadata computed beforehand."""
    shape = problem.shape
    fa3, reason = peers.flash_attention_3()
    if fa3 is None:
        absent["FA3"] = reason
        return
    window = (shape.window - 1, BLOCK - 1) if shape.window else (-1, -1)
    call = fa3(
        starts=problem.starts, keys=problem.keys, max_query=problem.max_query,
        max_keys=problem.max_keys, heads=(shape.q_heads, shape.kv_heads, shape.head_dim),
        page=shape.page, is_causal=shape.is_causal, window=window,
    )  # fmt: skip
    for name, has_metadata in (("FA3", True), ("FA3 without metadata", False)):

        def run(part: Buffers, has_metadata: bool = has_metadata) -> None:
            call(part.q, part.k_cache, part.v_cache, part.table, part.out, has_metadata)

        _keep(name, problem, sets, run, found, absent)


def _flashinfer_calls(
    problem: Problem, sets: list[Buffers], found: Calls, absent: dict[str, str]
) -> None:
    """FlashInfer with both of its backends for this device."""
    shape = problem.shape
    plan, reason = peers.flashinfer_prefill()
    if plan is None or shape.is_causal or shape.head_dim != 128 or shape.window:
        absent["FlashInfer"] = reason or "run only for decode with heads of 128 and no window"
        return
    first = sets[0]
    for backend in ("fa2", "fa3"):
        name = f"FlashInfer {backend}"
        try:
            planned = plan(
                problem.starts, first.pages, problem.keys,
                (shape.q_heads, shape.kv_heads, shape.head_dim), shape.page, backend,
            )  # fmt: skip
        except Exception as error:  # JIT compilers and missing packages of a peer
            absent[name] = f"{type(error).__name__}: {error}"[:120]
            continue

        # One plan for the tables of all sets: the others would need as many 256 MB work spaces.
        def run(part: Buffers, planned: Callable[..., object] = planned) -> None:
            planned(part.q, part.k_cache, part.v_cache, part.out)

        _keep(name, problem, sets, run, found, absent)


def _keep(
    name: str, problem: Problem, sets: list[Buffers], run: Callable[[Buffers], None],
    found: Calls, absent: dict[str, str],
) -> None:  # fmt: skip
    """Adds a peer that runs and, where its mask is ours, computes the same."""
    first = sets[0]
    problem.call(first)
    ours = first.out.double()
    try:
        first.out.fill_(float("nan"))
        run(first)
        difference = float((first.out.double() - ours).norm() / ours.norm())
    except Exception as error:  # a peer may not support a shape
        absent[name] = f"{type(error).__name__}: {error}"[:120]
        return
    if problem.shape.is_one_block and not difference <= PEER_TOLERANCE:
        absent[name] = f"not timed: its output differs from ours by {difference:.1e}"
        return
    found[name] = [lambda part=part: run(part) for part in sets]


def _case(
    section: str, shape: Shape, device: str, formula: float | None = None, goal: float | None = None
) -> Case:
    num_bytes = shape.read_bytes + shape.written_bytes
    sets = [Buffers(shape, device) for _ in range(num_rotations(num_bytes, 48))]
    problem = Problem(shape, device)
    found: Calls = {}
    absent: dict[str, str] = {}
    _fa3_calls(problem, sets, found, absent)
    _flashinfer_calls(problem, sets, found, absent)
    return Case(
        section, "block_attention", shape.text,
        [lambda part=part: problem.call(part) for part in sets], lambda: problem.check(sets[0]),
        shape.read_bytes, shape.written_bytes, shape.flops, len(sets) * num_bytes, peers=found,
        absent=absent, judges={"FA3": Limit()}, formula_us=formula, goal_us=goal,
        note="FA3 causal" if shape.is_causal and "FA3" in found else "",
    )  # fmt: skip


def formula_us(shape: Shape) -> float:
    """A launch, and 80 % of the bandwidth or the rate that the head dim and rows allow.

    A batch of decode steps and a prompt may take 1.15 times that.
    """
    num_bytes = shape.read_bytes + shape.written_bytes
    few_rows = 500e12 if shape.query <= BLOCK and not shape.chunk else 550e12
    rate = {256: 450e12, 512: 350e12}.get(shape.head_dim, few_rows)
    bound = 6.0 + 1e6 * max(num_bytes / (0.8 * NOMINAL_BANDWIDTH), shape.flops / rate)
    return 1.15 * bound if shape.chunk else bound


def decode_shapes() -> Iterator[Shape]:
    """Batches and contexts of two models, then other heads, pages, a window and a mixed batch."""
    for kv_heads in (8, 4):
        for query in (32, 128):
            for requests in (1, 8, 64):
                for context in (1024, 8192, 32768):
                    if requests == 64 and context == 32768 and kv_heads == 4:
                        continue  # the same bytes as 8 heads at 16k; leaves room for the others
                    yield Shape(requests, context, query, kv_heads=kv_heads)
    yield Shape(8, 2048, 32, q_heads=32, kv_heads=32)
    yield Shape(8, 2048, 32, q_heads=28, kv_heads=4)
    yield Shape(8, 2048, 32, q_heads=16, kv_heads=8)
    yield Shape(1, 8192, 32, kv_heads=2)
    yield Shape(8, 8192, 32, kv_heads=2)
    yield Shape(8, 2048, 4)
    yield Shape(8, 2048, 8)
    yield Shape(128, 256, 4)
    yield Shape(128, 288, 4)
    for page in (16, 64, 256):
        yield Shape(8, 8192, 32, page=page)
    yield Shape(1, 4096, 256, q_heads=16, kv_heads=8, head_dim=256)
    yield Shape(1, 4096, 256, q_heads=16, kv_heads=2, head_dim=512)
    yield Shape(8, 32768, 32, window=1024)
    yield Shape(32, 2048, 32, chunk=2048)


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Decode."""
    if is_small:
        yield _case("attention", Shape(2, 64, 32, 4, 2, 64, page=16), device)
        yield _case("attention", Shape(2, 64, 32, 4, 2, 64, window=40, chunk=70), device)
        return
    for shape in decode_shapes():
        yield _case("attention", shape, device, formula_us(shape), GOALS.get(shape))


def prefill_cases(device: str, is_small: bool) -> Iterator[Case]:
    """One request, block-causal."""
    if is_small:
        yield _case("prefill", Shape(1, 0, 64, 4, 2, 64), device)
        return
    sizes = [(0, 512), (0, 2048), (0, 4096), (0, 8192), (4096, 4096), (28672, 4096)]
    for context, tokens in sizes:
        shape = Shape(1, context, tokens)
        # 620 TFLOP/s of visible pairs.
        goal = shape.flops / 620e12 * 1e6 if (context, tokens) == (0, 8192) else None
        yield _case("prefill", shape, device, formula_us(shape), goal)
