# SPDX-License-Identifier: Apache-2.0
"""What a model family is: one record, in one file per family, that names layers but loads none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from diffulex.families.spec import ModelSpec

__all__ = ["D2F_DEFAULTS", "MASK_FILLING", "Decoding", "Family", "FilterOrder", "Layout"]


class FilterOrder(IntEnum):
    """Order in which a family applies its filters, that of `sample_filtered`; each renormalises for the
    next."""

    TOP_P_FIRST = 0
    """top_p, min_p, top_k."""
    TOP_K_FIRST = 1
    """top_k, min_p, top_p."""


class Layout(NamedTuple):
    """What tells the stored tensors of a family, where an unknown checkpoint resembles it."""

    #: Part of a tensor name.
    mark: str
    #: Of several families whose marks occur, the one with the highest rank is nearest.
    rank: int


class Decoding(NamedTuple):
    """A strategy and a sampling mode that decode a family."""

    #: None: every strategy that fills masks.
    strategy: str | None = None
    sampling_mode: str = "naive"
    #: "module:attribute" of the sampler; None: the one that `AutoSampler` has for the model name.
    sampler: str | None = None
    #: Names of the family that are decoded so; None: all of them.
    model_names: tuple[str, ...] | None = None


#: Module that has a mask-filling sampler under the name of every family.
MASK_FILLERS = "diffulex.samplers.mask_fill"
#: How a family is decoded whose sampler fills masks.
MASK_FILLING = (Decoding(),)
#: Of a family whose models D2F has trained.
D2F_DEFAULTS: Mapping[str, Any] = {
    "accept_threshold": 0.9,
    "acceptance_rule": "threshold",
    "block_size": 32,
    "buffer_size": 4,
    "confidence_space": "processed",
    "decoding_strategy": "d2f",
    "semi_complete_threshold": 0.95,
    "temperature": 0.0,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    Attributes:
        name: the family in a `ModelSpec` and as a value of the `model_name` option.
        read_spec: ``(config, model_dir, *, mask_token_id=None)`` to a `ModelSpec`; `config` is the
            parsed ``config.json``. Raises CheckpointError.
        defaults: configuration keys that the family sets when it is decoded by its own sampler; explicit
            values and those of the checkpoint go before them.
        filter_order: order of its filters.
        rule_with_threshold: acceptance rule once an `accept_threshold` is given; None: `defaults` has it.
        sampler: "module:attribute" of a sampler of its own; None: masks are filled as the three fields
            above say.
        architectures: values of ``architectures[0]``.
        model_types: values of ``model_type``.
        is_own: ``(config)`` to whether a configuration of one of these types is the family's; None: it is.
            Raises CheckpointError for a different model that shares the type.
        template: stock architecture that the family shares its layout with.
        layout: what tells its tensors.
        is_exportable: the edge export knows its layers.
        is_bidirectional: its base models see whole sequences, so that likelihoods are not taken block by
            block.
        aliases: further values of the `model_name` option, with their samplers.
        decoder: "module:attribute" of the model class, imported when a model is built.
        decodings: the strategies and sampling modes that decode it.
        quantization_ignore: by schemes, the default of the key of this name: modules that lose too much.
    """

    name: str
    read_spec: Callable[..., ModelSpec]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    filter_order: FilterOrder = FilterOrder.TOP_P_FIRST
    rule_with_threshold: str | None = None
    sampler: str | None = None
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    is_own: Callable[[Mapping[str, Any]], bool] | None = None
    template: str | None = None
    layout: Layout | None = None
    is_exportable: bool = True
    is_bidirectional: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    decoder: str = "diffulex.nn.decoder:DecoderForDiffusionLM"
    decodings: tuple[Decoding, ...] = MASK_FILLING
    quantization_ignore: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def sampler_path(self) -> str:
        """ "module:attribute" of the sampler."""
        return self.sampler or f"{MASK_FILLERS}:{self.name}"
