# SPDX-License-Identifier: Apache-2.0
"""How long a decode step may take on an H200, and what a Python and Triton engine took there.

CUDA graphs, random weights, bfloat16 or what `quantization` names; a step runs the valid rows alone unless
the case says otherwise. The engine was measured on 2026-11-20 in bfloat16. Which experts its router hit was not recorded; rows that hit
more experts have more to read, so a model with experts may also pass by its own floor. Of bfloat16 at
batch 8 the target was 5.5 ms, for which its products would need 90 % of the tensor cores' measured rate
and all else no time: 8.0 is the bound that it may not fall behind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "FLOOR_FACTOR",
    "PREFILL_SHARES",
    "SERVING_TARGETS",
    "TARGETS",
    "StepCase",
    "judge",
    "of_family",
]

#: A step of a model with experts passes within this many times the time to read its weights.
FLOOR_FACTOR = 1.25
#: Shape, scheme and tokens of a prompt -> share of the time in bfloat16.
PREFILL_SHARES = {("sdar-8b", "fp8", 8192): 0.68}
#: Shape and scheme -> concurrent requests -> tokens per second over HTTP; prompts of 256 and answers of 64 tokens.
SERVING_TARGETS = {("sdar-8b", "fp8"): {1: 265, 16: 3000, 64: 6000}}


class StepCase(NamedTuple):
    """One measurement; times in milliseconds, None = not known or not set.

    Attributes:
        buffer_size, block_size: of `multi_bd`; None: the strategy of the family with its sizes.
        quantization_ignore: modules that keep their dtype; None: what the family keeps.
        is_packing: whether the device leaves out void rows.
    """

    shape: str
    buffer_size: int | None
    prompt_len: int
    batch: int
    block_size: int | None = 32
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    quantize_head: bool = False
    quantization_ignore: tuple[str, ...] | None = None
    is_packing: bool = True
    target_ms: float | None = None
    peer_ms: float | None = None


def _family(shape: str, batch: int) -> StepCase:
    return StepCase(shape, None, 1024, batch, None)


def _cases(case: StepCase, peer_ms: float | None = None, **targets: float | None) -> list[StepCase]:
    """`case` with the target of each scheme; the other engine ran in bfloat16."""
    return [
        case._replace(
            quantization=scheme, target_ms=target, peer_ms=peer_ms if scheme == "none" else None
        )
        for scheme, target in targets.items()
    ]


TARGETS = (
    *_cases(StepCase("sdar-8b", 1, 256, 1), 8.39, none=4.4, fp8=2.85, int4=2.15),
    *_cases(StepCase("sdar-8b", 1, 256, 8), 14.5, none=8.0, fp8=4.9, int4=8.0),
    *_cases(StepCase("sdar-8b", 1, 256, 8, quantize_head=True), fp8=4.4),
    *_cases(StepCase("sdar-8b", 1, 3000, 1), 16.3, none=4.7),
    *_cases(StepCase("sdar-8b", 1, 3000, 8), 25.2, none=6.3, fp8=5.6),
    *_cases(StepCase("sdar-8b", 1, 3000, 8, kv_cache_dtype="fp8_e4m3"), fp8=5.3),
    *_cases(StepCase("sdar-8b", 4, 256, 1), 10.1, none=5.5, fp8=2.95),
    *_cases(StepCase("sdar-8b", 4, 256, 8), 37.9, none=8.6, fp8=5.2),
    *_cases(StepCase("sdar-8b", 4, 256, 8, is_packing=False), fp8=14.5),
    *_cases(StepCase("llada2-mini", 1, 256, 1), 4.82, none=0.6 * 4.82, fp8=1.9),
    *_cases(StepCase("llada2-mini", 1, 256, 8), 6.93, none=0.6 * 6.93, fp8=4.0),
    # Targets of 4 bits are of experts in 4 bits, whatever the family keeps.
    *_cases(StepCase("llada2-mini", 1, 256, 1, quantization_ignore=()), int4=1.7),
    *_cases(StepCase("llada2-mini", 1, 256, 8, quantization_ignore=()), int4=3.2),
    *_cases(StepCase("llada2-mini", 1, 3000, 1), none=None),
    *_cases(StepCase("llada2-mini", 1, 3000, 8), none=None),
    *_cases(StepCase("llada2-mini", 4, 256, 1), 6.78, none=None),
    *_cases(StepCase("llada2-mini", 4, 256, 8), 12.1, none=None),
    # In bfloat16 it does not fit.
    *_cases(StepCase("llada2-flash", 1, 256, 1), fp8=5.5),
    *_cases(StepCase("llada2-flash", 1, 256, 1, quantization_ignore=()), int4=4.0),
    *_cases(StepCase("sdar-4b", 1, 256, 128, block_size=4), fp8=5.4),
    *_cases(_family("diffusion-gemma-26b-a4b", 1), none=15.0, fp8=8.8),
    *_cases(_family("diffusion-gemma-26b-a4b", 8), none=45.0),
    *_cases(_family("llada-8b", 8), none=14.0),
    *_cases(_family("dream-7b", 8), none=14.0),
)


def of_family(shape: str, batch: int, quantization: str, prompt_len: int) -> float | None:
    """The target of a step under the family's strategy and sizes."""
    wanted = _family(shape, batch)._replace(quantization=quantization, prompt_len=prompt_len)
    found = (case for case in TARGETS if case._replace(target_ms=None, peer_ms=None) == wanted)
    return next((case.target_ms for case in found), None)


#: Rows of a step meet all of their experts, so that a target needs no allowance for routing.
_MEETS_ALL_EXPERTS = frozenset({"diffusion-gemma-26b-a4b"})


def judge(row: dict[str, Any]) -> str | None:
    """pass or miss; None for rows that nothing is asked of."""
    limits = [] if row.get("target_ms") is None else [row["target_ms"]]
    meets_all = row.get("shape", row.get("model")) in _MEETS_ALL_EXPERTS
    if row.get("experts") is not None and not meets_all:
        limits.append(FLOOR_FACTOR * row["floor_ms"])
    if not limits:
        return None
    return "pass" if row["step_ms"] <= max(limits) else "miss"
