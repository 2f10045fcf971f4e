# SPDX-License-Identifier: Apache-2.0
"""Scenes of one or two coloured shapes: the grammar of their captions, and a renderer.

Coordinates and sizes are shares of the picture's side; x grows to the right, y downwards.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

__all__ = [
    "COLORS",
    "GRAMMAR_VERSION",
    "GROUNDS",
    "KINDS",
    "RELATIONS",
    "SIZES",
    "Scene",
    "Shape",
    "draw_scene",
    "draw_scenes",
    "inside",
    "is_held_out",
    "render",
    "words",
]

#: Changes whenever a caption may mean another picture.
GRAMMAR_VERSION = 1
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 170),
    "orange": (240, 130, 30),
    "cyan": (50, 200, 210),
    "pink": (245, 130, 180),
}
#: Backgrounds; a caption without one means white.
GROUNDS = {"white": (250, 250, 250), "black": (15, 15, 15), "gray": (128, 128, 128)}
RELATIONS = ("left of", "right of", "above", "below")
#: Half of a shape's extent; the empty word is a shape of no stated size.
SIZES = {"small": (0.13, 0.145), "": (0.155, 0.19), "large": (0.20, 0.23)}
#: Share of the captions that no model is trained on.
_HELD_OUT_IN = 20
_SINGLE_SHARE = 0.35


def _circle(u: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float32]:
    return 1 - np.sqrt(u * u + v * v)


def _square(u: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float32]:
    return 1 - np.maximum(np.abs(u), np.abs(v))


def _triangle(u: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float32]:
    edges: NDArray[np.float32] = np.minimum(
        1 - v, (1 + v - 2 * np.abs(u)) / np.float32(math.sqrt(5))
    )
    return edges


def _diamond(u: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float32]:
    edges: NDArray[np.float32] = (1 - np.abs(u) - np.abs(v)) / np.float32(math.sqrt(2))
    return edges


def _cross(u: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float32]:
    a, b, arm = np.abs(u), np.abs(v), np.float32(0.36)
    edges: NDArray[np.float32] = np.maximum(np.minimum(arm - a, 1 - b), np.minimum(arm - b, 1 - a))
    return edges


_INSIDE: dict[str, Callable[..., NDArray[np.float32]]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
    "cross": _cross,
}
KINDS = tuple(_INSIDE)


def inside(kind: str, u: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float32]:
    """Distance to the border of a shape in units of its half extent, positive inside.

    Args:
        kind: one of `KINDS`.
        u, v: coordinates around the centre, the shape's box is [-1, 1]; they broadcast.
    """
    return _INSIDE[kind](u, v)


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape: what the caption says (`size`, `color`, `kind`) and where it is."""

    size: str
    color: str
    kind: str
    x: float
    y: float
    radius: float

    @property
    def phrase(self) -> str:
        article = "an" if not self.size and self.color == "orange" else "a"
        return " ".join(word for word in (article, self.size, self.color, self.kind) if word)


@dataclass(frozen=True, slots=True)
class Scene:
    """One or two shapes on a background; `relation` is empty for one, `said_ground` may be."""

    shapes: tuple[Shape, ...]
    relation: str
    said_ground: str

    @property
    def ground(self) -> str:
        return self.said_ground or "white"

    @property
    def caption(self) -> str:
        text = f" {self.relation} ".join(shape.phrase for shape in self.shapes)
        return f"{text} on {self.said_ground}" if self.said_ground else text


def words() -> list[str]:
    """Every word a caption can have, in a fixed order."""
    relations = [word for relation in RELATIONS for word in relation.split()]
    sizes = [size for size in SIZES if size]
    listed = [*COLORS, *GROUNDS, *KINDS, "a", "an", "on", *sizes, *relations]
    return list(dict.fromkeys(listed))


def draw_scene(rng: random.Random) -> Scene:
    """A random scene whose shapes lie inside the picture and do not touch."""
    count = 1 if rng.random() < _SINGLE_SHARE else 2
    ground = rng.choice(("", "", *GROUNDS))
    colors = rng.sample(list(COLORS), count)
    looks = []
    for color in colors:
        size = rng.choice(("", "", "small", "large"))
        looks.append((size, color, rng.choice(KINDS), rng.uniform(*SIZES[size])))
    radii = [look[3] for look in looks]
    if count == 1:
        margin = radii[0] + 0.03
        places = [(rng.uniform(margin, 1 - margin), rng.uniform(margin, 1 - margin))]
        relation = ""
    else:
        relation = rng.choice(RELATIONS)
        places = _two_places(rng, relation, radii[0], radii[1])
    shapes = tuple(
        Shape(size, color, kind, x, y, radius)
        for (size, color, kind, radius), (x, y) in zip(looks, places)
    )
    return Scene(shapes, relation, ground)


def _two_places(
    rng: random.Random, relation: str, first: float, second: float
) -> list[tuple[float, float]]:
    # Two large shapes need most of the side.
    half = min(first + second + rng.uniform(0.03, 0.12) / 2, 0.485)
    low, high = max(half + 0.02, 0.4), min(1 - half - 0.02, 0.6)
    center = rng.uniform(low, high) if half < 0.47 else 0.5
    along = [center - half + first, center + half - second]
    across = [rng.uniform(0.38, 0.62)]
    across.append(across[0] + rng.uniform(-0.06, 0.06))
    if relation in ("right of", "below"):
        along = [1 - value for value in along]
    pairs = list(zip(along, across))
    return pairs if relation in ("left of", "right of") else [(y, x) for x, y in pairs]


def is_held_out(caption: str) -> bool:
    """Whether the caption belongs to those that no model is trained on (one in twenty)."""
    return zlib.crc32(caption.encode()) % _HELD_OUT_IN == 0


def draw_scenes(rng: random.Random, *, held_out: bool) -> Iterator[Scene]:
    """Endless scenes of one side of the split."""
    while True:
        scene = draw_scene(rng)
        if is_held_out(scene.caption) == held_out:
            yield scene


def render(scene: Scene, side: int = 64) -> NDArray[np.float32]:
    """The picture, [side, side, 3] in 0..1, borders smoothed over one pixel."""
    image = np.empty((side, side, 3), np.float32)
    image[:] = np.array(GROUNDS[scene.ground], np.float32) / 255
    centers = (np.arange(side, dtype=np.float32) + np.float32(0.5)) / side
    for shape in scene.shapes:
        reach = shape.radius + 1 / side
        rows, columns = (
            slice(*np.searchsorted(centers, (middle - reach, middle + reach)))
            for middle in (shape.y, shape.x)
        )
        u = (centers[columns] - np.float32(shape.x))[None, :] / np.float32(shape.radius)
        v = (centers[rows] - np.float32(shape.y))[:, None] / np.float32(shape.radius)
        distance = inside(shape.kind, u, v) * np.float32(shape.radius * side)
        coverage = np.clip(distance + np.float32(0.5), 0, 1)[..., None]
        color = np.array(COLORS[shape.color], np.float32) / 255
        image[rows, columns] += coverage * (color - image[rows, columns])
    return image
