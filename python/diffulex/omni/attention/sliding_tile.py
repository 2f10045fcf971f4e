# SPDX-License-Identifier: Apache-2.0
"""Attention of a video in a window of tiles.

The latent cells (frames, rows, columns) are cut into tiles. A tile sees the tiles around it; at the
border the window is moved inside, so that every tile sees as many. Tiles with the same window are
consecutive in each direction: they and what they see are slices, and no mask is needed.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from diffulex.omni._diffusers_compat import model_hook, register_hook
from diffulex.omni.attention.kernels import TorchSdpa
from diffulex.omni.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from diffulex.omni.config_table import KernelConfig
    from diffulex.omni.registry import PipelineSpec

__all__ = ["SlidingTile", "tile_slices"]

_ModelHook: Any = model_hook()
_NAME = "diffulex_sliding_tile"


def tile_slices(length: int, tile: int, window: int) -> list[tuple[slice, slice]]:
    """Along one direction: cells, and the cells that they see.

    Args:
        length: cells; the last tile may be smaller.
        tile: cells of a tile.
        window: tiles that are seen, an odd number.
    """
    count, half = -(-length // tile), window // 2
    if window >= count:
        return [(slice(0, length), slice(0, length))]
    found: dict[int, tuple[slice, slice]] = {}
    for number in range(count):
        centre = min(max(number, half), count - 1 - half)
        first = found[centre][0].start if centre in found else number * tile
        cells = slice(first, min((number + 1) * tile, length))
        seen = slice((centre - half) * tile, min((centre + half + 1) * tile, length))
        found[centre] = (cells, seen)
    return list(found.values())


class SlidingTile(TorchSdpa):
    """A window of tiles after the first steps; text, and calls over other tokens, see everything."""

    media = ("video",)
    is_for_tokens = True

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        self._cells: tuple[int, ...] = ()
        self._is_full = True

    def attach(self, pipeline: Any, spec: PipelineSpec) -> None:
        for name in spec.transformers:
            transformer = getattr(pipeline, name, None)
            if transformer is not None:
                register_hook(transformer, _CellsHook(self, pipeline), _NAME)

    def start_step(self, cells: tuple[int, ...], step: int) -> None:
        """Frames, rows and columns of latent cells, and the number of the step that follows."""
        self._cells = cells
        self._is_full = step < self.config.sliding_tile_full_steps

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return TorchSdpa.__call__(
                self, q, k, v, mask, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa
            )

        if self._is_full or mask is not None:
            return attend(query, key, value)
        return self.in_windows(query, key, value, attend)

    def in_windows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Any
    ) -> torch.Tensor:
        """[B, S, H, D] of tokens in the order of the cells."""
        import torch  # noqa: PLC0415 (slow; loaded with the model)

        cells = self._cells
        batch, tokens, heads, width = query.shape
        if tokens != key.shape[1] or tokens != cells[0] * cells[1] * cells[2]:
            raise UnsupportedFeatureError(
                f"attention_backend: expected the tokens of {cells} cells, got {tokens}"
            )
        grid = [item.reshape(batch, *cells, heads, width) for item in (query, key, value)]
        out = torch.empty_like(grid[0])
        config: Sequence[Any] = (
            cells,
            self.config.sliding_tile_size,
            self.config.sliding_tile_window,
        )
        for parts in product(*(tile_slices(*sizes) for sizes in zip(*config))):
            here, seen = zip(*parts)
            q = grid[0][:, here[0], here[1], here[2]]
            k, v = (item[:, seen[0], seen[1], seen[2]] for item in grid[1:])
            got = attend(*(item.reshape(batch, -1, heads, width) for item in (q, k, v)))
            out[:, here[0], here[1], here[2]] = got.view(q.shape)
        return out.flatten(1, 3)


class _CellsHook(_ModelHook):  # type: ignore[misc]
    """Tells the kernel what a call of the transformer is about."""

    def __init__(self, kernel: SlidingTile, pipeline: Any) -> None:
        super().__init__()
        self._kernel = kernel
        self._pipeline = pipeline

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        latents = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        sizes = zip(latents.shape[2:], module.config.patch_size)
        timesteps, now = self._pipeline.scheduler.timesteps, kwargs["timestep"].flatten()[-1]
        step = int((timesteps == now).nonzero()[0])
        self._kernel.start_step(tuple(size // patch for size, patch in sizes), step)
        return args, kwargs
