# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma: canvases without a mask token, accepted by an entropy bound and renoised.

Also computes the self-conditioning signal, the expected embedding of each position, which the next
step of the same canvas reads from the engine's buffer.

Symbols: n logits rows, Nb canvases of B positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffulex import ops
from diffulex.errors import CheckpointError
from diffulex.ops.workspace import empty_workspace, soft_embedding_workspace_bytes
from diffulex.samplers.base import RULE_KEYS, RowSampler
from diffulex.samplers.row_stage import RowRecords, RowStage

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.config.types import ConfigTree
    from diffulex.samplers.inputs import CanvasArrays, SamplerInputs

__all__ = ["DiffusionGemmaSampler"]

_PREFIX = "diffusion_gemma_"
_PUBLISHED_KEYS = (
    "confidence_threshold",
    "max_denoising_steps",
    "stability_threshold",
    "t_max",
    "t_min",
)
_CONVERGED = 128
_LOGSUMEXP = 4


class DiffusionGemmaSampler(RowSampler):
    """Draws and argmax of every position; the next canvas, or the argmax canvas at the end."""

    is_capturable = True

    family_defaults: ClassVar[Mapping[str, Any]] = {
        "block_size": 256,
        "buffer_size": 1,
        "decoding_strategy": "diffusion_gemma",
        # A step has 256 rows of 262,144 logits per request.
        "max_num_reqs": 4,
    }
    unused_keys = RULE_KEYS | {
        "confidence_space",
        "confidence_type",
        "demote_token_ids",
        "forced_gate",
    }
    #: The temperature follows the canvas' own schedule.
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"min_p", "temperature", "top_k", "top_p"})

    def __init__(self, config: ConfigTree) -> None:
        self._softcap = float(getattr(config.model.spec, "final_logit_softcap", None) or 0.0)
        stage = RowStage(
            config, top_k=1, is_masked=False, softcap=self._softcap, is_topk_tempered=True
        )
        super().__init__(config, stage)
        decoding = config.decoding
        self._entropy_bound = decoding.diffusion_gemma_entropy_bound
        self._stability_threshold = decoding.diffusion_gemma_stability_threshold
        self._confidence_threshold = decoding.diffusion_gemma_confidence_threshold
        self._weight: Tensor | None = None
        self._embed_scale = 1.0
        self._signal_rows: Tensor | None = None
        self._workspace: Tensor | None = None
        self._workspace_bytes = 0

    @staticmethod
    def published_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
        """Configuration keys from the family's own keys of `generation_config.json`."""
        found = {
            _PREFIX + key: generation_config[key]
            for key in _PUBLISHED_KEYS
            if generation_config.get(key) is not None
        }
        sampler = generation_config.get("sampler_config")
        if sampler is None:
            return found
        if not isinstance(sampler, Mapping):
            raise CheckpointError(
                f"generation_config.json: sampler_config: expected an object, got {sampler!r}"
            )
        if sampler.get("entropy_bound") is not None:
            found[_PREFIX + "entropy_bound"] = sampler["entropy_bound"]
        return found

    def bind_model(self, model: Any) -> None:
        """Takes the embedding table that signals are made of."""
        self._weight = model.soft_embedding_weight
        self._embed_scale = float(model.embed_scale)

    def reserve(self, num_rows: int, vocab_size: int) -> None:
        super().reserve(num_rows, vocab_size)
        self._reserve_signals(num_rows, vocab_size)

    def __call__(self, inputs: SamplerInputs) -> None:
        canvas = inputs.canvas
        assert canvas is not None
        records = self.rows.run(inputs)
        if inputs.tokens.size(0) == 0:
            return
        assert records.topk_ids is not None
        torch.ops.diffulex.accept_gemma(
            inputs.tokens,
            inputs.row_index,
            inputs.valid_len,
            canvas.prev_argmax,
            canvas.stable_run,
            canvas.steps_left,
            canvas.renoise_ids,
            records.ids,
            records.stats,
            records.topk_ids[:, 0],
            inputs.write_ids,
            canvas.argmax,
            inputs.confidence,
            inputs.flags,
            entropy_bound=self._entropy_bound,
            stability_threshold=self._stability_threshold,
            confidence_threshold=self._confidence_threshold,
        )
        inputs.masks_left.zero_()
        self._write_signals(inputs, canvas, records)

    def _write_signals(
        self, inputs: SamplerInputs, canvas: CanvasArrays, records: RowRecords
    ) -> None:
        """The signal of every row to the place of its request; zero once a canvas converged.

        Rows of no canvas (padding, committed canvases) go to the last place, which nothing reads.
        """
        num_rows, vocab_size = inputs.logits.shape
        self._reserve_signals(num_rows, vocab_size)
        assert self._weight is not None
        assert self._signal_rows is not None
        head = self.rows.head_of(inputs.logits)
        # Of several ranks each sums over the ids of its columns.
        start = 0 if head is None else head.vocab_start
        block_size = inputs.tokens.size(1)
        rel = torch.arange(block_size, dtype=torch.int64, device=inputs.logits.device)
        place = canvas.request_slots.long()[:, None] * block_size + rel
        is_open = ((inputs.flags & _CONVERGED) == 0)[:, None].expand_as(place)
        # One more row takes the positions without logits.
        row = torch.where(inputs.row_index >= 0, inputs.row_index, num_rows).long().flatten()
        elsewhere = canvas.signals.size(0) - 1
        place_of_row = place.new_full((num_rows + 1,), elsewhere)
        place_of_row.scatter_(0, row, place.flatten())
        is_valid = inputs.gate.new_zeros(num_rows + 1)
        is_valid.scatter_(0, row, is_open.flatten().to(is_valid.dtype))
        signals = self._signal_rows[:num_rows]
        ops.soft_embedding(
            inputs.logits,
            records.stats[:num_rows, _LOGSUMEXP],
            self._weight[start : start + vocab_size],
            inv_temperature=inputs.inv_temperature,
            row_valid=is_valid[:num_rows],
            normalizer=self._embed_scale,
            softcap=self._softcap,
            vocab_start=start,
            out=signals,
            workspace=self._workspace,
        )
        if head is not None:
            head.sum_(signals)
        canvas.signals.index_copy_(0, place_of_row[:num_rows], signals)

    def _reserve_signals(self, num_rows: int, vocab_size: int) -> None:
        weight = self._weight
        if weight is None:
            raise RuntimeError("DiffusionGemmaSampler: expected bind_model() before the first step")
        hidden_size, device = weight.size(1), weight.device
        if self._signal_rows is None or self._signal_rows.size(0) < num_rows:
            self._signal_rows = torch.empty(
                num_rows, hidden_size, dtype=torch.float32, device=device
            )
        dtype = str(weight.dtype).removeprefix("torch.")
        needed = soft_embedding_workspace_bytes(
            num_rows, vocab_size, hidden_size, dtype, device.type
        )
        if needed > self._workspace_bytes:
            self._workspace = empty_workspace(needed, device)
            self._workspace_bytes = needed
