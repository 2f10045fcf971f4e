# SPDX-License-Identifier: Apache-2.0
"""Acceptance ops at the blocks of one request and of many, and canvases of 256 positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex import ops
from kernel_bench.agreement import FLOAT32, Agreement
from kernel_bench.report import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

VOCAB, TOP_K = 512, 8
MASK = VOCAB - 1
#: Threshold and other settings that let a part of the masks pass.
RULE_SETTINGS: dict[str, dict[str, float]] = {
    "STATIC": {"denoising_steps": 16},
    "DYNAMIC": {"denoising_steps": 16},
    "FACTOR": {"factor": 1.5},
    "ENTROPY_BOUND": {"entropy_bound": 0.5},
    "HIERARCHY": {"low_threshold": 0.3},
}


class _Blocks:
    """Blocks of one step on the CPU and on the device, half of their positions masks."""

    def __init__(self, num_blocks: int, size: int, device: str) -> None:
        generator = torch.Generator().manual_seed(num_blocks * size)
        rows = num_blocks * size
        logits = torch.randn(rows, VOCAB, generator=generator) * 4
        stats = ops.token_stats(logits, forbidden_ids=torch.tensor([MASK]), top_k=TOP_K)
        assert stats.topk_ids is not None
        assert stats.topk_probs is not None
        tokens = torch.randint(0, MASK, (num_blocks, size), generator=generator)
        tokens[torch.rand(num_blocks, size, generator=generator) < 0.5] = MASK
        self.host: dict[str, torch.Tensor] = {
            "tokens": tokens,
            "row_index": torch.arange(rows, dtype=torch.int32).view(num_blocks, size),
            "zeros": torch.zeros(num_blocks, dtype=torch.int32),
            "limits": torch.full((num_blocks,), 16, dtype=torch.int32),
            "gate": torch.ones(num_blocks, dtype=torch.uint8),
            "threshold": torch.full((num_blocks,), 0.6),
            "ids": stats.ids,
            "stats": stats.stats,
            "argmax_ids": stats.topk_ids[:, 0].contiguous(),
            "topk_ids": stats.topk_ids,
            "topk_probs": stats.topk_probs,
            "renoise_ids": torch.randint(0, MASK, (num_blocks, size), generator=generator),
            "prev_argmax": stats.topk_ids[:, 0].view(num_blocks, size).clone(),
            "steps_left": torch.full((num_blocks,), 48, dtype=torch.int32),
        }
        self.device = {name: tensor.to(device) for name, tensor in self.host.items()}
        self.num_bytes = sum(4.0 * t.numel() for t in self.host.values())


def _case(
    name: str, shape: str, blocks: _Blocks, call: Callable[[dict[str, torch.Tensor], Any], Any]
) -> Case:
    out = call(blocks.device, None)

    def check() -> Agreement:
        expected = call(blocks.host, None)
        got = call(blocks.device, out)
        pairs = [(g, e) for g, e in zip(got, expected) if e is not None]
        agreement = Agreement(sum(e.numel() for _, e in pairs), FLOAT32)
        for tensor, reference in pairs:
            if reference.is_floating_point():
                agreement.add(tensor.cpu(), reference)
            else:
                agreement.claim(tensor.cpu() == reference)
        return agreement

    calls = [lambda: call(blocks.device, out)]
    return Case("acceptance", name, shape, calls, check, blocks.num_bytes)


def _mask_fill(rule: ops.AcceptRule) -> Callable[[dict[str, torch.Tensor], Any], Any]:
    def call(t: dict[str, torch.Tensor], out: Any) -> Any:
        return ops.accept_mask_fill(
            t["tokens"], t["row_index"], t["zeros"], t["gate"], t["threshold"], t["zeros"],
            t["ids"], t["stats"], mask_token_id=MASK, rule=rule, out=out,
            **RULE_SETTINGS.get(rule.name, {}),
        )  # fmt: skip

    return call


def _edit(t: dict[str, torch.Tensor], out: Any) -> Any:
    return ops.accept_edit(
        t["tokens"], t["row_index"], t["zeros"], t["gate"], t["threshold"], t["threshold"],
        t["zeros"], t["zeros"], t["limits"], t["ids"], t["stats"], mask_token_id=MASK, out=out,
    )  # fmt: skip


def _dmax(t: dict[str, torch.Tensor], out: Any) -> Any:
    return ops.accept_dmax(
        t["tokens"], t["row_index"], t["zeros"], t["gate"], t["threshold"], t["zeros"],
        t["ids"], t["stats"], mask_token_id=MASK, argmax_ids=t["argmax_ids"],
        topk_ids=t["topk_ids"], topk_probs=t["topk_probs"], merge_top_k=TOP_K, out=out,
    )  # fmt: skip


def _gemma(t: dict[str, torch.Tensor], out: Any) -> Any:
    return ops.accept_gemma(
        t["tokens"], t["row_index"], t["prev_argmax"], t["zeros"], t["steps_left"],
        t["renoise_ids"], t["ids"], t["stats"], t["argmax_ids"], entropy_bound=0.1,
        stability_threshold=1, confidence_threshold=0.005, out=out,
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    for num_blocks in (1,) if is_small else (1, 32):
        blocks = _Blocks(num_blocks, 32, device)
        shape = f"{num_blocks} x 32"
        for rule in ops.AcceptRule:
            yield _case("accept_mask_fill", f"{shape}, {rule.name}", blocks, _mask_fill(rule))
        yield _case("accept_edit", shape, blocks, _edit)
        yield _case("accept_dmax", f"{shape}, merge {TOP_K}", blocks, _dmax)
    for num_blocks in (1,) if is_small else (1, 8):
        yield _case("accept_gemma", f"{num_blocks} x 256", _Blocks(num_blocks, 256, device), _gemma)
