# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights are held as 8-bit integers, one scale per output."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["Int8Linear", "hold_as_int8"]

_LARGEST = 127


class Int8Linear(torch.nn.Module):
    """As the layer it is made of, with weights that are rounded to 255 values per output.

    Args:
        layer: whose bias and dtype it takes over.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        exact = layer.weight.detach().float()
        scale = (exact.abs().amax(1, keepdim=True) / _LARGEST).to(layer.weight.dtype)
        # Codes are multiples of the scale that is kept, which is rounded to the dtype of the weight.
        steps = scale.float().clamp(min=torch.finfo(torch.float32).tiny)
        codes = (exact / steps).round().clamp(-_LARGEST, _LARGEST)
        self.register_buffer("weight", codes.to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        scale = self.get_buffer("scale")
        weight = self.get_buffer("weight").to(scale.dtype) * scale
        # T5 keeps `wo` in float32 beside float16, and does not cast its inputs for 8-bit weights.
        return F.linear(hidden_states.to(scale.dtype), weight, self.bias)


def hold_as_int8(module: torch.nn.Module) -> None:
    """Replaces all linear layers below a module; embeddings, norms and tied heads stay."""
    tied = {id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Embedding)}
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is torch.nn.Linear and id(layer.weight) not in tied:
                parent.register_module(name, Int8Linear(layer))
