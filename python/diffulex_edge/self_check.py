# SPDX-License-Identifier: Apache-2.0
"""Compares a program with its model, call by call, before the file is left to anybody."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from diffulex.errors import ConfigError
from diffulex_edge.errors import ProgramError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor, nn

    from diffulex_edge.lowering import ProgramShape
    from diffulex_edge.recipes import Recipe

    Caller = Callable[["Call"], "Tensor"]

__all__ = [
    "Agreement",
    "Call",
    "check_agreement",
    "check_tolerance",
    "compare",
    "eager_caller",
    "make_trace",
    "run_trace",
]

_NUM_BLOCKS = 3


class Call(NamedTuple):
    """Arguments of one call: tokens, positions, ends [S], rows [n]; all int64."""

    tokens: Tensor
    positions: Tensor
    visible_end: Tensor
    logits_rows: Tensor


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two lists of logits are apart."""

    #: Largest difference, and the largest magnitude of the reference.
    max_error: float
    scale: float
    #: Share of rows with the same best id.
    argmax: float
    is_finite: bool
    num_rows: int

    def to_json(self) -> dict[str, Any]:
        """Fields as they stand in edge.json."""
        return asdict(self)


def make_trace(
    shape: ProgramShape, block_size: int, vocab_size: int, avoid: Collection[int], seed: int = 0
) -> list[Call]:
    """Calls that meet the traps of a cache that is written in place.

    A prompt in two calls; blocks that are run with other tokens first, so that a cache that is not
    overwritten shows; a step back to an earlier position; and rows up to the end of the cache.
    """
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor([i for i in range(vocab_size) if i not in set(avoid)] or [0])

    def call(begin: int, end: int, block: int) -> Call:
        count = end - begin
        ids = allowed[torch.randint(len(allowed), (count,), generator=generator)]
        positions = torch.arange(begin, end)
        ends = ((positions // block + 1) * block).clamp(max=end)
        rows = shape.max_logits if shape.is_static else min(shape.max_logits, count)
        picked = torch.randperm(count, generator=generator)[:rows].sort().values
        return Call(ids, positions, ends, picked)

    block = shape.max_rows if shape.is_static else min(block_size, shape.max_rows)
    last = shape.cache_rows
    chunk = block * max(1, min(shape.max_rows // block, last // (4 * block)))
    calls = [call(0, chunk, block)]
    if 2 * chunk <= last:
        calls.append(call(chunk, 2 * chunk, block))
    start = min(2 * chunk, last - block)
    for index in range(_NUM_BLOCKS):
        begin = min(start + index * block, last - block)
        calls += [call(begin, begin + block, block) for _ in range(2)]
    back = max(0, start - block)
    calls.append(call(back, back + block, block))
    calls.append(call(last - block, last, last))
    if not shape.is_static:
        calls.append(call(last - 1, last, last))  # a single row
    return calls


def eager_caller(program: nn.Module) -> Caller:
    """Runs calls in PyTorch."""

    @torch.inference_mode()
    def run(call: Call) -> Tensor:
        logits: Tensor = program(call.tokens.unsqueeze(0), *call[1:])
        return logits[0].clone()

    return run


def run_trace(caller: Caller, calls: Sequence[Call]) -> list[Tensor]:
    """Logits of every call, in order."""
    return [caller(call) for call in calls]


def compare(found: Sequence[Tensor], reference: Sequence[Tensor]) -> Agreement:
    """Differences of logits rows [n, V] of the same calls."""
    a, b = torch.cat(list(found)), torch.cat(list(reference))
    is_finite = bool(a.isfinite().all())
    return Agreement(
        max_error=float((a - b).abs().max()) if is_finite else float("inf"),
        scale=max(1.0, float(b.abs().max())),
        argmax=float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        is_finite=is_finite,
        num_rows=a.size(0),
    )


def check_tolerance(tolerance: float | None) -> None:
    """Raises ConfigError unless a tolerance is None or a positive number."""
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance > 0):
        raise ConfigError(f"tolerance: expected a finite number > 0, got {tolerance}")


def check_agreement(
    found: Agreement,
    recipe: Recipe,
    *,
    tolerance: float | None = None,
    where: str = "self-check",
) -> None:
    """Raises ProgramError unless a program computes what its own model does.

    Args:
        recipe: of the program and of its model.
        tolerance: share of the largest logit; None: by the recipe.
        where: how the message begins.
    """
    limit = recipe.tolerance if tolerance is None else tolerance
    if not found.is_finite:
        raise ProgramError(f"{where}: expected finite logits, got NaN or infinite ones")
    if not found.max_error <= limit * found.scale:  # NaN is no agreement
        raise ProgramError(
            f"{where}: expected logits within {limit * found.scale:.3g} of the model's,"
            f" got a difference of {found.max_error:.3g}"
        )
    if found.argmax < recipe.least_agreement:
        raise ProgramError(
            f"{where}: expected the model's best id in {recipe.least_agreement:.0%} of the rows,"
            f" got {found.argmax:.1%}"
        )
