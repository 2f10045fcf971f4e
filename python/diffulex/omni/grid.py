# SPDX-License-Identifier: Apache-2.0
"""Which rank has which place among several processes; pure numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["AXES", "COMBINED", "Grid"]

#: Axes, the first counts fastest.
AXES = ("tp", "ulysses", "ring", "pp", "cfg", "dp")
#: Groups over several axes: the ranks of a sequence, those that draw one image, all.
COMBINED = {"sp": ("ulysses", "ring"), "mp": AXES[:-1], "world": AXES}


@dataclass(frozen=True)
class Grid:
    """Ranks with one coordinate per axis: `rank = tp + TP * (ulysses + U * (ring + ...))`.

    Args:
        sizes: of the axes; one where none is given.
    """

    sizes: Mapping[str, int]

    def size(self, name: str) -> int:
        """Ranks of a group: of an axis or of several."""
        number = 1
        for axis in COMBINED.get(name, (name,)):
            number *= self.sizes.get(axis, 1)
        return number

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank on each axis."""
        found = {}
        for axis in AXES:
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def group_ranks(self, name: str) -> list[list[int]]:
        """All groups of a name: ranks that agree in every coordinate that is not the group's."""
        inner = COMBINED.get(name, (name,))
        groups: dict[tuple[int, ...], list[int]] = {}
        # Ranks come in their order, so that the members of a group do as well.
        for rank in range(self.size("world")):
            place = self.coords(rank)
            groups.setdefault(tuple(place[a] for a in AXES if a not in inner), []).append(rank)
        return list(groups.values())

    def leader(self, rank: int) -> int:
        """The rank that decodes the images which `rank` takes part in."""
        (group,) = (ranks for ranks in self.group_ranks("mp") if rank in ranks)
        return group[0]
