# SPDX-License-Identifier: Apache-2.0
"""Routed experts: their description and the keys that all families with experts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffulex.families.spec.reader import ConfigReader

__all__ = ["MoeSpec", "read_moe_layers", "read_num_experts"]

_NUM_EXPERTS_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The feed-forward blocks with routed experts of one model; all of them are alike."""

    num_experts: int
    top_k: int
    #: Width of one routed expert.
    intermediate_size: int
    #: Numbers of the layers with experts; the others have the dense block of the model.
    layers: frozenset[int]
    #: Scores are sigmoids of the logits instead of their softmax.
    is_sigmoid: bool = False
    #: The chosen scores are divided by their sum.
    renormalize: bool = True
    #: Experts are chosen from the `topk_group` best of `n_group` groups; 0 = from all.
    n_group: int = 0
    topk_group: int = 0
    #: Factor of all routed weights.
    routed_scaling: float = 1.0
    #: A float32 vector that is added to the scores for the choice only.
    has_expert_bias: bool = False
    #: Width of the expert that every token uses; 0 = none.
    shared_size: int = 0

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of one block."""
        width = self.num_experts * self.intermediate_size + self.shared_size
        bias = self.num_experts if self.has_expert_bias else 0
        return 3 * hidden_size * width + self.num_experts * hidden_size + bias


def read_num_experts(reader: ConfigReader, default: int | None = None) -> int:
    """Number of routed experts under any of its names, which must agree; 0 = a dense model."""
    found: dict[str, int] = {}
    for key in _NUM_EXPERTS_KEYS:
        if reader.config.get(key) is not None:
            found[key] = reader.count(key, minimum=0)
    if not found:
        return reader.count(_NUM_EXPERTS_KEYS[0], default, minimum=0)
    (first, value), *others = found.items()
    for key, other in others:
        if other != value:
            raise reader.fail(key, f"the value of {first} ({value})", other)
    return value


def read_moe_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """Layers with experts, by whichever of the published rules the configuration holds."""
    dense = reader.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise reader.fail("mlp_only_layers", "a list of layer numbers", dense)
    if reader.config.get("first_k_dense_replace") is not None:
        first = reader.integer("first_k_dense_replace", minimum=0)
        layers = set(range(first, num_layers))
    else:
        step = reader.integer("decoder_sparse_step", 1)
        layers = {layer for layer in range(num_layers) if (layer + 1) % step == 0}
    return frozenset(layers.difference(dense))
