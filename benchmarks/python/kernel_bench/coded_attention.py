# SPDX-License-Identifier: Apache-2.0
"""Block attention over caches of e4m3 codes, beside the same over their values in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex import ops
from kernel_bench.attention import BLOCK, Buffers, Problem, Shape
from kernel_bench.report import Case, Limit
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel_bench.agreement import Agreement

PEER = "bfloat16"
#: The kernel without the copy engine, which takes the codes where scale bytes are not aligned.
PORTABLE = "portable kernel"
#: Share of the time over values that codes may take: few rows are a matter of bytes, many of products.
SHARES = (
    (Shape(1, 1024, 32), 1.0),
    (Shape(1, 8192, 32), None),
    (Shape(1, 32768, 32), 0.8),
    (Shape(8, 1024, 32), None),
    (Shape(8, 8192, 32), 0.62),
    (Shape(8, 32768, 32), 0.62),
    (Shape(64, 8192, 32), 0.62),
    (Shape(8, 8192, 16), 0.62),
    (Shape(8, 8192, 128), 1.06),
    (Shape(8, 8192, 32, head_dim=64), None),
    (Shape(8, 8192, 32, q_heads=16, kv_heads=8, head_dim=256), None),
    (Shape(1, 4096, 256, q_heads=16, kv_heads=8, head_dim=256), None),
    (Shape(1, 4096, 256, q_heads=16, kv_heads=2, head_dim=512), None),
    (Shape(1, 0, 8192), 1.05),
    (Shape(1, 28672, 4096), 1.05),
)


def _unaligned(scale: torch.Tensor) -> torch.Tensor:
    """The same bytes, one behind a multiple of 16."""
    room = torch.empty(scale.numel() + 1, dtype=torch.uint8, device=scale.device)
    room[1:] = scale.flatten()
    return room[1:].view(scale.shape)


class CodedBuffers(Buffers):
    """Codes and scale bytes beside caches of their values."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__(shape, device)
        slots = torch.arange(self.k_cache.shape[0] * shape.page, device=device)
        codes = torch.empty(2, *self.k_cache.shape, dtype=torch.uint8, device=device)
        self.k_codes, self.v_codes = codes.view(torch.float8_e4m3fn)
        sizes = (2, self.k_cache.shape[0], shape.kv_heads, shape.page)
        self.k_scale, self.v_scale = torch.empty(sizes, dtype=torch.uint8, device=device)
        ops.store_kv_cache(
            self.k_cache.flatten(0, 1), self.v_cache.flatten(0, 1), self.k_codes, self.v_codes,
            slots, k_scale=self.k_scale, v_scale=self.v_scale,
        )  # fmt: skip
        for cache, part, scale in (
            (self.k_cache, self.k_codes, self.k_scale), (self.v_cache, self.v_codes, self.v_scale),
        ):  # fmt: skip
            exponent = scale.permute(0, 2, 1).float() - 127
            cache.copy_(part.float() * torch.exp2(exponent)[..., None])
        self.k, self.v = self.step_rows()
        self.unaligned = _unaligned(self.k_scale), _unaligned(self.v_scale)


class CodedProblem(Problem):
    """Our op over the codes."""

    def values(self, part: Buffers) -> None:
        """Our op over their values."""
        super().call(part)

    def call(self, part: Buffers, *, is_portable: bool = False) -> None:
        assert isinstance(part, CodedBuffers)
        scales = part.unaligned if is_portable else (part.k_scale, part.v_scale)
        ops.block_attention(
            part.q, part.k, part.v, part.k_codes, part.v_codes, part.table, self.starts,
            self.context, self.ends, self.kinds, block_size=BLOCK, max_seqlen_q=self.max_query,
            max_context_len=self.max_context, sliding_window=self.shape.window,
            k_scale=scales[0], v_scale=scales[1], out=part.out, workspace=self.space,
        )  # fmt: skip

    def check(self, part: Buffers) -> Agreement:
        """As over values, and the bits of those."""
        agreement = super().check(part)
        found = part.out.clone()
        self.values(part)
        if not torch.equal(found, part.out):
            raise ValueError("attention over codes has other bits than over their values")
        return agreement


def _case(shape: Shape, share: float | None, device: str) -> Case:
    context = 2.0 * shape.kv_heads * shape.requests * shape.context
    read = shape.read_bytes - context * (shape.head_dim - 1)
    sets = [CodedBuffers(shape, device) for _ in range(num_rotations(read, 48))]
    problem = CodedProblem(shape, device)
    peers = {PEER: [lambda part=part: problem.values(part) for part in sets]}
    if shape.context:
        peers[PORTABLE] = [lambda part=part: problem.call(part, is_portable=True) for part in sets]
    return Case(
        "coded", "block_attention, codes", shape.text,
        [lambda part=part: problem.call(part) for part in sets], lambda: problem.check(sets[0]),
        read, shape.written_bytes, shape.flops, len(sets) * (read + shape.written_bytes),
        peers=peers, judges={} if share is None else {PEER: Limit(share)},
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Decode and prefill."""
    if is_small:
        yield _case(Shape(2, 64, 32, 4, 2, 64, page=16), 1.0, device)
        return
    for shape, share in SHARES:
        yield _case(shape, share, device)
