# SPDX-License-Identifier: Apache-2.0
"""The course of one request, step by step: what its blocks were and which positions changed.

Positions count from the start of the prompt. Only differences between steps are kept, and nothing of
the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diffulex_ext import _core

__all__ = [
    "Change",
    "TokenTrace",
    "TraceBlock",
    "TraceRecorder",
    "TraceStep",
    "Trajectory",
    "replayed",
]

#: Stands for "nothing yet" where a canvas begins.
NOTHING = -1


class Change(NamedTuple):
    """A position that changed in a step.

    Attributes:
        position: from the start of the prompt.
        old: the token before; the mask id where it was open, -1 where there was nothing.
        new: the token after; the mask id where it was opened again.
        confidence: of the write; None where the sampler gave none.
    """

    position: int
    old: int
    new: int
    confidence: float | None


class TraceBlock(NamedTuple):
    """A block that was open after a step: its state as the core calls it, and its open positions."""

    block_id: int
    start: int
    end: int
    status: str
    num_masks: int


class TraceStep(NamedTuple):
    """One forward of the request.

    Attributes:
        step: its number, from 1.
        seconds: of the engine step.
        is_prefill: role as executed.
        new_tokens: positions decided.
        settled: tokens of the answer that can no longer change.
        blocks: open ones.
        changes: positions that changed; empty at level `blocks`.
    """

    step: int
    seconds: float
    is_prefill: bool
    new_tokens: int
    settled: int
    blocks: tuple[TraceBlock, ...]
    changes: tuple[Change, ...] = ()


class TokenTrace(NamedTuple):
    """One token of the answer.

    Attributes:
        position: from the start of the prompt.
        step: the last one that wrote it.
        confidence: of that write; None where the sampler gave none.
        token: its id.
        edits: how often a decided token at the position was replaced or opened again.
    """

    position: int
    step: int
    confidence: float | None
    token: int
    edits: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What became of one request.

    Attributes:
        level: `blocks` or `full`.
        prompt_len: tokens of the prompt.
        mask_token_id: -1 for a canvas, which has no masks.
        block_size: positions of a block.
        token_ids: the answer.
        steps: every forward the request took part in.
    """

    level: str
    prompt_len: int
    mask_token_id: int
    block_size: int
    token_ids: tuple[int, ...]
    steps: tuple[TraceStep, ...]

    @property
    def tokens(self) -> tuple[TokenTrace, ...]:
        """One record per token of the answer; empty at level `blocks`."""
        if self.level != "full":
            return ()
        written: dict[int, tuple[int, float | None]] = {}
        edits: dict[int, int] = {}
        undecided = (NOTHING, self.mask_token_id)
        for step in self.steps:
            for change in step.changes:
                written[change.position] = step.step, change.confidence
                if change.old not in undecided:
                    edits[change.position] = edits.get(change.position, 0) + 1
        return tuple(
            TokenTrace(position, *written[position], token, edits.get(position, 0))
            for position, token in enumerate(self.token_ids, self.prompt_len)
        )


def replayed(trajectory: Trajectory) -> Iterator[tuple[TraceStep, list[int]]]:
    """Every step with the tokens after the prompt as they are after it, masks included.

    The list is the same one every time, and grows.
    """
    tokens: list[int] = []
    mask = trajectory.mask_token_id
    for step in trajectory.steps:
        ends = [block.end for block in step.blocks]
        ends += [change.position + 1 for change in step.changes]
        missing = max(ends, default=0) - trajectory.prompt_len - len(tokens)
        tokens.extend([mask] * missing)
        for position, _, new, _ in step.changes:
            tokens[position - trajectory.prompt_len] = new
        yield step, tokens


class TraceRecorder:
    """Follows one request from step to step; what it notes takes its form when the request is over.

    Args:
        level: `blocks` or `full`.
        prompt_len: tokens of its prompt.
        mask_token_id: -1 for a canvas.
    """

    def __init__(self, level: str, prompt_len: int, mask_token_id: int) -> None:
        self._is_full, self._prompt_len, self._mask = level == "full", prompt_len, mask_token_id
        #: Per step: seconds, role, decided tokens, settled tokens, blocks and changes, both flat, for the
        #: collector of garbage looks at every object there is.
        self._steps: list[tuple[float, bool, int, int, list[Any], list[Any]]] = []
        #: After the prompt, as last seen.
        self._tokens: list[int] = []
        self._settled = 0
        self._block_size = 0

    def add_step(
        self,
        state: _core.RequestSnapshot,
        appended: Sequence[int],
        *,
        seconds: float,
        is_prefill: bool,
        new_tokens: int,
    ) -> None:
        """Notes what a step changed.

        Args:
            state: of the request after the step.
            appended: tokens that became final.
        """
        blocks: list[Any] = []
        changes: list[Any] = []
        mask, prompt_len = self._mask, self._prompt_len
        for block in state.blocks:
            start, tokens = block.start, block.tokens
            self._block_size = len(tokens)
            blocks += (block.block_id, start, block.status, tokens.count(mask) if mask >= 0 else 0)
            if self._is_full:
                first = start - prompt_len
                if first < 0:
                    tokens, first = tokens[-first:], 0
                if self._tokens[first : first + len(tokens)] != tokens:
                    self._compare(first, tokens, block.confidences[-len(tokens) :], changes)
        if appended:
            # Tokens that left the blocks in the step that wrote them.
            if self._is_full:
                self._compare(self._settled, appended, None, changes)
            self._settled += len(appended)
        self._steps.append((seconds, is_prefill, new_tokens, self._settled, blocks, changes))

    def _compare(
        self,
        first: int,
        tokens: Sequence[int],
        confidences: Sequence[float] | None,
        changes: list[Any],
    ) -> None:
        """Notes where `tokens`, from index `first` of the answer on, are others than before."""
        known, mask, prompt_len = self._tokens, self._mask, self._prompt_len
        missing = first + len(tokens) - len(known)
        if missing > 0:
            known.extend([mask] * missing)
        for index, token in enumerate(tokens, first):
            old = known[index]
            if token != old:
                known[index] = token
                confidence = None
                if confidences is not None and token != mask:
                    # 0 stands for none: it is the value of masks, prompts and predicted seeds.
                    confidence = confidences[index - first] or None
                changes += (index + prompt_len, old, token, confidence)

    def finish(self, generated_ids: Sequence[int], token_ids: Sequence[int]) -> Trajectory:
        """The trajectory of a request that is over.

        Args:
            generated_ids: every position of its blocks, also after the end of the answer.
            token_ids: the answer.
        """
        if self._is_full and self._steps:
            end = max(len(token_ids), len(generated_ids))
            whole = [*token_ids, *generated_ids[len(token_ids) : end]]
            self._compare(0, whole, None, self._steps[-1][-1])
        return Trajectory(
            "full" if self._is_full else "blocks",
            self._prompt_len,
            self._mask,
            self._block_size,
            tuple(token_ids),
            tuple(self._step(number, *noted) for number, noted in enumerate(self._steps, 1)),
        )

    def _step(
        self,
        number: int,
        seconds: float,
        is_prefill: bool,
        new_tokens: int,
        settled: int,
        blocks: list[Any],
        changes: list[Any],
    ) -> TraceStep:
        parts = self._blocks(blocks), tuple(map(Change._make, _fours(changes)))
        return TraceStep(number, seconds, is_prefill, new_tokens, settled, *parts)

    def _blocks(self, flat: list[Any]) -> tuple[TraceBlock, ...]:
        size = self._block_size
        return tuple(
            TraceBlock(block_id, start, start + size, str(status), num_masks)
            for block_id, start, status, num_masks in _fours(flat)
        )


def _fours(flat: list[Any]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """What was noted flat, four values an entry."""
    values = iter(flat)
    return zip(values, values, values, values, strict=True)
