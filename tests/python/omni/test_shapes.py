# SPDX-License-Identifier: Apache-2.0
"""Scenes, their renderer and the checker that judges pictures of them."""

from __future__ import annotations

import dataclasses
import random
from itertools import islice

import numpy as np
import pytest

from diffulex.omni.bench.evaluate import held_out_scenes
from diffulex.omni.bench.scenes import (
    COLORS,
    GROUNDS,
    KINDS,
    RELATIONS,
    SIZES,
    Scene,
    Shape,
    draw_scene,
    draw_scenes,
    is_held_out,
    render,
    words,
)
from diffulex.omni.bench.shapes import ATTRIBUTES, _components, analyse, check

LEFT = Shape("", "red", "circle", 0.28, 0.5, 0.17)
RIGHT = Shape("", "blue", "square", 0.72, 0.5, 0.17)
PAIR = Scene((LEFT, RIGHT), "left of", "")


def wrong(scene: Scene, image: np.ndarray) -> set[str]:
    verdict = check(scene, image)
    return {name for name in ATTRIBUTES if not getattr(verdict, name)}


@pytest.mark.slow
def test_the_checker_reads_every_rendered_scene_through_noise():
    rng, noise = random.Random(1), np.random.default_rng(1)
    scenes = [draw_scene(rng) for _ in range(1000)]
    for scene in scenes:
        image = render(scene)
        image = image + 0.06 * noise.standard_normal(image.shape, dtype=np.float32)
        assert not wrong(scene, np.clip(image, 0, 1)), scene.caption
    captions = " ".join(scene.caption for scene in scenes)
    assert all(
        word in captions for word in (*COLORS, *GROUNDS, *KINDS, *RELATIONS, *filter(None, SIZES))
    )


@pytest.mark.parametrize(
    ("drawn", "missing"),
    [
        (Scene((LEFT, RIGHT), "left of", "black"), {"ground"}),
        (Scene((LEFT,), "", ""), {"count", "color", "shape", "size", "relation"}),
        (Scene((dataclasses.replace(LEFT, color="green"), RIGHT), "", ""),
         {"color", "shape", "size", "relation"}),
        (Scene((dataclasses.replace(LEFT, kind="diamond"), RIGHT), "", ""), {"shape"}),
        (Scene((dataclasses.replace(LEFT, radius=0.225), RIGHT), "", ""), {"size"}),
        (Scene((dataclasses.replace(LEFT, x=0.72), dataclasses.replace(RIGHT, x=0.28)), "", ""),
         {"relation"}),
        (Scene((dataclasses.replace(LEFT, x=0.5, y=0.2), dataclasses.replace(RIGHT, x=0.5, y=0.8)), "", ""),
         {"relation"}),
    ],
    ids=["ground", "one missing", "color", "kind", "size", "sides", "direction"],
)  # fmt: skip
def test_the_checker_sees_what_is_wrong(drawn, missing):
    assert not wrong(PAIR, render(PAIR))
    assert wrong(PAIR, render(drawn)) == {*missing, "all"}


@pytest.mark.parametrize(("relation", "x", "y"), [
    ("left of", 0.72, 0.5), ("right of", 0.28, 0.5), ("above", 0.5, 0.72), ("below", 0.5, 0.28),
])  # fmt: skip
def test_relations(relation, x, y):
    first = dataclasses.replace(LEFT, x=1 - x, y=1 - y)
    second = dataclasses.replace(RIGHT, x=x, y=y)
    image = render(Scene((first, second), relation, ""))
    right = {r for r in RELATIONS if check(Scene((first, second), r, ""), image).relation}
    assert right == {relation}


def test_noise_is_nothing():
    noise = np.random.default_rng(0).random((64, 64, 3), dtype=np.float32)
    assert "all" in wrong(PAIR, noise)
    found, ground = analyse(np.full((64, 64, 3), 15 / 255, np.float32))
    assert (found, ground) == ([], "black")


def test_components_are_connected_by_sides():
    mask = np.array([[1, 1, 0, 1], [0, 1, 0, 1], [1, 0, 1, 1], [1, 0, 0, 0]], bool)
    labels = _components(mask)
    assert (labels[~mask] == -1).all()
    groups = [set(map(tuple, np.argwhere(labels == label))) for label in np.unique(labels[mask])]
    assert sorted(map(len, groups)) == [2, 3, 4]
    assert {(2, 0), (3, 0)} in groups
    snake = np.zeros((41, 41), bool)
    snake[::2] = True
    snake[1::4, -1] = snake[3::4, 0] = True
    assert len(np.unique(_components(snake)[snake])) == 1


def test_captions():
    orange = Shape("", "orange", "cross", 0.5, 0.5, 0.17)
    assert orange.phrase == "an orange cross"
    assert dataclasses.replace(orange, size="large").phrase == "a large orange cross"
    assert PAIR.caption == "a red circle left of a blue square"
    assert Scene((LEFT,), "", "gray").caption == "a red circle on gray"
    known = set(words())
    assert all(set(scene.caption.split()) <= known for scene in held_out_scenes(200))


def test_the_split():
    held_out = held_out_scenes(300)
    assert held_out == held_out_scenes(500)[:300]
    trained = {s.caption for s in islice(draw_scenes(random.Random(0), held_out=False), 3000)}
    assert not trained & {scene.caption for scene in held_out}
    assert all(is_held_out(scene.caption) for scene in held_out)


def test_shapes_lie_inside_and_apart():
    rng = random.Random(5)
    for _ in range(2000):
        scene = draw_scene(rng)
        for shape in scene.shapes:
            assert shape.radius <= shape.x <= 1 - shape.radius
            assert shape.radius <= shape.y <= 1 - shape.radius
        if len(scene.shapes) == 2:
            a, b = scene.shapes
            apart = max(abs(a.x - b.x), abs(a.y - b.y)) - a.radius - b.radius
            assert apart > 0.019
