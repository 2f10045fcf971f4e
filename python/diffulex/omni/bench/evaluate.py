# SPDX-License-Identifier: Apache-2.0
"""How often an image model draws what a held-out caption says."""

from __future__ import annotations

import datetime
import json
import math
import platform
import random
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from diffulex.bench.evaluate import wilson_interval
from diffulex.errors import ConfigError
from diffulex.omni.bench.scenes import GRAMMAR_VERSION, draw_scenes
from diffulex.omni.bench.shapes import ATTRIBUTES, check
from diffulex.omni.config import OmniDiffusionConfig
from diffulex.omni.errors import UnsupportedFeatureError
from diffulex.omni.omni_diffusion import OmniDiffusion
from diffulex.omni.outputs import count_blocks
from diffulex.omni.request import OmniDiffusionRequest
from diffulex.omni.support import check_engine
from diffulex.omni.worker_process import import_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from diffulex.bench.evaluate import Interval
    from diffulex.omni.bench.scenes import Scene
    from diffulex.omni.bench.shapes import Verdict
    from diffulex.omni.loader import FoundModel

__all__ = [
    "DEFAULT_LIMIT",
    "Pairs",
    "ShapesReport",
    "ShapesRun",
    "describe_machine",
    "evaluate_shapes",
    "held_out_scenes",
]

DEFAULT_LIMIT = 500
_SCENES_SEED = 12345
_SUFFIXES = (".json", ".md")
_PACKAGES = ("diffusers", "transformers", "torch")


class Pairs(NamedTuple):
    """A run beside the first one with the same fields, image by image.

    Attributes:
        num_lost: right in the first run and wrong in this one.
        num_gained: the other way round.
        pixel_change: mean difference of pixels in 0..1.
    """

    num_lost: int
    num_gained: int
    pixel_change: float

    @property
    def p_value(self) -> float:
        """McNemar's exact test: how likely it is that so unequal counts are chance."""
        count, least = self.num_lost + self.num_gained, min(self.num_lost, self.num_gained)
        tail = sum(math.comb(count, k) for k in range(least + 1))
        return min(1.0, tail / 2.0 ** (count - 1))


@dataclass(frozen=True, slots=True)
class ShapesRun:
    """Verdicts of one setting.

    Attributes:
        setting: fields of the requests that were given, and the cache where several were compared.
        num_right: per attribute; captions without a relation count as right there.
        seconds: of drawing, model loading excluded.
        wrong: captions with something wrong.
        blocks_run: share of the blocks of transformers that ran; None without a cache.
        pairs: the run beside the first one; None for that one.
    """

    setting: Mapping[str, Any]
    num_images: int
    num_right: Mapping[str, int]
    seconds: float
    wrong: tuple[str, ...]
    blocks_run: float | None = None
    pairs: Pairs | None = None

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
            **({} if self.blocks_run is None else {"blocks_run": self.blocks_run}),
            **({} if self.pairs is None else self._paired()),
        }

    def _paired(self) -> dict[str, Any]:
        assert self.pairs is not None
        return {**self.pairs._asdict(), "mcnemar_p": self.pairs.p_value}

    @property
    def shown(self) -> str:
        """The setting in words."""
        return ", ".join(f"{name} {value}" for name, value in self.setting.items()) or "defaults"


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
            rate = run.seconds / run.num_images
            lines.append(f"{run.num_images} images, {run.shown}, {rate:.2f} s each")
            for name, share in run.accuracy.items():
                low, high = run.interval(name)
                lines.append(f"  {name:<9} {share:6.1%}  [{low:.1%}, {high:.1%}]")
            if run.blocks_run is not None:
                lines.append(f"  blocks    {run.blocks_run:6.1%}  of those without a cache")
            if run.pairs is not None:
                lost, gained, change = run.pairs
                lines.append(
                    f"  beside the first: {lost} lost, {gained} gained (p {run.pairs.p_value:.2g}),"
                    f" pixels differ by {change:.4f}"
                )
        return "\n".join(lines)

    @property
    def _has_pairs(self) -> bool:
        return any(run.pairs is not None for run in self.runs)

    def to_markdown(self) -> str:
        """A document with the command, the machine and a table."""
        lines = ["# Shapes report", "", "```", str(self.environment["command"]), "```", ""]
        facts = {key: value for key, value in self.environment.items() if key != "command"}
        lines += [f"- {key}: {value}" for key, value in facts.items()]
        more = ("blocks run", "lost, gained (p)", "pixel change") if self._has_pairs else ()
        heads = ("setting", "images", *ATTRIBUTES, "seconds each", *more)
        lines += ["", "| " + " | ".join(heads) + " |"]
        lines.append("|" + " --- |" * len(heads))
        for run in self.runs:
            cells = []
            for name in ATTRIBUTES:
                low, high = run.interval(name)
                cells.append(f"{run.accuracy[name]:.1%} ({low:.1%} to {high:.1%})")
            rate = f"{run.seconds / run.num_images:.2f}"
            row = [run.shown, str(run.num_images), *cells, rate]
            if self._has_pairs:
                row += _comparison(run)
            lines.append("| " + " | ".join(row) + " |")
        lines += ["", "Share of the images that are right, 95 % Wilson intervals."]
        return "\n".join(lines) + "\n"


def _comparison(run: ShapesRun) -> list[str]:
    """Cells of a run beside the first one."""
    blocks = "100 %" if run.blocks_run is None else f"{run.blocks_run:.1%}"
    if run.pairs is None:
        return [blocks, "-", "-"]
    lost, gained, change = run.pairs
    return [blocks, f"{lost}, {gained} ({run.pairs.p_value:.2g})", f"{change:.4f}"]


def held_out_scenes(count: int) -> list[Scene]:
    """The first scenes of the evaluation, always the same; no model is trained on their captions."""
    return list(islice(draw_scenes(random.Random(_SCENES_SEED), held_out=True), count))


def evaluate_shapes(
    engine_kwargs: Mapping[str, Any],
    *,
    settings: Sequence[Mapping[str, Any]] = ({},),
    caches: Mapping[str, Mapping[str, Any]] | None = None,
    limit: int = DEFAULT_LIMIT,
    outputs: Sequence[str] = (),
    command: str = "",
    on_image: Callable[[], None] | None = None,
) -> ShapesReport:
    """Draws the held-out captions, image i with seed i, once per variant and setting; checks them.

    Args:
        engine_kwargs: of `OmniDiffusion`.
        settings: request fields of each run.
        caches: what each is called and its further keywords of the engine; the first is what the
            others are compared with, image by image.
        outputs: files for the report, .json or .md.
        on_image: called after each image.

    Raises:
        ConfigError: a report of an unknown kind, or in a directory that does not exist.
        OmniError, ConfigError: the model or this host cannot do one of the runs; none has begun.
    """
    for name in outputs:
        if Path(name).suffix not in _SUFFIXES:
            raise ConfigError(f"--output: expected a .json or .md file, got {name!r}")
        if not Path(name).resolve().parent.is_dir():
            raise ConfigError(f"--output: expected a file in an existing directory, got {name!r}")
    variants = caches or {"": {}}
    for found in check_variants(engine_kwargs, variants.values()):
        if found.spec.media != "image":
            raise UnsupportedFeatureError(f"model: expected one of images, got {found.name}")
    scenes = held_out_scenes(limit)
    runs: list[ShapesRun] = []
    firsts: list[_Drawn] = []
    for name, cache in variants.items():
        with OmniDiffusion(**{**engine_kwargs, **cache}) as engine:
            for number, setting in enumerate(settings):
                drawn = _draw(engine, scenes, setting, on_image)
                kind = "cache" if "cache_backend" in cache else "with"
                labels = {kind: name, **setting} if caches else setting
                first = firsts[number] if len(firsts) == len(settings) else None
                runs.append(_as_run(scenes, labels, drawn, first))
                if caches and first is None:
                    firsts.append(drawn)
            environment = {
                **describe_machine(engine, command),
                "grammar": GRAMMAR_VERSION,
            }
        report = ShapesReport(environment, tuple(runs))
        # After every run: a later one may fail.
        write_report(report, outputs)
    return report


def check_variants(
    engine_kwargs: Mapping[str, Any], variants: Iterable[Mapping[str, Any]]
) -> list[FoundModel]:
    """Compares the settings of every run with its model and this host. Raises: as `check_engine`."""
    found = []
    for variant in variants:
        config = OmniDiffusionConfig.from_kwargs(**{**engine_kwargs, **variant})
        import_modules(config.engine.worker_imports)
        found.append(check_engine(config))
    return found


class _Report(Protocol):
    def to_json(self) -> str: ...

    def to_markdown(self) -> str: ...


def write_report(report: _Report, outputs: Sequence[str]) -> None:
    """Writes the files of a report, by their suffixes."""
    for name in outputs:
        text = report.to_json() if Path(name).suffix == ".json" else report.to_markdown()
        Path(name).write_text(text, encoding="utf-8")


class _Drawn(NamedTuple):
    """Verdicts and pictures of one run; 8 bits a value are enough to compare them."""

    verdicts: list[Verdict]
    pictures: list[Any]
    seconds: float
    num_blocks: int
    num_blocks_run: int


def _draw(
    engine: OmniDiffusion,
    scenes: Sequence[Scene],
    setting: Mapping[str, Any],
    on_image: Callable[[], None] | None,
) -> _Drawn:
    # Every replica gets a whole batch.
    batch = engine.config.engine.max_batch_size * engine.config.parallel.data_parallel_size
    verdicts: list[Verdict] = []
    pictures: list[Any] = []
    num_blocks = num_run = 0
    start = time.perf_counter()
    for first in range(0, len(scenes), batch):
        requests = [
            OmniDiffusionRequest(scene.caption, seed=first + i, output_type="np", **setting)
            for i, scene in enumerate(scenes[first : first + batch])
        ]
        for scene, output in zip(scenes[first:], engine.generate_requests(requests)):
            verdicts.append(check(scene, output.images[0]))
            pictures.append((output.images[0] * 255).round().astype("uint8"))
            counts = count_blocks(output.metrics.get("cache", {}))
            num_blocks, num_run = num_blocks + counts[0], num_run + counts[1]
            if on_image is not None:
                on_image()
    return _Drawn(verdicts, pictures, time.perf_counter() - start, num_blocks, num_run)


def _as_run(
    scenes: Sequence[Scene], setting: Mapping[str, Any], drawn: _Drawn, first: _Drawn | None
) -> ShapesRun:
    verdicts = drawn.verdicts
    return ShapesRun(
        setting=dict(setting),
        num_images=len(scenes),
        num_right={name: sum(getattr(v, name) for v in verdicts) for name in ATTRIBUTES},
        seconds=drawn.seconds,
        wrong=tuple(s.caption for s, verdict in zip(scenes, verdicts) if not verdict.all),
        blocks_run=drawn.num_blocks_run / drawn.num_blocks if drawn.num_blocks else None,
        pairs=None if first is None else _pairs(drawn, first),
    )


def _pairs(drawn: _Drawn, first: _Drawn) -> Pairs:
    both = [(a.all, b.all) for a, b in zip(first.verdicts, drawn.verdicts)]
    changes = [
        abs(a.astype("float64") - b).mean() / 255 for a, b in zip(first.pictures, drawn.pictures)
    ]
    return Pairs(
        sum(a and not b for a, b in both),
        sum(b and not a for a, b in both),
        float(sum(changes) / len(changes)),
    )


def describe_machine(engine: OmniDiffusion, command: str) -> dict[str, Any]:
    """What a report says of its circumstances."""
    return {
        "command": command,
        "model": str(engine.config.model.model or "default"),
        "device": engine.engine.device,
        "defaults": engine.engine.defaults,
        "machine": platform.machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        **{package: version(package) for package in _PACKAGES},
    }
