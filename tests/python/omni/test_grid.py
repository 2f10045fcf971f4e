# SPDX-License-Identifier: Apache-2.0
"""Places of ranks: coordinates and groups agree, whatever the sizes."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from diffulex.omni.grid import AXES, COMBINED, Grid

SIZES = [sizes for sizes in product((1, 2, 3), repeat=len(AXES)) if prod(sizes) <= 16]


@pytest.mark.parametrize("name", [*AXES, *COMBINED])
def test_groups_share_out_all_ranks(name):
    for sizes in SIZES:
        grid = Grid(dict(zip(AXES, sizes)))
        world = prod(sizes)
        groups = grid.group_ranks(name)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        inner = COMBINED.get(name, (name,))
        for group in groups:
            assert len(group) == grid.size(name)
            outer = {tuple(grid.coords(r)[a] for a in AXES if a not in inner) for r in group}
            assert len(outer) == 1
        for rank in range(world):
            place = grid.coords(rank)
            number = 0
            for axis, size in reversed(list(zip(AXES, sizes))):
                number = number * size + place[axis]
            assert number == rank
            assert all(value == 0 for axis, value in grid.coords(grid.leader(rank)).items()
                       if axis != "dp")  # fmt: skip


def test_examples():
    grid = Grid({"tp": 2, "ulysses": 2, "cfg": 2})
    assert grid.group_ranks("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.group_ranks("sp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.group_ranks("cfg") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    grid = Grid({"dp": 2, "cfg": 2, "pp": 2, "ring": 2})
    assert [0, 8] in grid.group_ranks("dp")
    assert grid.group_ranks("cfg")[:2] == [[0, 4], [1, 5]]
    assert grid.group_ranks("pp")[:2] == [[0, 2], [1, 3]]
    assert grid.group_ranks("sp")[0] == [0, 1]
    assert Grid({}).group_ranks("mp") == [[0]]
