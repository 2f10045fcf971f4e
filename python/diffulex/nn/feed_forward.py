# SPDX-License-Identifier: Apache-2.0
"""The feed-forward block of a decoder layer: its interface and the dense form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from diffulex.distributed.shard import ONE_RANK
from diffulex.nn.activation import GatedActivation, SiluAndMul
from diffulex.nn.linear import Linear, named_projections
from diffulex.nn.partition import Cut, Partition

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from diffulex.checkpoint.projection import Projection
    from diffulex.checkpoint.slices import WeightSlice
    from diffulex.distributed.comm import Comm
    from diffulex.distributed.shard import Shard
    from diffulex.families.spec.names import TensorNames
    from diffulex.nn.attention_metadata import AttnMetadata
    from diffulex.ops import QuantizedRows

__all__ = ["FeedForward", "GatedMLP", "MLPScratch"]


class FeedForward(nn.Module):
    """Interface of a layer's feed-forward block.

    Blocks of one class in one model share the scratch of a forward, so they must have one size.
    """

    def new_scratch(self, like: torch.Tensor, metadata: AttnMetadata) -> Any:
        """Buffers for a forward of the rows of `like` [T, H], which `metadata` describes."""
        raise NotImplementedError

    def new_rows(self, x: torch.Tensor) -> QuantizedRows | None:
        """Memory for the codes of x [T, H] that `forward` takes beside it; None: it takes none."""
        del x
        return None

    def forward(
        self, x: torch.Tensor, scratch: Any, rows: QuantizedRows | None = None
    ) -> torch.Tensor:
        """The output of the rows x [T, H]: x itself, or a buffer of the scratch, which keeps x for it.

        `rows`: those of `new_rows` with the codes of x, where whoever made x has them.
        """
        raise NotImplementedError

    def connect(self, comm: Comm) -> None:
        """Lets a block whose output is more than a part of a sum exchange with other ranks."""
        del comm

    def weight_table(
        self, prefix: str, names: TensorNames, stored: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Checkpoint name -> memory to fill, for names below `prefix`.

        `stored` are the names in the checkpoint, for blocks that are stored in several layouts; it
        is empty when no checkpoint is at hand, and the published layout is meant.
        """
        raise NotImplementedError

    def weight_slices(self, prefix: str, names: TensorNames) -> dict[str, WeightSlice]:
        """Checkpoint name -> what this rank has of the tensor, for those that are cut; none by default."""
        del prefix, names
        return {}

    def projections(self, prefix: str, names: TensorNames) -> dict[str, Projection]:
        """Module name below `prefix` -> projection that an adapter may change; none by default."""
        del prefix, names
        return {}


class MLPScratch:
    """Buffers of one dense feed-forward of T rows."""

    __slots__ = ("gate_up", "inner")

    def __init__(self, like: torch.Tensor, intermediate_size: int) -> None:
        self.gate_up = like.new_empty(like.size(0), 2 * intermediate_size)
        self.inner = like.new_empty(like.size(0), intermediate_size)


class GatedMLP(FeedForward):
    """``down(act(gate x) * up x)``; `act` is SiLU unless given. A sum's part where ranks share it."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        act: GatedActivation | None = None,
        shard: Shard = ONE_RANK,
    ) -> None:
        super().__init__()
        sizes = (intermediate_size, intermediate_size)
        cut = Partition(Cut.ROWS, shard)
        self.gate_up = Linear(hidden_size, sizes, dtype=dtype, device=device, partition=cut)
        self.act = SiluAndMul() if act is None else act
        cut = Partition(Cut.COLUMNS, shard)
        self.down = Linear(
            intermediate_size, (hidden_size,), dtype=dtype, device=device, partition=cut
        )

    def new_scratch(self, like: torch.Tensor, metadata: AttnMetadata) -> MLPScratch:
        del metadata  # every row is computed on its own
        return MLPScratch(like, self.down.in_features)

    def new_rows(self, x: torch.Tensor) -> QuantizedRows | None:
        return self.gate_up.new_rows(x)

    def forward(
        self, x: torch.Tensor, scratch: MLPScratch, rows: QuantizedRows | None = None
    ) -> torch.Tensor:
        self.project(x, scratch, x, rows)
        return x

    def project(
        self,
        x: torch.Tensor,
        scratch: MLPScratch,
        out: torch.Tensor,
        rows: QuantizedRows | None = None,
    ) -> None:
        """Writes the output of the rows x [T, H] to `out`, which may be x; for `rows` see `forward`."""
        inner: QuantizedRows | None = None
        if not self.gate_up.forward_gated(x, self.act.kind, scratch.inner, rows):
            self.gate_up(x, scratch.gate_up, rows)
            inner = self.down.new_rows(scratch.inner)
            self.act(scratch.gate_up, scratch.inner, inner)
        self.down(scratch.inner, out, inner)

    def weight_table(
        self, prefix: str, names: TensorNames, stored: Collection[str]
    ) -> dict[str, torch.Tensor]:
        del stored  # there is one layout
        return {
            f"{prefix}{names.gate}.weight": self.gate_up.part(0)[0],
            f"{prefix}{names.up}.weight": self.gate_up.part(1)[0],
            f"{prefix}{names.down}.weight": self.down.part(0)[0],
        }

    def weight_slices(self, prefix: str, names: TensorNames) -> dict[str, WeightSlice]:
        return {
            **self.gate_up.slices(prefix + names.gate, 0),
            **self.gate_up.slices(prefix + names.up, 1),
            **self.down.slices(prefix + names.down),
        }

    def projections(self, prefix: str, names: TensorNames) -> dict[str, Projection]:
        return {
            **named_projections(self.gate_up, [prefix + names.gate, prefix + names.up]),
            **named_projections(self.down, [prefix + names.down]),
        }
