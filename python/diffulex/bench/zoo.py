# SPDX-License-Identifier: Apache-2.0
"""One table and one plot for several models, each under its own decoding strategy.

A zoo is a directory with `zoo.json`:

    {"data": "heldout.jsonl", "validation": "validation.jsonl",
     "curves": [{"name": "d2f", "model": "d2f_llada", "engine": {...}, "sampling": {...},
                 "sweep": {"key": "accept_threshold", "values": [0.95, 0.9]}}]}

A curve is one model with engine settings; the sweep makes one run per value of one key. `model` is
`demo` or a directory beside `zoo.json`. With a validation set the sweep runs on that: of the settings
within half a point of the best one, the one with the most tokens per forward is chosen, and that one
alone is run on the held-out problems.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffulex
from diffulex.bench.evaluate import (
    RunReport,
    aligned,
    checked_output,
    describe_environment,
    interval_text,
    markdown_document,
    markdown_table,
    percent,
    read_problems,
    run_problems,
    write_reports,
)
from diffulex.bench.plots import check_matplotlib, figure_svg
from diffulex.config.sampling_params import SamplingParams
from diffulex.config.table import THRESHOLD_KEYS
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diffulex.bench.word_problems import Problem

__all__ = ["Curve", "Zoo", "ZooReport", "chosen", "read_zoo", "run_zoo"]

ZOO_FILE = "zoo.json"
#: Names of the report files, beside which nothing else is written.
REPORT_STEM = "zoo_results"
HELDOUT, VALIDATION = "held-out", "validation"
#: What a chosen setting may lose against the best one on the validation problems.
MAX_LOSS = 0.005
_CURVE_KEYS = {"name", "model", "engine", "sampling", "sweep"}
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:gray")
_HEADER = [
    "curve", "strategy", "buffer", "setting", "accuracy", "95 %", "TPF", "NFE", "tokens/s",
    "decode tokens/s",
]  # fmt: skip
#: What a terminal shows of them in one row; the first three stand above the rows that share them.
_SHORT_HEADER = ["setting", "accuracy", "95 %", "TPF", "NFE", "tok/s", "decode"]


@dataclass(frozen=True, slots=True)
class Curve:
    """One model and the runs made with it."""

    name: str
    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    sweep_key: str = "accept_threshold"
    sweep_values: tuple[float, ...] = ()

    def settings(self) -> list[dict[str, Any]]:
        """Engine settings of each run."""
        if not self.sweep_values:
            return [dict(self.engine)]
        return [self._with(value) for value in self.sweep_values]

    def _with(self, value: float) -> dict[str, Any]:
        if self.sweep_key not in THRESHOLD_KEYS:
            return {**self.engine, self.sweep_key: value}
        thresholds = {**self.engine.get("decoding_thresholds", {}), self.sweep_key: value}
        return {**self.engine, "decoding_thresholds": thresholds}


@dataclass(frozen=True, slots=True)
class ZooRow:
    """One run of one curve."""

    curve: str
    strategy: str
    buffer_size: int
    setting: str
    run: RunReport
    split: str = HELDOUT
    #: The operating point of its curve.
    is_chosen: bool = False

    @property
    def nfe(self) -> float:
        """Forwards per problem."""
        return self.run.total.nfe / self.run.total.num_problems

    def cells(self) -> list[str]:
        """Texts in the order of the table's header."""
        metrics = self.run.metrics
        return [
            self.curve,
            self.strategy,
            str(self.buffer_size),
            self.setting,
            percent(self.run.total.accuracy),
            interval_text(self.run.total),
            f"{self.run.total.tpf:.2f}",
            f"{self.nfe:.2f}",
            f"{metrics['e2e_throughput_tok_s']:.0f}",
            f"{metrics['decode_throughput_tok_s']:.0f}",
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "curve": self.curve,
            "strategy": self.strategy,
            "buffer_size": self.buffer_size,
            "swept": self.setting,
            "split": self.split,
            "chosen": self.is_chosen,
            "nfe_per_problem": self.nfe,
            **self.run.as_dict(),
        }


def _narrow(rows: Sequence[Sequence[str]]) -> str:
    """A table for terminals of 80 columns; `decode` is decode tokens per second."""
    head, *lines = aligned([_SHORT_HEADER, *(row[3:] for row in rows[1:])]).splitlines()
    shown = [head]
    common: tuple[str, ...] = ()
    for (curve, strategy, buffer_size, *_), line in zip(rows[1:], lines, strict=True):
        if (curve, strategy, buffer_size) != common:
            common = curve, strategy, buffer_size
            shown.append(f"{curve} ({strategy}, buffer {buffer_size})")
        shown.append(line)
    return "\n".join(shown)


@dataclass(frozen=True, slots=True)
class ZooReport:
    """Every run of a zoo."""

    environment: Mapping[str, Any]
    rows: tuple[ZooRow, ...]

    def _tables(self) -> list[tuple[str, list[list[str]]]]:
        """Title and rows, one table a split; the first are the results."""
        tables = []
        for split, title in (
            (HELDOUT, "Held-out problems"),
            (VALIDATION, "Validation problems, on which the settings were chosen"),
        ):
            rows = [row for row in self.rows if row.split == split]
            if rows:
                tables.append((title, [_HEADER, *(self._cells(row) for row in rows)]))
        return tables

    @staticmethod
    def _cells(row: ZooRow) -> list[str]:
        cells = row.cells()
        if row.is_chosen and row.split == VALIDATION:
            cells[_HEADER.index("setting")] += " *"
        return cells

    def to_text(self) -> str:
        """Aligned tables for a terminal."""
        tables = self._tables()
        if len(tables) == 1:
            return _narrow(tables[0][1])
        return "\n\n".join(f"{title}\n{_narrow(rows)}" for title, rows in tables)

    def write_markdown(self, path: Path) -> None:
        """A document with the command, the machine and the tables."""
        tables = self._tables()
        lines = []
        for title, rows in tables:
            head = [f"## {title}", ""] if len(tables) > 1 else []
            lines += [*head, *markdown_table(rows), ""]
        if len(tables) > 1:
            lines.append(
                f"\\* chosen: the most tokens per forward within {100 * MAX_LOSS:g} points of the"
                " most accurate setting of its curve."
            )
        text = markdown_document("Results of the zoo", self.environment, lines)
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")

    def write_json(self, path: Path) -> None:
        """One object with ``environment`` and ``runs``."""
        runs = [row.as_dict() for row in self.rows]
        text = json.dumps({"environment": dict(self.environment), "runs": runs}, indent=1) + "\n"
        path.write_text(text, encoding="utf-8")

    def write_plot(self, path: Path) -> None:
        """Accuracy against TPF, one curve per name, as SVG.

        With a validation set the curve is that of the sweep, and a star is the chosen setting on the
        held-out problems.
        """
        from cycler import cycler  # noqa: PLC0415 (comes with matplotlib)

        with figure_svg(path, (10, 5)) as (figure, axes):
            # More curves than colours: the marker changes with every round of colours.
            axes.set_prop_cycle(cycler(marker=["o", "s", "^"]) * cycler(color=_COLOURS))
            is_split = any(row.split == VALIDATION for row in self.rows)
            for name in dict.fromkeys(row.curve for row in self.rows):
                rows = [row for row in self.rows if row.curve == name]
                swept = [row for row in rows if row.split == VALIDATION] or rows
                line = axes.plot(*_points(swept), markersize=5, label=name)[0]
                points = [row for row in rows if is_split and row.split == HELDOUT]
                axes.plot(
                    *_points(points), linestyle="none", marker="*", markersize=13,
                    color=line.get_color(), markeredgecolor="black", markeredgewidth=0.6,
                )  # fmt: skip
            if is_split:
                axes.plot([], [], "k*", markersize=10, label="chosen setting, held-out problems")
            axes.set_xlabel("tokens per forward (TPF)")
            axes.set_ylabel("exact answers, %")
            axes.grid(alpha=0.3)
            figure.legend(fontsize="small", loc="outside right upper")


def _points(rows: Sequence[ZooRow]) -> tuple[list[float], list[float]]:
    """Tokens per forward, and exact answers in percent."""
    totals = [row.run.total for row in rows]
    return [total.tpf for total in totals], [100 * total.accuracy for total in totals]


@dataclass(frozen=True, slots=True)
class Zoo:
    """Files of problems and the curves of a directory; without `validation` all settings are run on
    `data`."""

    data: str
    validation: str | None
    curves: tuple[Curve, ...]


def read_zoo(directory: Path) -> Zoo:
    """The contents of a zoo directory.

    Raises:
        ConfigError: `zoo.json` is missing, is not JSON or has unknown or missing keys.
    """
    path = directory / ZOO_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"zoo: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"zoo: expected JSON in {path}, got {error}") from error
    if not isinstance(content, dict) or not {"data", "curves"} <= content.keys():
        raise ConfigError(f"zoo: expected an object with data and curves in {path}")
    validation = content.get("validation")
    return Zoo(
        data=str(directory / content["data"]),
        validation=None if validation is None else str(directory / validation),
        curves=tuple(_read_curve(path, directory, item) for item in content["curves"]),
    )


def _read_curve(path: Path, directory: Path, item: Any) -> Curve:
    if not isinstance(item, dict) or not {"name", "model"} <= item.keys() <= _CURVE_KEYS:
        keys = sorted(item) if isinstance(item, dict) else item
        raise ConfigError(
            f"zoo: {path}: expected curves with name, model and at most engine, sampling and sweep,"
            f" got {keys}"
        )
    model = item["model"]
    sweep = item.get("sweep") or {}
    return Curve(
        name=item["name"],
        model=model if model == "demo" else str(directory / model),
        engine=item.get("engine", {}),
        sampling=item.get("sampling", {}),
        sweep_key=sweep.get("key", "accept_threshold"),
        sweep_values=tuple(sweep.get("values", ())),
    )


def run_zoo(
    directory: Path,
    *,
    output_dir: Path | None = None,
    engine_kwargs: Mapping[str, Any] | None = None,
    sampling_params: SamplingParams | None = None,
    limit: int | None = None,
    show: Callable[[ZooReport], None] | None = None,
    command: str = "",
) -> ZooReport:
    """Runs every curve over the same problems.

    Args:
        directory: a zoo, see the module.
        output_dir: where `zoo_results.{json,md,svg}` go; None writes nothing.
        engine_kwargs: settings of every engine, for example the device.
        sampling_params: of every request, before the fields that a curve sets.
        limit: only the first problems.
        show: receives the report before the files are written.
        command: how to repeat it.

    Raises:
        ConfigError: an unusable zoo or output; nothing has been run then.
    """
    zoo = read_zoo(directory)
    problems = {HELDOUT: read_problems(zoo.data)[:limit]}
    if zoo.validation is not None:
        problems[VALIDATION] = read_problems(zoo.validation)[:limit]
    paths: dict[str, Path] = {}
    if output_dir is not None:
        if not output_dir.is_dir():
            raise ConfigError(f"output_dir: expected an existing directory, got '{output_dir}'")
        check_matplotlib("eval --zoo")
        paths = {end: output_dir / f"{REPORT_STEM}.{end}" for end in ("json", "md", "svg")}
        for end in ("json", "md"):
            checked_output(paths[end])
    environment: dict[str, Any] = {}

    def run(curve: Curve, settings: Mapping[str, Any], split: str) -> ZooRow:
        params = dataclasses.replace(sampling_params or SamplingParams(), **curve.sampling)
        kwargs = {"model": curve.model, **(engine_kwargs or {}), **settings}
        with diffulex.Diffulex(**kwargs) as engine:
            if not environment:
                environment.update(describe_environment(engine, command, len(problems[HELDOUT])))
                del environment["model"]
            return _run_row(engine, curve, problems[split], params, split)

    rows: list[ZooRow] = []
    for curve in zoo.curves:
        settings = curve.settings()
        split = VALIDATION if VALIDATION in problems and len(settings) > 1 else HELDOUT
        swept = [run(curve, item, split) for item in settings]
        if split == VALIDATION:
            place = chosen(swept)
            swept[place] = dataclasses.replace(swept[place], is_chosen=True)
            point = run(curve, settings[place], HELDOUT)
            rows.append(dataclasses.replace(point, is_chosen=True))
        rows += swept
    report = ZooReport(environment, tuple(rows))
    if show is not None:
        show(report)
    if paths:
        write_reports(
            {
                paths["json"]: report.write_json,
                paths["md"]: report.write_markdown,
                paths["svg"]: report.write_plot,
            }
        )
    return report


def chosen(rows: Sequence[ZooRow]) -> int:
    """The place of the fastest setting, by tokens per forward, that loses at most `MAX_LOSS`."""
    best = max(row.run.total.accuracy for row in rows)
    good = [i for i, row in enumerate(rows) if row.run.total.accuracy >= best - MAX_LOSS - 1e-9]
    return max(good, key=lambda i: rows[i].run.total.tpf)


def _run_row(
    engine: diffulex.Diffulex,
    curve: Curve,
    problems: Sequence[Problem],
    params: SamplingParams,
    split: str,
) -> ZooRow:
    run = run_problems(engine, problems, params)
    decoding = engine.config.decoding
    strategy = decoding.decoding_strategy
    if decoding.sampling_mode == "edit" and not decoding.traits.rewrites_tokens:
        strategy = f"{strategy} + edit"
    value = getattr(decoding, curve.sweep_key)
    setting = f"{curve.sweep_key.removeprefix('diffusion_gemma_')} {value}"
    return ZooRow(curve.name, strategy, decoding.buffer_size, setting, run, split)
