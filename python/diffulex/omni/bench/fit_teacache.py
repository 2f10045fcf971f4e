# SPDX-License-Identifier: Apache-2.0
"""Coefficients of TeaCache for a model: how its blocks' sum changes with the input of the first one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diffulex.errors import ConfigError
from diffulex.omni.bench.scenes import draw_scenes
from diffulex.omni.cache.selector import AutoCacheBackend
from diffulex.omni.omni_diffusion import OmniDiffusion
from diffulex.omni.request import OmniDiffusionRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DEFAULT_CAPTIONS", "TeaCacheFit", "fit_teacache", "shape_captions"]

DEFAULT_CAPTIONS = 50
_SEED = 54321
_DEGREE = 4
_BACKEND = "tea_cache_fit"


class TeaCacheFit(NamedTuple):
    """A polynomial and what it was made from.

    Attributes:
        coefficients: highest power first.
        num_prompts, num_steps: that were drawn.
        num_pairs: changes of neighbouring steps.
        mean_change, mean_error: of the output, and how far the polynomial is from it.
    """

    coefficients: tuple[float, ...]
    num_prompts: int
    num_steps: int
    num_pairs: int
    mean_change: float
    mean_error: float

    def to_text(self) -> str:
        """For a terminal; the first line is the option that takes it."""
        numbers = ",".join(f"{value:.6g}" for value in self.coefficients)
        return (
            f"--coefficients={numbers}\n"
            f"{self.num_prompts} prompts, {self.num_steps} steps, {self.num_pairs} pairs of steps:"
            f" mean change {self.mean_change:.4f}, mean error {self.mean_error:.4f}"
        )


def shape_captions(count: int) -> list[str]:
    """Captions that the bundled model may have been trained on; none of the evaluation."""
    scenes = draw_scenes(random.Random(_SEED), held_out=False)
    return [scene.caption for scene in islice(scenes, count)]


def fit_teacache(
    engine_kwargs: Mapping[str, Any],
    prompts: Sequence[str],
    fields: Mapping[str, Any],
    *,
    output: str | None = None,
    on_image: Callable[[], None] | None = None,
) -> TeaCacheFit:
    """Draws the prompts, prompt i with seed i, and fits the polynomial by least squares.

    Args:
        engine_kwargs: of `OmniDiffusion`; one process.
        prompts: what is drawn.
        fields: further fields of the requests.
        output: .json file whose object `tea_cache` becomes the fit; the rest of it stays.
        on_image: called after each picture.

    Raises:
        ConfigError: the file cannot be one of JSON.
        UnsupportedFeatureError: the pipeline has nothing that TeaCache compares.
    """
    content = {} if output is None else _read_object(output)
    x: list[float] = []
    y: list[float] = []
    num_steps = 0
    with _registered(), OmniDiffusion(**{**engine_kwargs, "cache_backend": _BACKEND}) as engine:
        for seed, prompt in enumerate(prompts):
            request = OmniDiffusionRequest(prompt, seed=seed, **fields)
            (result,) = engine.generate_requests([request])
            num_steps = result.metrics["num_inference_steps"]
            for branches in result.metrics["cache"].values():
                for branch in branches.values():
                    x += [pair[0] for pair in branch["pairs"]]
                    y += [pair[1] for pair in branch["pairs"]]
            if on_image is not None:
                on_image()
    if len(x) <= _DEGREE:
        raise ConfigError(
            f"--fit-teacache: expected more than {_DEGREE} pairs of steps, got {len(x)}"
        )
    coefficients = np.polyfit(np.array(x), np.array(y), _DEGREE)
    errors = np.abs(np.polyval(coefficients, x) - y)
    fit = TeaCacheFit(
        tuple(float(value) for value in coefficients),
        len(prompts),
        num_steps,
        len(x),
        float(np.mean(y)),
        float(errors.mean()),
    )
    if output is not None:
        content["tea_cache"] = fit._asdict()
        Path(output).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return fit


def _read_object(name: str) -> dict[str, Any]:
    path = Path(name)
    if path.suffix != ".json" or not path.resolve().parent.is_dir():
        raise ConfigError(f"--output: expected a .json file in an existing directory, got {name!r}")
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output: expected readable JSON in {name}, got {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--output: expected a JSON object in {name}, got {content!r}")
    return content


@contextmanager
def _registered() -> Iterator[None]:
    """While it lasts there is a cache that computes every step and records its changes."""
    from diffulex.omni.bench.recorder import RecordingBackend  # noqa: PLC0415 (imports torch)

    AutoCacheBackend.register(_BACKEND, RecordingBackend)
    try:
        yield
    finally:
        AutoCacheBackend.unregister(_BACKEND)
