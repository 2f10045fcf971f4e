# SPDX-License-Identifier: Apache-2.0
"""Captions and pictures to train on, rendered by several processes."""

from __future__ import annotations

import os
import random
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffulex.omni.bench.scenes import Scene, draw_scenes, render

_CHUNK = 1000
_MAX_PROCESSES = 8


class Bank(NamedTuple):
    """Scenes and their pictures, uint8 [N, 3, side, side]."""

    scenes: list[Scene]
    pixels: NDArray[np.uint8]


def _chunk(seed: int, count: int, side: int) -> Bank:
    scenes = list(islice(draw_scenes(random.Random(seed), held_out=False), count))
    pixels = np.stack([render(scene, side) for scene in scenes])
    return Bank(scenes, np.rint(pixels * 255).astype(np.uint8).transpose(0, 3, 1, 2))


def make_bank(count: int, side: int) -> Bank:
    """`count` scenes whose captions are not held out; the same for every number of processes."""
    counts = [min(_CHUNK, count - start) for start in range(0, count, _CHUNK)]
    with ProcessPoolExecutor(min(_MAX_PROCESSES, os.cpu_count() or 1, len(counts))) as pool:
        chunks = list(pool.map(_chunk, range(len(counts)), counts, [side] * len(counts)))
    scenes = [scene for chunk in chunks for scene in chunk.scenes]
    return Bank(scenes, np.concatenate([chunk.pixels for chunk in chunks]))
