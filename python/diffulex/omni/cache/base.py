# SPDX-License-Identifier: Apache-2.0
"""What all caches share: hooks on the blocks of a transformer, and branches that remember steps.

Of a group of N blocks the first F always run. Then the running branch of guidance decides: the middle
blocks run and their residual is kept, or an earlier residual stands for them. The last B always run.
Everything around the blocks is the model's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from diffulex.log import get_logger
from diffulex.omni._diffusers_compat import (
    block_layout,
    context_name,
    forget_child_hooks,
    make_context_state,
    model_hook,
    register_hook,
    remove_hook,
)
from diffulex.omni.errors import UnsupportedFeatureError
from diffulex.omni.registry import find_pipeline
from diffulex.omni.sequence_parallel import SEQUENCE_HOOKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from diffulex.omni.config_table import DiffusionCacheConfig
    from diffulex.omni.groups import RankGroups
    from diffulex.omni.registry import PipelineSpec

__all__ = ["Branch", "CacheBackend", "CacheSummary", "Course", "Streams", "relative_change"]

logger = get_logger(__name__)

_NAME = "diffulex_cache"
_ModelHook: Any = model_hook()

#: Transformer -> branch -> `computed` and `cached` steps, `diffs` of steps, `num_blocks` and
#: `num_blocks_run` of all steps.
CacheSummary = dict[str, dict[str, dict[str, Any]]]


class Streams(NamedTuple):
    """What blocks hand on: image tokens, and text tokens where they change them."""

    image: torch.Tensor
    text: torch.Tensor | None

    def takes(self, residual: Streams) -> bool:
        """Whether a residual has its shapes."""
        is_text_alike = None in (self.text, residual.text) or (
            self.text.shape == residual.text.shape  # type: ignore[union-attr]
        )
        return self.image.shape == residual.image.shape and is_text_alike

    def plus(self, residual: Streams) -> Streams:
        """The sum; text without a residual stays."""
        text = self.text
        if text is not None and residual.text is not None:
            text = text + residual.text
        return Streams(self.image + residual.image, text)

    def minus(self, before: Streams) -> Streams:
        """The residual; none of text that a block does not give."""
        both = self.text is not None and before.text is not None
        text = self.text - before.text if both else None  # type: ignore[operator]
        return Streams(self.image - before.image, text)


def relative_change(
    new: torch.Tensor, old: torch.Tensor, groups: RankGroups | None
) -> float | None:
    """`mean|new - old| / mean|old|`; None if the old one is all zero.

    Ranks that draw the same branch share their sums: they must decide alike.
    """
    sums = torch.stack(
        [
            (new - old).abs().sum(dtype=torch.float64),
            old.abs().sum(dtype=torch.float64),
        ]
    )
    for axis in ("tp", "sp") if groups is not None else ():
        group = groups.group(axis) if groups is not None else None
        if group is not None:
            dist.all_reduce(sums, group=group)
    change, size = sums.tolist()
    return change / size if size else None


class Course(NamedTuple):
    """Steps of the running call.

    Attributes:
        first: the one at which a transformer takes over.
        own: of this transformer.
        total: of the call.
    """

    first: int
    own: int
    total: int


class Branch(ABC):
    """What one branch of guidance remembers of its steps, in one group of blocks.

    Args:
        course: of the transformer.
        groups: of this process, where there are several.
    """

    def __init__(self, course: Course, groups: RankGroups | None) -> None:
        self.course = course
        self.groups = groups
        #: The running step, from 0.
        self.step = -1
        self.computed: list[int] = []
        self.cached: list[int] = []
        self.diffs: dict[str, float] = {}

    @abstractmethod
    def decide(
        self, block: Any, arguments: Mapping[str, Any], start: torch.Tensor, streams: Streams
    ) -> bool:
        """Whether the middle blocks are skipped at this step.

        Args:
            block: the first of the middle blocks.
            arguments: of its call, by name.
            start: image tokens before the first block of the group.
            streams: before the middle blocks.
        """

    @abstractmethod
    def keep(self, residual: Streams) -> None:
        """Takes what the middle blocks have added at this step."""

    @abstractmethod
    def recall(self) -> Streams:
        """What stands for the middle blocks at this step."""


class CacheBackend(ABC):
    """A cache for the transformers of one pipeline.

    Args:
        config: its settings.
    """

    def __init__(self, config: DiffusionCacheConfig) -> None:
        self.config = config
        self._groups: list[_BlockGroup] = []

    def enable(self, pipeline: Any, groups: RankGroups | None = None) -> None:
        """Registers hooks on the blocks, outside of all hooks but those that share tokens.

        Args:
            pipeline: of a class that is registered.
            groups: of this process, where there are several.

        Raises:
            UnsupportedFeatureError: the pipeline or the settings do not allow it.
        """
        if self._groups:
            raise RuntimeError("cache: expected one that is not enabled, got an enabled one")
        spec = find_pipeline(type(pipeline).__name__)
        made = []
        found = {name: getattr(pipeline, name, None) for name in spec.transformers}
        found = {name: module for name, module in found.items() if module is not None}
        for name, transformer in found.items():
            for label, blocks in self.block_lists(spec, name, transformer):
                first, last = self.middle(len(blocks))
                branch = self.branch_maker(spec, transformer, is_alone=len(found) == 1)
                place = _Place(pipeline, spec, name)
                made.append(_BlockGroup(label, blocks, (first, last), branch, place, groups))
        for group in made:
            group.attach()
        self._groups = made

    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        """Forgets everything; to be called before every call of the pipeline."""
        for group in self._groups:
            group.branches.clear()
        if verbose:
            name = type(pipeline).__name__
            logger.debug("%s: cache of %s is empty, %d steps", self, name, num_inference_steps)

    def is_enabled(self) -> bool:
        """Whether the hooks are on a pipeline."""
        return bool(self._groups)

    def disable(self, pipeline: Any) -> None:
        """Takes the hooks away again. May be repeated."""
        for group in self._groups:
            group.detach()
        self._groups = []
        logger.debug("%s: no cache on %s any more", self, type(pipeline).__name__)

    def summary(self) -> CacheSummary:
        """What was computed and what was not since the last refresh."""
        return {group.label: group.summary() for group in self._groups}

    def branches(self) -> list[tuple[str, str, Branch]]:
        """Every branch with the names of its group and of itself."""
        return [
            (group.label, name, branch)
            for group in self._groups
            for name, branch in group.branches.items()
        ]

    def __str__(self) -> str:
        return type(self).__name__

    def block_lists(
        self, spec: PipelineSpec, name: str, transformer: Any
    ) -> Sequence[tuple[str, Sequence[Any]]]:
        """Groups of blocks of a transformer, by the name that they have in the summary."""
        return [(name, [block for lst in _lists(spec, transformer) for block in lst])]

    @abstractmethod
    def middle(self, num_blocks: int) -> tuple[int, int]:
        """Numbers of the first middle block and of the one after the last.

        Raises:
            UnsupportedFeatureError: there is none.
        """

    @abstractmethod
    def branch_maker(
        self, spec: PipelineSpec, transformer: Any, *, is_alone: bool
    ) -> Callable[[Course, RankGroups | None], Branch]:
        """What makes the branches of a transformer, which may be the only one of its pipeline.

        Raises:
            UnsupportedFeatureError: this transformer cannot have the cache.
        """


def _lists(spec: PipelineSpec, transformer: Any) -> list[Any]:
    if not spec.block_lists:
        raise UnsupportedFeatureError(
            f"cache_backend: expected a pipeline whose blocks are known, got {spec.name}"
        )
    return [getattr(transformer, name) for name in spec.block_lists]


class _Place(NamedTuple):
    """A transformer of a pipeline."""

    pipeline: Any
    spec: PipelineSpec
    name: str

    def course(self) -> Course:
        """The steps it is called at; the pipeline has set its schedule."""
        scheduler = self.pipeline.scheduler
        # The first ones are left out where the noise of theirs has been added to a picture.
        timesteps = scheduler.timesteps[getattr(scheduler, "begin_index", None) or 0 :]
        total = len(timesteps)
        ratio = self.pipeline.config.get("boundary_ratio")
        if ratio is None or len(self.spec.transformers) == 1:
            return Course(0, total, total)
        boundary = ratio * self.pipeline.scheduler.config.num_train_timesteps
        high = int((timesteps >= boundary).sum())
        is_first = self.name == self.spec.transformers[0]
        return Course(0, high, total) if is_first else Course(high, total - high, total)


_Method = TypeVar("_Method", bound="Callable[..., Any]")


def _not_compiled(method: _Method) -> _Method:
    """Keeps a method, and all that it calls, out of compiled graphs."""
    kept: _Method = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
    return kept


class _BlockGroup:
    """Blocks that are skipped together."""

    def __init__(
        self,
        label: str,
        blocks: Sequence[Any],
        middle: tuple[int, int],
        make_branch: Callable[[Course, RankGroups | None], Branch],
        place: _Place,
        groups: RankGroups | None,
    ) -> None:
        self.label = label
        self.branches: dict[str, Branch] = {}
        self._blocks = blocks
        self._layouts = [block_layout(block) for block in blocks]
        self._first, self._last = middle
        self._make_branch = make_branch
        self._place = place
        self._ranks = groups
        self._branch: Branch
        self._start: torch.Tensor
        self._before: Streams | None = None
        self._skips = False

    def attach(self) -> None:
        for number, block in enumerate(self._blocks):
            register_hook(block, _BlockHook(self, number), _NAME, below=SEQUENCE_HOOKS)
        # It keeps a list of the hooks below it, which get the name of the branch.
        forget_child_hooks(getattr(self._place.pipeline, self._place.name))

    def detach(self) -> None:
        for block in self._blocks:
            remove_hook(block, _NAME)
        forget_child_hooks(getattr(self._place.pipeline, self._place.name))

    def summary(self) -> dict[str, dict[str, Any]]:
        count, skipped = len(self._blocks), self._last - self._first
        return {
            name: {
                "computed": list(branch.computed),
                "cached": list(branch.cached),
                "diffs": dict(branch.diffs),
                "num_blocks": count * (branch.step + 1),
                "num_blocks_run": count * (branch.step + 1) - skipped * len(branch.cached),
            }
            for name, branch in self.branches.items()
        }

    # Dynamo goes into the blocks; what decides about them changes from step to step.
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def run(
        self, number: int, name: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One block; `number` of the group, in the branch `name`."""
        layout = self._layouts[number]
        arguments = layout.arguments(args, kwargs)
        streams = Streams(*layout.read(arguments))
        if number == 0:
            self._start_step(name, streams)
        if number == self._first:
            self._decide(arguments, streams)
        if self._first <= number < self._last and self._skips:
            if number == self._first:
                streams = self._recall(streams)
            return layout.write(*streams)
        output = forward(*args, **kwargs)
        if number == self._last - 1 and not self._skips and self._before is not None:
            self._keep(Streams(*layout.split(output)))
        return output

    @_not_compiled
    def _start_step(self, name: str, streams: Streams) -> None:
        if name not in self.branches:
            self.branches[name] = self._make_branch(self._place.course(), self._ranks)
        self._branch = self.branches[name]
        self._branch.step += 1
        self._start = streams.image

    @_not_compiled
    def _recall(self, streams: Streams) -> Streams:
        return streams.plus(self._branch.recall())

    @_not_compiled
    def _keep(self, streams: Streams) -> None:
        assert self._before is not None
        self._branch.keep(streams.minus(self._before))
        self._before = None

    @_not_compiled
    def _decide(self, arguments: Mapping[str, Any], streams: Streams) -> None:
        branch = self._branch
        block = self._blocks[self._first]
        self._skips = branch.decide(block, arguments, self._start, streams)
        (branch.cached if self._skips else branch.computed).append(branch.step)
        self._before = None if self._skips else streams


class _BlockHook(_ModelHook):  # type: ignore[misc]
    """Asks the group about one block."""

    _is_stateful = True

    def __init__(self, group: _BlockGroup, number: int) -> None:
        super().__init__()
        self._group = group
        self._number = number
        #: diffusers sets the name of the branch on attributes of this class.
        self._context = make_context_state()

    def reset_state(self, module: Any) -> Any:
        """Nothing: diffusers calls it after a call that has succeeded, when the summary is wanted."""
        return module

    def new_forward(self, _module: Any, *args: Any, **kwargs: Any) -> Any:
        name = context_name(self._context)
        return self._group.run(self._number, name, self.fn_ref.original_forward, args, kwargs)
