# SPDX-License-Identifier: Apache-2.0
"""A kernel that only reads, for the ceiling of ops that only read. Needs Triton and a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK = 8192
_PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _sums(source, sums, num_blocks, block: language.constexpr):  # type: ignore[no-untyped-def]
    total = language.zeros((block,), dtype=language.float32)
    for index in range(language.program_id(0), num_blocks, language.num_programs(0)):
        start = index.to(language.int64) * block
        total += language.load(source + start + language.arange(0, block))
    language.store(sums + language.program_id(0), language.sum(total))


def read_all(words: torch.Tensor) -> Callable[[], object]:
    """A call that reads all of a float32 tensor whose size is a multiple of 8,192."""
    num_blocks, rest = divmod(words.numel(), _BLOCK)
    if rest:
        raise ValueError(f"words: expected a multiple of {_BLOCK} elements, got {words.numel()}")
    processors = torch.cuda.get_device_properties(words.device).multi_processor_count
    grid = (processors * _PROGRAMS_PER_PROCESSOR,)
    sums = torch.empty(grid, device=words.device)
    return lambda: _sums[grid](words, sums, num_blocks, _BLOCK, num_warps=8)
