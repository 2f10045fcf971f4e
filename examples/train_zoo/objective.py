# SPDX-License-Identifier: Apache-2.0
"""What the training script asks of an objective, and what the objectives on ``Transformer`` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

import dataset
from block_decoders import choose, merge_embeddings
from families import load_transformer, save_transformer
from training_loop import weighted_cross_entropy
from transformer import Shape, Transformer, shrink

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer
    from torch import Tensor, nn

    from reference_decoder import Completion

#: Sequence length of the problems of levels 1 to 3: the longest is 108 tokens.
CLEAN_LEN = 112
MAX_PROMPT = 80
MAX_TOKENS = 96


@dataclass(frozen=True)
class TokenIds:
    """Ids that the objectives need."""

    vocab_size: int
    mask: int
    end_of_text: int
    turn_end: int
    digits: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenIds:
        """Ids of the demo model's tokenizer."""
        return cls(
            vocab_size=tokenizer.get_vocab_size(),
            mask=dataset.token_id(tokenizer, dataset.MASK),
            end_of_text=dataset.token_id(tokenizer, dataset.END_OF_TEXT),
            turn_end=dataset.token_id(tokenizer, dataset.TURN_END),
            digits=tuple(dataset.token_id(tokenizer, str(digit)) for digit in range(10)),
        )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return (self.turn_end, self.end_of_text)


@dataclass(frozen=True)
class Setting:
    """One row of the report: a name, the parameters shown with it, and how to decode."""

    name: str
    parameters: dict[str, Any]
    decode: Callable[[list[list[int]]], list[Completion]]


class Objective(ABC):
    """One training objective with its model, its checkpoint and its reference decoder."""

    name: ClassVar[str]
    directory: ClassVar[str]  # of the shipped checkpoint, under examples/zoo
    block_size: ClassVar[int]
    max_noisy_len: ClassVar[int]  # longest answer, counted from the start of its first block
    length: ClassVar[int] = CLEAN_LEN
    peak_lr: ClassVar[float] = 3e-3
    ids: TokenIds
    model: nn.Module
    progress: float = 0.0
    #: Share of the run after which a model meets its own predictions: before, they are mostly wrong.
    own_predictions_from: float = 0.3

    #: A second run that starts from the checkpoint of the first one.
    is_second_stage: bool = False

    @property
    def uses_own_predictions(self) -> bool:
        """Whether the current step trains on the model's own predictions."""
        return self.is_second_stage or self.progress >= self.own_predictions_from

    @abstractmethod
    def compute_loss(self, tokens: Tensor, prompt_len: Tensor, used_len: Tensor) -> Tensor:
        """Loss of one batch of sequences."""

    @abstractmethod
    def compile(self) -> None:
        """Use torch.compile for the forwards of the training steps."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write config.json and model.safetensors."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read the weights of a saved checkpoint of the same shape."""

    @abstractmethod
    def engine_defaults(self) -> dict[str, Any]:
        """Fields that the objective adds to generation_config.json."""

    @abstractmethod
    def settings(self, device: torch.device) -> list[Setting]:
        """Settings to judge, the model's own first; ``model`` is then on ``device``."""

    def after_step(self, progress: float) -> None:
        """Called after each optimiser step with the finished share of the run."""
        self.progress = progress


@dataclass(frozen=True)
class SoftInputs:
    """Merged inputs of the first rows: token id (-1: none) and its probability, [batch, rows]."""

    ids: Tensor
    probabilities: Tensor

    @staticmethod
    def none(like: Tensor) -> SoftInputs:
        """No merged input."""
        return SoftInputs(torch.full_like(like, -1), torch.zeros(like.shape, device=like.device))


def embed(model: Transformer, tokens: Tensor, soft: SoftInputs | None) -> Tensor | None:
    """Input embeddings when some are merged, else None."""
    if soft is None:
        return None
    num_rows, mask_id = soft.ids.shape[1], model.shape.mask_token_id
    hard: Tensor = model.embed_tokens(tokens)
    table = model.embed_tokens.weight
    merged = merge_embeddings(table, hard[:, :num_rows], soft.ids, soft.probabilities, mask_id)
    return torch.cat([merged, hard[:, num_rows:]], dim=1)


def weighted_loss(
    model: Transformer,
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor,
    targets: Tensor,
    weights: Tensor,
    soft: SoftInputs | None = None,
) -> Tensor:
    """Weighted cross entropy of the first rows, as many as there are targets."""
    logits = model(tokens, positions, mask, targets.shape[1], embed(model, tokens, soft))
    return weighted_cross_entropy(logits, targets, weights)


@torch.no_grad()
def guess(
    model: Transformer,
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor,
    num_rows: int,
    soft: SoftInputs | None = None,
) -> tuple[Tensor, Tensor]:
    """Most probable token (never the mask) and its probability, for the first rows."""
    logits = model(tokens, positions, mask, num_rows, embed(model, tokens, soft))
    return choose(logits, model.shape.mask_token_id, model.shape.vocab_size)


class TransformerObjective(Objective):
    """An objective whose model is a ``Transformer`` in one of the published formats."""

    model_type: ClassVar[str]
    model: Transformer

    def __init__(self, ids: TokenIds, num_layers: int | None = None) -> None:
        shape = self.shape(ids)
        self.ids = ids
        self.model = Transformer(shape if num_layers is None else shrink(shape, num_layers))
        self.weighted_loss: Callable[..., Tensor] = weighted_loss
        self.guess: Callable[..., tuple[Tensor, Tensor]] = guess

    @abstractmethod
    def shape(self, ids: TokenIds) -> Shape:
        """Shape of the published checkpoint."""

    def compile(self) -> None:
        self.weighted_loss = torch.compile(weighted_loss)
        self.guess = torch.compile(guess)

    def save(self, directory: Path) -> None:
        save_transformer(self.model, self.model_type, directory)

    def load(self, directory: Path) -> None:
        self.model.load_state_dict(load_transformer(directory).state_dict(), strict=False)

    def after_step(self, progress: float) -> None:
        super().after_step(progress)
        self.model.balance_experts()
