# SPDX-License-Identifier: Apache-2.0
"""Which parts of its caption a picture of shapes shows, decided by rule.

Pixels take the nearest colour of the palette, connected ones become objects, an object's shape is the
template with the largest overlap. numpy only.
"""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from diffulex.omni.bench.scenes import COLORS, GROUNDS, KINDS, SIZES, inside

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from diffulex.omni.bench.scenes import Scene, Shape

__all__ = ["ATTRIBUTES", "Found", "Verdict", "analyse", "check"]

_PALETTE = {**COLORS, **GROUNDS}
_NAMES = tuple(_PALETTE)
_TEMPLATE_SIDE = 24
#: Objects below this share of the picture are noise.
_LEAST_AREA = 0.012
_LEAST_SIDE = 4
_LEAST_OVERLAP = 0.72
_ASPECTS = (0.8, 1.25)
_SIZE_TOLERANCE = 0.02


class Found(NamedTuple):
    """An object of a picture; `overlap` is intersection over union with its template."""

    color: str
    kind: str
    x: float
    y: float
    radius: float
    overlap: float
    aspect: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What of a caption is right; `relation` is true where the caption has none."""

    ground: bool
    count: bool
    color: bool
    shape: bool
    size: bool
    relation: bool

    @property
    def all(self) -> bool:
        """Everything is right."""
        return all(astuple(self))


ATTRIBUTES = (*(field.name for field in fields(Verdict)), "all")


@functools.cache
def _templates() -> NDArray[np.bool_]:
    grid = (np.arange(_TEMPLATE_SIDE, dtype=np.float32) + np.float32(0.5)) / _TEMPLATE_SIDE * 2 - 1
    return np.stack([inside(kind, grid[None, :], grid[:, None]) > 0 for kind in KINDS])


def _components(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[H, W]: -1 outside, else a number shared by the pixels connected by their sides."""
    labels = np.where(mask, np.arange(mask.size).reshape(mask.shape), -1)
    inside_labels = labels[mask]
    while True:
        before = inside_labels
        around = labels.copy()
        np.maximum(around[1:], labels[:-1], out=around[1:])
        np.maximum(around[:-1], labels[1:], out=around[:-1])
        np.maximum(around[:, 1:], labels[:, :-1], out=around[:, 1:])
        np.maximum(around[:, :-1], labels[:, 1:], out=around[:, :-1])
        # A label is the index of a pixel of the component: its own label is at least as far.
        inside_labels = around.reshape(-1)[around[mask]]
        if np.array_equal(inside_labels, before):
            return labels
        labels[mask] = inside_labels


def _resized(mask: NDArray[np.bool_], side: int) -> NDArray[np.bool_]:
    """The mask stretched to [side, side] by bilinear interpolation."""
    weights = []
    for extent in mask.shape:
        source = np.clip((np.arange(side) + 0.5) * extent / side - 0.5, 0, extent - 1)
        low = np.floor(source).astype(int)
        matrix = np.zeros((side, extent))
        np.add.at(matrix, (np.arange(side), low), 1 - (source - low))
        np.add.at(matrix, (np.arange(side), np.minimum(low + 1, extent - 1)), source - low)
        weights.append(matrix)
    result: NDArray[np.bool_] = weights[0] @ mask @ weights[1].T > 0.5
    return result


def analyse(image: NDArray[np.float32]) -> tuple[list[Found], str]:
    """Objects of a picture, [H, W, 3] in 0..1, and the name of its background."""
    palette = np.array(list(_PALETTE.values()), np.float32) / 255
    # |pixel - color|^2 without the pixel's own square, which is the same for every colour.
    nearest = (np.square(palette).sum(-1) - 2 * (image @ palette.T)).argmin(-1)
    border = np.concatenate([nearest[0], nearest[-1], nearest[:, 0], nearest[:, -1]])
    ground = int(np.bincount(border).argmax())
    labels = _components(nearest != ground)
    side = image.shape[1]
    found = []
    for label, area in zip(*np.unique(labels, return_counts=True)):
        if label < 0 or area < _LEAST_AREA * labels.size:
            continue
        mask = labels == label
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        if min(bottom - top, right - left) < _LEAST_SIDE:
            continue
        crop = _resized(mask[top:bottom, left:right], _TEMPLATE_SIDE)
        templates = _templates()
        overlaps = (crop & templates).sum((1, 2)) / (crop | templates).sum((1, 2))
        best = int(overlaps.argmax())
        found.append(
            Found(
                color=_NAMES[int(np.bincount(nearest[mask]).argmax())],
                kind=KINDS[best],
                x=float(left + right) / 2 / side,
                y=float(top + bottom) / 2 / side,
                radius=float(max(right - left, bottom - top)) / 2 / side,
                overlap=float(overlaps[best]),
                aspect=float(right - left) / float(bottom - top),
            )
        )
    return found, _NAMES[ground]


def check(scene: Scene, image: NDArray[np.float32]) -> Verdict:
    """Compares a picture, [H, W, 3] in 0..1, with the caption of a scene.

    Places do not count, only what the caption says. Without the right colours, shape, size and
    relation are wrong as well: there is nothing to compare.
    """
    found, ground = analyse(image)
    pairs = []
    for wanted in scene.shapes:
        same = [item for item in found if item.color == wanted.color]
        if len(same) == 1:
            pairs.append((same[0], wanted))
    has_colors = len(pairs) == len(scene.shapes)
    return Verdict(
        ground=ground == scene.ground,
        count=len(found) == len(scene.shapes),
        color=has_colors,
        shape=has_colors and all(_has_shape(*pair) for pair in pairs),
        size=has_colors and all(_has_size(*pair) for pair in pairs),
        relation=not scene.relation
        or (has_colors and _has_relation(scene.relation, [item for item, _ in pairs])),
    )


def _has_shape(item: Found, wanted: Shape) -> bool:
    low, high = _ASPECTS
    is_close = item.overlap >= _LEAST_OVERLAP and low < item.aspect < high
    return is_close and item.kind == wanted.kind


def _has_size(item: Found, wanted: Shape) -> bool:
    low, high = SIZES[wanted.size]
    return low - _SIZE_TOLERANCE <= item.radius <= high + _SIZE_TOLERANCE


def _has_relation(relation: str, found: list[Found]) -> bool:
    dx, dy = found[1].x - found[0].x, found[1].y - found[0].y
    # How far the first shape lies on the side that the caption names, and how far off that line.
    ahead, aside = {
        "left of": (dx, dy),
        "right of": (-dx, dy),
        "above": (dy, dx),
        "below": (-dy, dx),
    }[relation]
    return ahead > abs(aside)
