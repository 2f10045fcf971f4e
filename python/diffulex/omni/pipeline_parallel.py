# SPDX-License-Identifier: Apache-2.0
"""Ranks that each keep a part of the blocks of a transformer: the same pictures, no speed.

They need less memory: what other ranks have is not even read, see `stage_loader`.
Every rank runs what is around the blocks. A block runs on the rank that has it; the others pass its
inputs through. Where the next block is another rank's, the streams are sent to it, and what the last
block of a list gives is sent to all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from diffulex.omni._diffusers_compat import block_layout, model_hook, register_hook
from diffulex.omni.stage_loader import stage_of

if TYPE_CHECKING:
    from diffulex.omni._diffusers_compat import BlockLayout
    from diffulex.omni.groups import RankGroups
    from diffulex.omni.registry import PipelineSpec

__all__ = ["attach"]

_NAME = "diffulex_stage"
_ModelHook: Any = model_hook()


def attach(pipeline: Any, spec: PipelineSpec, groups: RankGroups) -> None:
    """Registers hooks on all blocks; the weights of those that other ranks have are not needed."""
    ranks = groups.ranks("pp")
    for name in spec.transformers:
        transformer = getattr(pipeline, name, None)
        if transformer is None:
            continue
        for list_name in spec.block_lists:
            blocks = getattr(transformer, list_name)
            stages = [stage_of(number, len(blocks), len(ranks)) for number in range(len(blocks))]
            for number, block in enumerate(blocks):
                layout = block_layout(block)
                following = stages[number + 1] if number + 1 < len(blocks) else None
                hook = _StageHook(layout, groups, stages[number], following)
                register_hook(block, hook, _NAME)


class _StageHook(_ModelHook):  # type: ignore[misc]
    """Runs a block on its rank.

    Args:
        layout: where its streams are.
        groups: of this rank.
        stage: which rank of `pp` has it.
        following: which has the next one; None after the last block of a list.
    """

    def __init__(
        self, layout: BlockLayout, groups: RankGroups, stage: int, following: int | None
    ) -> None:
        super().__init__()
        self._layout = layout
        self._group = groups.group("pp")
        self._ranks = groups.ranks("pp")
        self._own = self._ranks.index(groups.rank)
        self._stage = stage
        self._following = following

    # Dynamo goes into the blocks and not into what is sent.
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def new_forward(self, _module: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._layout.read(self._layout.arguments(args, kwargs))
        is_mine = self._own == self._stage
        after = before
        if is_mine:
            after = self._layout.split(self.fn_ref.original_forward(*args, **kwargs))
            _check_alike(before, after)
        if self._following is None:
            after = self._to_all(after)
        elif self._following != self._stage:
            after = self._to_next(after, self._following)
        return self._layout.write(*after)

    def _to_next(self, streams: tuple[Any, Any], following: int) -> tuple[Any, Any]:
        found = list(streams)
        for number, stream in enumerate(streams):
            if stream is None:
                continue
            if self._own == self._stage:
                dist.send(stream.contiguous(), self._ranks[following], self._group)
            elif self._own == following:
                found[number] = torch.empty_like(stream, memory_format=torch.contiguous_format)
                dist.recv(found[number], self._ranks[self._stage], self._group)
        return found[0], found[1]

    def _to_all(self, streams: tuple[Any, Any]) -> tuple[Any, Any]:
        image, text = streams
        owner = self._ranks[self._stage]
        if self._layout.text_index is not None:
            # The last block of some models gives no text any more.
            has_text = torch.tensor([int(text is not None)], device=image.device)
            dist.broadcast(has_text, owner, group=self._group)
            if not int(has_text):
                text = None
        shared = [None if stream is None else _own_copy(stream) for stream in (image, text)]
        for stream in shared:
            if stream is not None:
                dist.broadcast(stream, owner, group=self._group)
        return shared[0], shared[1]


def _own_copy(stream: torch.Tensor) -> torch.Tensor:
    """Memory that may be written: the input of a block may be needed again."""
    return stream.clone(memory_format=torch.contiguous_format)


def _check_alike(before: tuple[Any, Any], after: tuple[Any, Any]) -> None:
    """The other ranks make room for what a block gives by what it takes."""
    for one, other in zip(before, after):
        if one is None or other is None:
            continue
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise RuntimeError(
                f"pipeline parallelism: expected a block to give {list(one.shape)} {one.dtype}, got"
                f" {list(other.shape)} {other.dtype}"
            )
