# SPDX-License-Identifier: Apache-2.0
"""Block attention, decode and prefill. R requests of n query tokens over c cached tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diffulex import ops
from kernel_bench import peers
from kernel_bench.report import Case, floor_us, relative_error
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PAGE = 32
BLOCK = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention problem; every request is alike."""

    requests: int
    context: int
    query: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    window: int = 0

    @property
    def text(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return (
            f"{self.requests} x ctx {self.context}, {self.query} tokens, "
            f"{self.q_heads}/{self.kv_heads} x {self.head_dim}{window}"
        )

    @property
    def keys(self) -> int:
        return self.context + self.query

    def visible(self) -> int:
        """Visible (query, key) pairs of one request under the block-causal mask."""
        total = 0
        for row in range(self.query):
            position = self.context + row
            high = min((position // BLOCK + 1) * BLOCK, self.keys)
            low = max(0, position - self.window + 1) if self.window else 0
            total += high - low
        return total

    @property
    def num_bytes(self) -> float:
        seen = min(self.keys, self.window + self.query) if self.window else self.keys
        kv = 2 * self.kv_heads * seen * self.head_dim
        return 2.0 * self.requests * (kv + 2 * self.query * self.q_heads * self.head_dim)

    @property
    def flops(self) -> float:
        return 4.0 * self.requests * self.q_heads * self.head_dim * self.visible()


class Buffers:
    """One set of tensors. The cache also holds the keys of the step, for peers that read them there."""

    def __init__(self, shape: Shape, device: str) -> None:
        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, dtype=torch.bfloat16, device=device)

        pages = -(-shape.keys // PAGE)
        count = shape.requests * pages
        rows = shape.requests * shape.query
        self.k_cache = normal(count, PAGE, shape.kv_heads, shape.head_dim)
        self.v_cache = normal(count, PAGE, shape.kv_heads, shape.head_dim)
        order = torch.randperm(count, device=device, dtype=torch.int32)
        self.table = order.view(shape.requests, pages).contiguous()
        self.q = normal(rows, shape.q_heads, shape.head_dim)
        positions = torch.arange(shape.context, shape.keys, device=device)
        slots = self.table[:, positions // PAGE].long() * PAGE + positions % PAGE
        flat = (-1, shape.kv_heads, shape.head_dim)
        self.k = self.k_cache.view(flat)[slots.flatten()]
        self.v = self.v_cache.view(flat)[slots.flatten()]
        self.out = torch.empty_like(self.q)


class Problem:
    """What the calls of one shape share."""

    def __init__(self, shape: Shape, device: str) -> None:
        def full(value: int) -> torch.Tensor:
            return torch.full((shape.requests,), value, dtype=torch.int32, device=device)

        self.shape = shape
        self.starts = (
            torch.arange(shape.requests + 1, dtype=torch.int32, device=device) * shape.query
        )
        self.context = full(shape.context)
        self.ends = self.starts[1:].contiguous()
        self.kinds = full(int(ops.MaskKind.BLOCK_CAUSAL))
        self.used = full(shape.keys)
        self.space = ops.empty_workspace(
            ops.attention_workspace_bytes(
                shape.requests, shape.q_heads, shape.kv_heads, shape.head_dim, shape.query,
                shape.context, 0,
            ),
            torch.device(device),
        )  # fmt: skip

    def call(self, part: Buffers) -> None:
        """Our op."""
        shape = self.shape
        ops.block_attention(
            part.q, part.k, part.v, part.k_cache, part.v_cache, part.table, self.starts,
            self.context, self.ends, self.kinds, block_size=BLOCK, max_seqlen_q=shape.query,
            max_context_len=shape.context, sliding_window=shape.window, out=part.out,
            workspace=self.space,
        )  # fmt: skip

    def _visible(self, rows: list[int], device: torch.device) -> torch.Tensor:
        """[len(rows), keys] bool: the block-causal mask, with the window if there is one."""
        shape = self.shape
        positions = torch.tensor([shape.context + row for row in rows], device=device)[:, None]
        keys = torch.arange(shape.keys, device=device)[None]
        visible = keys < (positions // BLOCK + 1) * BLOCK
        if shape.window:
            visible &= keys > positions - shape.window
        return visible

    def check(self, part: Buffers) -> float:
        """Error of a few rows and heads of the first and last request."""
        shape = self.shape
        part.out.fill_(float("nan"))
        self.call(part)
        if not bool(torch.isfinite(part.out).all()):
            return float("nan")
        group = shape.q_heads // shape.kv_heads
        rows = sorted({0, shape.query // 2, shape.query - 1})
        errors = []
        for request in sorted({0, shape.requests - 1}):
            pages = part.table[request].long()
            for head in sorted({0, shape.q_heads - 1}):
                keys = part.k_cache[pages, :, head // group].flatten(0, 1)[: shape.keys].double()
                values = part.v_cache[pages, :, head // group].flatten(0, 1)[: shape.keys].double()
                queries = part.q[[request * shape.query + row for row in rows], head].double()
                visible = self._visible(rows, keys.device)
                scores = queries @ keys.T / shape.head_dim**0.5
                weights = scores.masked_fill(~visible, -float("inf")).softmax(-1)
                out = part.out[[request * shape.query + row for row in rows], head]
                errors.append(relative_error(out, weights @ values))
        return max(errors)


def _case(
    section: str,
    shape: Shape,
    device: str,
    target: Callable[[Mapping[str, float]], float | None],
) -> Case:
    sets = [Buffers(shape, device) for _ in range(num_rotations(shape.num_bytes, 48))]
    problem = Problem(shape, device)
    calls = [lambda part=part: problem.call(part) for part in sets]
    found: dict[str, list[Callable[[], object]]] = {}
    absent: dict[str, str] = {}
    fa3, absent_reason = peers.flash_attention_3()
    if fa3 is None or shape.window:
        absent["FA3"] = absent_reason or "not run with a window"
    else:
        # Without the block mask the same keys are read; a prefill is compared with its causal mask.
        is_prefill = section == "prefill"
        found["FA3 causal" if is_prefill else "FA3"] = [
            lambda part=part: fa3(
                part.q, part.k_cache, part.v_cache, cu_seqlens_q=problem.starts,
                num_query=shape.query, used=problem.used, num_keys=shape.keys, table=part.table,
                causal=is_prefill, out=part.out,
            )
            for part in sets
        ]  # fmt: skip
    plan, reason = peers.flashinfer_prefill()
    if plan is None or section == "prefill" or shape.head_dim != 128 or shape.window:
        absent["FlashInfer"] = reason or "not run for this shape"
    else:
        heads = (shape.q_heads, shape.kv_heads, shape.head_dim)
        for backend in ("fa2", "fa3"):
            name = f"FlashInfer {backend} (one table)"
            try:
                run = plan(
                    sets[0].q.device,
                    problem.starts,
                    sets[0].table,
                    shape.keys,
                    heads,
                    PAGE,
                    backend,
                )
                run(sets[0].q, sets[0].k_cache, sets[0].v_cache, sets[0].out)
            except Exception as error:  # JIT compilers and missing packages of a peer
                absent[name] = f"{type(error).__name__}: {error}"[:120]
                continue
            # One plan per page table: the others would need as many 256 MB work spaces.
            found[name] = [
                lambda part=part, run=run: run(part.q, part.k_cache, part.v_cache, part.out)
                for part in sets
            ]
    return Case(
        section, "block_attention", shape.text, calls, lambda: problem.check(sets[0]), 1e-2,
        shape.num_bytes, shape.flops, peers=found, absent=absent, target=target,
    )  # fmt: skip


def _decode_target(shape: Shape) -> Callable[[Mapping[str, float]], float | None]:
    rate = {256: 450e12, 512: 350e12}.get(
        shape.head_dim,
        500e12 if shape.query * shape.requests <= 32 or shape.query <= 32 else 550e12,
    )
    formula = 6.0 + max(shape.num_bytes / (0.8 * 4.3e12), shape.flops / rate) * 1e6
    is_smallest = (shape.requests, shape.context, shape.query) == (1, 1024, 32)

    def target(times: Mapping[str, float]) -> float | None:
        bound = times.get("FA3", formula)
        return min(bound, 9.0) if is_smallest and shape.kv_heads == 8 else bound

    return target


def decode_shapes() -> Iterator[Shape]:
    """The table of the specification and its extra shapes."""
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
    yield Shape(8, 2048, 4)
    yield Shape(8, 2048, 8)
    yield Shape(1, 4096, 256, q_heads=16, kv_heads=8, head_dim=256)
    yield Shape(1, 4096, 256, q_heads=16, kv_heads=2, head_dim=512)
    yield Shape(8, 32768, 32, window=1024)


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Decode."""
    shapes = [Shape(2, 64, 32, 4, 2, 64)] if is_small else list(decode_shapes())
    for shape in shapes:
        yield _case("attention", shape, device, _decode_target(shape))


def prefill_cases(device: str, is_small: bool) -> Iterator[Case]:
    """One request, block-causal."""
    if is_small:
        yield _case("prefill", Shape(1, 0, 64, 4, 2, 64), device, lambda _: None)
        return
    sizes = [(0, 512), (0, 2048), (0, 4096), (0, 8192), (4096, 4096), (28672, 4096)]
    for context, tokens in sizes:
        shape = Shape(1, context, tokens)
        # The 620 TFLOP/s at 8,192 tokens; elsewhere the formula of the specification.
        bound = (
            shape.flops / 620e12 * 1e6
            if (context, tokens) == (0, 8192)
            else 6.0 + floor_us(shape.num_bytes / 0.8, shape.flops * 790 / 550)
        )
        yield _case("prefill", shape, device, lambda _, bound=bound: bound)
