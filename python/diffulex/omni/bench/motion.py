# SPDX-License-Identifier: Apache-2.0
"""Videos of one shape that moves: captions, a renderer, and a rule that reads them from the frames."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from diffulex.omni.bench.scenes import COLORS, KINDS, Scene, Shape, is_held_out, render
from diffulex.omni.bench.shapes import analyse

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from diffulex.omni.bench.shapes import Found

__all__ = ["DIRECTIONS", "Motion", "MotionVerdict", "check_motion", "draw_motions", "render_motion"]

#: x grows to the right, y downwards.
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
_RADII = (0.2, 0.23)
#: Least way of the centre, as a share of the side, and the most that it strays from the line.
_LEAST_WAY, _MOST_STRAY = 0.15, 0.12
_LEAST_OVERLAP = 0.6


@dataclass(frozen=True, slots=True)
class Motion:
    """One shape on white: where it starts, and how far it moves along a direction.

    Attributes:
        shape: in the first frame.
        direction: one of `DIRECTIONS`.
        way: of its centre up to the last frame, as a share of the side.
    """

    shape: Shape
    direction: str
    way: float

    @property
    def caption(self) -> str:
        return f"{self.shape.phrase} moving {self.direction}"

    def scene(self, share: float) -> Scene:
        """What is seen after a share of the time."""
        dx, dy = DIRECTIONS[self.direction]
        moved = share * self.way
        moved_shape = replace(self.shape, x=self.shape.x + dx * moved, y=self.shape.y + dy * moved)
        return Scene((moved_shape,), "", "")


def draw_motions(rng: random.Random, *, held_out: bool) -> Iterator[Motion]:
    """Endless motions inside the picture, of one side of the split by captions."""
    while True:
        radius, way = rng.uniform(*_RADII), rng.uniform(0.3, 0.45)
        direction = rng.choice(list(DIRECTIONS))
        low = radius + 0.03
        start, across = rng.uniform(low, 1 - low - way), rng.uniform(low, 1 - low)
        if direction in ("left", "up"):
            start = 1 - start
        x, y = (start, across) if direction in ("left", "right") else (across, start)
        shape = Shape("", rng.choice(list(COLORS)), rng.choice(KINDS), x, y, radius)
        motion = Motion(shape, direction, way)
        if is_held_out(motion.caption) == held_out:
            yield motion


def render_motion(motion: Motion, num_frames: int, side: int) -> NDArray[np.float32]:
    """[frames, side, side, 3] in 0..1."""
    shares = np.linspace(0, 1, num_frames)
    return np.stack([render(motion.scene(float(share)), side) for share in shares])


@dataclass(frozen=True, slots=True)
class MotionVerdict:
    """What of a caption is right; the colour in every frame, the shape in most.

    Between two cells of the picture, the corners of a small diamond look like a circle's.
    """

    count: bool
    color: bool
    shape: bool
    direction: bool

    @property
    def all(self) -> bool:
        """Everything is right."""
        return all(astuple(self))


def _has_kind(item: Found, kind: str) -> bool:
    return item.kind == kind and item.overlap >= _LEAST_OVERLAP


def check_motion(motion: Motion, frames: NDArray[np.float32]) -> MotionVerdict:
    """Compares frames, [frames, side, side, 3] in 0..1, with a caption."""
    found = [analyse(frame)[0] for frame in frames]
    if any(len(objects) != 1 for objects in found):
        return MotionVerdict(False, False, False, False)
    objects = [only for (only,) in found]
    dx, dy = objects[-1].x - objects[0].x, objects[-1].y - objects[0].y
    ahead, aside = DIRECTIONS[motion.direction], DIRECTIONS[motion.direction][::-1]
    way = dx * ahead[0] + dy * ahead[1]
    stray = abs(dx * aside[0] + dy * aside[1])
    return MotionVerdict(
        count=True,
        color=all(item.color == motion.shape.color for item in objects),
        shape=2 * sum(_has_kind(item, motion.shape.kind) for item in objects) > len(objects),
        direction=way >= _LEAST_WAY and stray <= _MOST_STRAY,
    )
