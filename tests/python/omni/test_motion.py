# SPDX-License-Identifier: Apache-2.0
"""Captions of moving shapes, and the rule that reads them from frames."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

from diffulex.omni.bench.motion import DIRECTIONS, check_motion, draw_motions, render_motion


@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_rendered_motions_are_read_as_their_captions(noise):
    generator = np.random.default_rng(0)
    for motion in islice(draw_motions(random.Random(1), held_out=False), 40):
        frames = render_motion(motion, 5, 32)
        frames = np.clip(frames + generator.normal(0, noise, frames.shape), 0, 1)
        assert check_motion(motion, frames.astype(np.float32)).all, motion.caption


def test_other_motions_are_not():
    """Backwards, standing still, in another colour, as another shape, vanished."""
    (motion,) = islice(draw_motions(random.Random(2), held_out=False), 1)
    frames = render_motion(motion, 5, 32)
    assert not check_motion(motion, frames[::-1]).direction
    assert not check_motion(motion, frames[[0] * 5]).direction
    assert not check_motion(motion, frames[..., ::-1].copy()).all
    gone = frames.copy()
    gone[2] = 1
    assert not check_motion(motion, gone).count


def test_the_sides_of_the_split_share_no_caption():
    sides = [
        {motion.caption for motion in islice(draw_motions(random.Random(3), held_out=side), 600)}
        for side in (False, True)
    ]
    assert not sides[0] & sides[1]
    assert {caption.split()[-1] for caption in sides[0]} == set(DIRECTIONS)


def test_shapes_stay_inside():
    for motion in islice(draw_motions(random.Random(4), held_out=False), 300):
        for share in (0, 1):
            (shape,) = motion.scene(share).shapes
            for place in (shape.x, shape.y):
                assert shape.radius <= place <= 1 - shape.radius
