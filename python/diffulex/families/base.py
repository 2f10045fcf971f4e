# SPDX-License-Identifier: Apache-2.0
"""What a model family is: one record, in one file per family, that names layers but loads none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from diffulex.families.spec import ModelSpec

__all__ = ["MASK_FILLING", "Decoding", "Family"]


class Decoding(NamedTuple):
    """A strategy and a sampling mode that decode a family."""

    strategy: str
    sampling_mode: str = "naive"
    #: "module:attribute" of the sampler; None: the one that `AutoSampler` has for the model name.
    sampler: str | None = None
    #: Names of the family that are decoded so; None: all of them.
    model_names: tuple[str, ...] | None = None


#: How a family is decoded whose sampler fills masks.
MASK_FILLING = (Decoding("multi_bd"), Decoding("d2f"))


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    Attributes:
        name: the family in a `ModelSpec` and as a value of the `model_name` option.
        read_spec: ``(config, model_dir, *, mask_token_id=None)`` to a `ModelSpec`; `config` is the
            parsed ``config.json``. Raises CheckpointError.
        sampler: "module:attribute" of the sampler.
        architectures: values of ``architectures[0]``.
        model_types: values of ``model_type``.
        aliases: further values of the `model_name` option, with their samplers.
        decoder: "module:attribute" of the model class, imported when a model is built.
        decodings: the strategies and sampling modes that decode it.
    """

    name: str
    read_spec: Callable[..., ModelSpec]
    sampler: str
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    decoder: str = "diffulex.nn.decoder:DecoderForDiffusionLM"
    decodings: tuple[Decoding, ...] = MASK_FILLING
