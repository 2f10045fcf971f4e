# SPDX-License-Identifier: Apache-2.0
"""`DiffusionEngine`: the documented interface over the engine, for programs and for modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffulex_edge.model import EdgeDecoder, EdgeProgram
from diffulex_edge.program import PteModel
from diffulex_edge.runtime.blocks import DiffusionBlockManager

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from diffulex import Diffulex, SamplingParams
    from diffulex.engine.metrics import RequestMetrics
    from diffulex.engine.output import StreamEvent

__all__ = ["DiffusionEngine", "DiffusionGenerationConfig", "GenerationResult", "ModuleProgram"]

#: What a program forces; an engine over a module is held to the same.
_HOST = {"device": "cpu", "max_num_reqs": 1, "enable_prefix_caching": False, "run_ahead": "off"}


@dataclass(frozen=True, slots=True)
class DiffusionGenerationConfig:
    """How an answer is decoded; None takes the checkpoint's or the family's value.

    Attributes:
        num_iterations: steps per block, the last of which accepts everything; None: as many as the
            rule needs.
        confidence_threshold: probability above which a position is accepted.
        eos_token_id: one more stop id beside `stop_token_ids`.
    """

    max_new_tokens: int = 128
    num_iterations: int | None = None
    block_size: int | None = None
    confidence_threshold: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    mask_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    margin_confidence: bool = False
    neg_entropy: bool = False
    seed: int | None = None
    ignore_eos: bool = False
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens: expected >= 0, got {self.max_new_tokens}")
        if self.margin_confidence and self.neg_entropy:
            raise ValueError("neg_entropy: expected one confidence, got margin_confidence as well")

    def sampling_params(self) -> SamplingParams:
        """The part that a request carries."""
        from diffulex import SamplingParams  # noqa: PLC0415 (the engine)

        return SamplingParams(
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop_token_ids=(
                *self.stop_token_ids,
                *(() if self.eos_token_id is None else (self.eos_token_id,)),
            ),
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            accept_threshold=self.confidence_threshold,
        )

    def settings(self) -> dict[str, Any]:
        """The part that an engine is built with."""
        found: dict[str, Any] = {"block_size": self.block_size, "mask_token_id": self.mask_token_id}
        if self.num_iterations is not None:
            found |= {
                "acceptance_rule": "static",
                "denoising_steps": self.num_iterations,
                "force_accept_last_step": True,
            }
        if self.margin_confidence:
            found["confidence_type"] = "margin_confidence"
        if self.neg_entropy:
            found["confidence_type"] = "neg_entropy"
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """An answer."""

    token_ids: tuple[int, ...]
    #: Prompt and answer.
    sequence: tuple[int, ...]
    text: str
    #: stop, length or abort.
    finish_reason: str
    nfe: int
    #: Forwards, tokens, times; None where nothing was decoded.
    stats: RequestMetrics | None = None


class ModuleProgram:
    """A decoder in PyTorch with the interface of a loaded program."""

    def __init__(self, decoder: EdgeDecoder, *, max_rows: int = 256, max_logits: int = 64) -> None:
        self._bounds = max_rows, max_logits
        self.module = EdgeProgram(decoder)

    @property
    def max_rows(self) -> int:
        """Most rows of a call."""
        return self._bounds[0]

    @property
    def max_logits(self) -> int:
        """Most logits rows of a call."""
        return self._bounds[1]

    @torch.inference_mode()
    def __call__(
        self, tokens: Tensor, positions: Tensor, visible_end: Tensor, logits_rows: Tensor
    ) -> Tensor:
        """Logits [n, V]; see `PteProgram`."""
        logits: Tensor = self.module(tokens.unsqueeze(0), positions, visible_end, logits_rows)
        return logits[0]


class DiffusionEngine:
    """One model, one sequence at a time. Made by `from_pte` or `from_model`."""

    def __init__(self, build: Callable[[dict[str, Any]], Diffulex]) -> None:
        self._build = build
        #: Of the engine; None where it could not be built.
        self._settings: dict[str, Any] | None = {}
        self._engine = build({})
        #: Blocks of the answer that was generated last.
        self.blocks = DiffusionBlockManager(self._engine.config.model.mask_token_id)

    @classmethod
    def from_pte(cls, path: Path | str, **settings: Any) -> DiffusionEngine:
        """An engine over a bundle, or over the program in it; `settings` as those of `Diffulex`."""
        from diffulex import Diffulex  # noqa: PLC0415 (the engine)

        return cls(lambda further: Diffulex(str(path), **{**settings, **further}))

    @classmethod
    def from_model(
        cls, model: EdgeDecoder, directory: Path | str | None = None, **settings: Any
    ) -> DiffusionEngine:
        """An engine over a decoder in PyTorch.

        Args:
            model: with its weights.
            directory: checkpoint whose tokenizer and defaults are used; None: prompts are ids.
            settings: as those of `Diffulex`.
        """

        def build(further: dict[str, Any]) -> Diffulex:
            from diffulex import Diffulex  # noqa: PLC0415 (the engine)
            from diffulex.config.config import Config, read_model_facts  # noqa: PLC0415
            from diffulex.config.types import ModelFacts  # noqa: PLC0415

            flat = {**_HOST, "max_model_len": model.spec.max_positions, **settings, **further}
            if directory is None:
                facts = ModelFacts(model.spec.family, Path(), model.spec, {})
            else:
                facts = replace(read_model_facts(str(directory), flat), program=None)
            rows = model.max_seq_len - 32
            flat["max_model_len"] = min(int(flat["max_model_len"]), rows)
            config = Config.resolve(str(directory or model.spec.family), facts, flat)
            wrapped = PteModel(model.spec, ModuleProgram(model))
            return Diffulex.from_components(config, wrapped, facts.tokenizer)

        return cls(build)

    @property
    def engine(self) -> Diffulex:
        """The engine that decodes."""
        return self._engine

    def generate(
        self,
        prompt: Sequence[int] | str,
        config: DiffusionGenerationConfig | None = None,
        callback: Callable[[StreamEvent], None] | None = None,
    ) -> GenerationResult:
        """Decodes one prompt, of token ids or text, to its end.

        `callback` receives an event per step, with a snapshot of the blocks, which `blocks` follows.

        Raises:
            PromptError: the prompt cannot be served.
        """
        config = config or DiffusionGenerationConfig()
        if config.settings() != self._settings:
            self._rebuild(config.settings())
        ids = self._engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if config.max_new_tokens == 0:
            return GenerationResult((), tuple(ids), "", "length", 0)
        self.blocks.reset()
        output = None
        for event in self._engine.stream(ids, config.sampling_params(), mode="denoise"):
            if event.snapshot is not None:
                self.blocks.follow(event.snapshot)
            if callback is not None:
                callback(event)
            output = event.output or output
        assert output is not None
        return GenerationResult(
            token_ids=output.token_ids,
            sequence=output.full_token_ids,
            text=output.text,
            finish_reason=output.finish_reason,
            nfe=output.metrics.nfe,
            stats=output.metrics,
        )

    def _rebuild(self, settings: dict[str, Any]) -> None:
        self._engine.close()
        self._settings = None
        self._engine = self._build(settings)
        self._settings = settings
        self.blocks = DiffusionBlockManager(self._engine.config.model.mask_token_id)

    def close(self) -> None:
        """Frees the engine."""
        self._engine.close()

    def __enter__(self) -> DiffusionEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
