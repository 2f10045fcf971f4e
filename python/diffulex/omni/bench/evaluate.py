# SPDX-License-Identifier: Apache-2.0
"""How often an image model draws what a held-out caption says."""

from __future__ import annotations

import datetime
import json
import platform
import random
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.bench.evaluate import wilson_interval
from diffulex.errors import ConfigError
from diffulex.omni.bench.scenes import GRAMMAR_VERSION, draw_scenes
from diffulex.omni.bench.shapes import ATTRIBUTES, check
from diffulex.omni.omni_diffusion import OmniDiffusion
from diffulex.omni.request import OmniDiffusionRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diffulex.bench.evaluate import Interval
    from diffulex.omni.bench.scenes import Scene
    from diffulex.omni.bench.shapes import Verdict

__all__ = ["DEFAULT_LIMIT", "ShapesReport", "ShapesRun", "evaluate_shapes", "held_out_scenes"]

DEFAULT_LIMIT = 500
_SCENES_SEED = 12345
_SUFFIXES = (".json", ".md")
_PACKAGES = ("diffusers", "transformers", "torch")


@dataclass(frozen=True, slots=True)
class ShapesRun:
    """Verdicts of one setting.

    Attributes:
        setting: fields of the requests that were given.
        num_right: per attribute; captions without a relation count as right there.
        seconds: of drawing, model loading excluded.
        wrong: captions with something wrong.
    """

    setting: Mapping[str, Any]
    num_images: int
    num_right: Mapping[str, int]
    seconds: float
    wrong: tuple[str, ...]

    @property
    def accuracy(self) -> dict[str, float]:
        """Share of the images that are right, per attribute."""
        return {name: count / self.num_images for name, count in self.num_right.items()}

    def interval(self, attribute: str) -> Interval:
        """95 % Wilson interval of an attribute."""
        return wilson_interval(self.num_right[attribute], self.num_images)

    def as_dict(self) -> dict[str, Any]:
        return {
            "setting": dict(self.setting),
            "num_images": self.num_images,
            "accuracy": self.accuracy,
            "wilson_95": {name: list(self.interval(name)) for name in self.num_right},
            "seconds": self.seconds,
            "wrong": list(self.wrong),
        }


@dataclass(frozen=True, slots=True)
class ShapesReport:
    """All settings of one command."""

    environment: Mapping[str, Any]
    runs: tuple[ShapesRun, ...]

    def to_json(self) -> str:
        """One object with ``environment`` and ``runs``."""
        content = {"environment": dict(self.environment), "runs": [r.as_dict() for r in self.runs]}
        return json.dumps(content, indent=2) + "\n"

    def to_text(self) -> str:
        """One line per setting and attribute, for a terminal."""
        lines = []
        for run in self.runs:
            shown = ", ".join(f"{name} {value}" for name, value in run.setting.items())
            rate = run.seconds / run.num_images
            lines.append(f"{run.num_images} images, {shown or 'defaults'}, {rate:.2f} s each")
            for name, share in run.accuracy.items():
                low, high = run.interval(name)
                lines.append(f"  {name:<9} {share:6.1%}  [{low:.1%}, {high:.1%}]")
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """A document with the command, the machine and a table."""
        lines = ["# Shapes report", "", "```", str(self.environment["command"]), "```", ""]
        facts = {key: value for key, value in self.environment.items() if key != "command"}
        lines += [f"- {key}: {value}" for key, value in facts.items()]
        lines += ["", "| setting | images | " + " | ".join(ATTRIBUTES) + " | seconds each |"]
        lines.append("|" + " --- |" * (len(ATTRIBUTES) + 3))
        for run in self.runs:
            shown = ", ".join(f"{name} {value}" for name, value in run.setting.items())
            cells = []
            for name in ATTRIBUTES:
                low, high = run.interval(name)
                cells.append(f"{run.accuracy[name]:.1%} ({low:.1%} to {high:.1%})")
            rate = f"{run.seconds / run.num_images:.2f}"
            row = [shown or "defaults", str(run.num_images), *cells, rate]
            lines.append("| " + " | ".join(row) + " |")
        lines += ["", "Share of the images that are right, 95 % Wilson intervals."]
        return "\n".join(lines) + "\n"


def held_out_scenes(count: int) -> list[Scene]:
    """The first scenes of the evaluation, always the same; no model is trained on their captions."""
    return list(islice(draw_scenes(random.Random(_SCENES_SEED), held_out=True), count))


def evaluate_shapes(
    engine_kwargs: Mapping[str, Any],
    *,
    settings: Sequence[Mapping[str, Any]] = ({},),
    limit: int = DEFAULT_LIMIT,
    outputs: Sequence[str] = (),
    command: str = "",
    on_image: Callable[[], None] | None = None,
) -> ShapesReport:
    """Draws the held-out captions, image i with seed i, once per setting, and checks them.

    Args:
        engine_kwargs: of `OmniDiffusion`.
        settings: request fields of each run.
        outputs: files for the report, .json or .md.
        on_image: called after each image.

    Raises:
        ConfigError: a report of an unknown kind, or in a directory that does not exist.
    """
    for name in outputs:
        if Path(name).suffix not in _SUFFIXES:
            raise ConfigError(f"--output: expected a .json or .md file, got {name!r}")
        if not Path(name).resolve().parent.is_dir():
            raise ConfigError(f"--output: expected a file in an existing directory, got {name!r}")
    scenes = held_out_scenes(limit)
    with OmniDiffusion(**engine_kwargs) as engine:
        # Every replica gets a whole batch.
        batch = engine.config.engine.max_batch_size * engine.config.parallel.data_parallel_size
        runs = tuple(_run(engine, scenes, setting, batch, on_image) for setting in settings)
        environment = _environment(engine, command)
    report = ShapesReport(environment, runs)
    for name in outputs:
        text = report.to_json() if Path(name).suffix == ".json" else report.to_markdown()
        Path(name).write_text(text, encoding="utf-8")
    return report


def _run(
    engine: OmniDiffusion,
    scenes: Sequence[Scene],
    setting: Mapping[str, Any],
    batch: int,
    on_image: Callable[[], None] | None,
) -> ShapesRun:
    verdicts: list[Verdict] = []
    start = time.perf_counter()
    for first in range(0, len(scenes), batch):
        requests = [
            OmniDiffusionRequest(scene.caption, seed=first + i, output_type="np", **setting)
            for i, scene in enumerate(scenes[first : first + batch])
        ]
        for scene, output in zip(scenes[first:], engine.generate_requests(requests)):
            verdicts.append(check(scene, output.images[0]))
            if on_image is not None:
                on_image()
    return ShapesRun(
        setting=dict(setting),
        num_images=len(scenes),
        num_right={name: sum(getattr(v, name) for v in verdicts) for name in ATTRIBUTES},
        seconds=time.perf_counter() - start,
        wrong=tuple(s.caption for s, verdict in zip(scenes, verdicts) if not verdict.all),
    )


def _environment(engine: OmniDiffusion, command: str) -> dict[str, Any]:
    return {
        "command": command,
        "model": str(engine.config.model.model or "default"),
        "device": engine.engine.device,
        "defaults": engine.engine.defaults,
        "grammar": GRAMMAR_VERSION,
        "machine": platform.machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        **{package: version(package) for package in _PACKAGES},
    }
