# SPDX-License-Identifier: Apache-2.0
"""What programs lose: accuracy, answers, size and time of several beside the model they come from."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffulex
from diffulex.bench.evaluate import (
    aligned,
    answer_problems,
    checked_output,
    describe_environment,
    interval_text,
    markdown_document,
    markdown_table,
    percent,
    read_problems,
    write_reports,
)
from diffulex.bench.plots import check_matplotlib, figure_svg
from diffulex.checkpoint.resolve import resolve_model
from diffulex.config.config import Config, read_model_facts
from diffulex.errors import ConfigError
from diffulex_edge.bundle import read_bundle
from diffulex_edge.exporter import ExportConfig, export_model
from diffulex_edge.measure import bench_bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diffulex import SamplingParams
    from diffulex.bench.evaluate import RunReport
    from diffulex.bench.word_problems import Problem
    from diffulex_edge.measure import StepTimes

__all__ = ["EdgeReport", "EdgeRow", "evaluate_programs"]

#: What every program is run with, so that the model is as well.
_HOST: Mapping[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_reqs": 1,
    "enable_prefix_caching": False,
}
_BENCH_ROWS, _BENCH_REPEAT = 8, 20
_HEADER = [
    "program", "quant", "MB", "accuracy", "95 %", "lost", "same answers", "tokens/s", "step ms",
    "RSS MB",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """One program, or the model itself in the engine.

    Attributes:
        quant: its recipe; empty for the model.
        lost: accuracy of the first row less that of this one.
        same_answers: share of the answers whose token ids are those of the first row.
        times: of one call, measured alone; None for the model.
    """

    name: str
    quant: str
    run: RunReport
    lost: float
    same_answers: float
    times: StepTimes | None

    def cells(self) -> list[str]:
        """Texts in the order of the table's header."""
        times = self.times
        return [
            self.name,
            self.quant or "-",
            "-" if times is None else f"{times.file_mb:.2f}",
            percent(self.run.total.accuracy),
            interval_text(self.run.total),
            f"{100 * self.lost:+.1f}",
            percent(self.same_answers),
            f"{self.run.metrics['e2e_throughput_tok_s']:.0f}",
            "-" if times is None else f"{times.step_min_ms:.2f}",
            "-" if times is None else f"{times.rss_mb:.1f}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """All fields in the types of JSON."""
        times = self.times
        return {
            "program": self.name,
            "quant": self.quant,
            "lost": self.lost,
            "same_answers": self.same_answers,
            "file_mb": None if times is None else times.file_mb,
            "step_min_ms": None if times is None else times.step_min_ms,
            "rss_mb": None if times is None else times.rss_mb,
            **self.run.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class EdgeReport:
    """Every row of one command."""

    environment: Mapping[str, Any]
    rows: tuple[EdgeRow, ...]

    def to_text(self) -> str:
        """An aligned table for a terminal."""
        return aligned([_HEADER, *(row.cells() for row in self.rows)])

    def to_json(self) -> str:
        """One object with ``environment`` and ``rows``."""
        rows = [row.as_dict() for row in self.rows]
        return json.dumps({"environment": dict(self.environment), "rows": rows}, indent=1) + "\n"

    def to_markdown(self) -> str:
        """A document with the command, the machine and the table."""
        lines = markdown_table([_HEADER, *(row.cells() for row in self.rows)])
        lines += ["", "Lost points of accuracy and same answers are against the first row."]
        return markdown_document("Programs compared", self.environment, lines)

    def write_plot(self, path: Path) -> None:
        """Accuracy against size of the programs, and that of the first row as a line, as SVG."""
        with figure_svg(path, (7, 4)) as (figure, axes):
            first = self.rows[0]
            axes.axhline(
                100 * first.run.total.accuracy, color="grey", linestyle="--", label=first.name
            )
            for row in self.rows:
                if row.times is not None:
                    low, high = (100 * bound for bound in row.run.total.interval)
                    middle = 100 * row.run.total.accuracy
                    axes.errorbar(
                        row.times.file_mb, middle, yerr=[[middle - low], [high - middle]], fmt="o",
                        capsize=3, label=row.quant if row.name == first.name else row.name,
                    )  # fmt: skip
            axes.set_xlabel("program, MB")
            axes.set_ylabel("exact answers, %")
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
            figure.legend(fontsize="small", loc="outside right upper")

    def write(self, path: Path) -> None:
        """Writes JSON, Markdown or a plot, by the suffix of `path`."""
        if path.suffix == ".svg":
            self.write_plot(path)
            return
        text = self.to_json() if path.suffix == ".json" else self.to_markdown()
        path.write_text(text, encoding="utf-8")


def evaluate_programs(
    bundles: Sequence[str],
    *,
    sampling_params: SamplingParams,
    model: str | None = None,
    recipes: Sequence[str] = (),
    engine_kwargs: Mapping[str, Any] | None = None,
    data: str | None = None,
    limit: int | None = None,
    outputs: Sequence[str] = (),
    show: Callable[[EdgeReport], None] | None = None,
    command: str = "",
) -> EdgeReport:
    """Asks the same problems of a model, of its exports under several recipes, and of bundles.

    Args:
        bundles: directories of programs.
        sampling_params: of every request.
        model: evaluated in the engine as the first row, in float32 on the CPU.
        recipes: exports of `model` to XNNPACK, made for this and removed afterwards.
        engine_kwargs: settings of every engine, for example the buffer.
        data: problems as JSON lines; None takes the held-out set of the bundled model.
        limit: only the first problems.
        outputs: report files, ``.json``, ``.md`` or ``.svg``.
        show: receives the report before the files are written.
        command: how to repeat it.

    Raises:
        ConfigError: nothing to evaluate, or unusable recipes, bundles, data or report files; nothing
            has been run then.
    """
    if recipes and model is None:
        raise ConfigError("quant: expected a model to export, got none")
    if model is None and not bundles:
        raise ConfigError("edge eval: expected a model or bundles, got none")
    problems = read_problems(data)[:limit]
    paths = [checked_output(Path(name), (".svg",)) for name in outputs]
    if any(path.suffix == ".svg" for path in paths):
        check_matplotlib("output")
    if model is not None:
        settings = {**(engine_kwargs or {}), **_HOST}
        Config.resolve(model, read_model_facts(model, settings), settings)
    programs = [(name, resolve_model(name)) for name in bundles]
    for _, directory in programs:
        read_bundle(directory)
    plan = _Plan(problems, sampling_params, {**(engine_kwargs or {})}, command)
    with tempfile.TemporaryDirectory(prefix="diffulex-edge-") as scratch:
        exports = [
            ExportConfig(str(model), Path(scratch) / f"program{number}", quant=recipe)
            for number, recipe in enumerate(recipes)
        ]
        # First what may be refused.
        for export in exports:
            export_model(export, show_progress=True)
        if model is not None:
            plan.add(model, model, {**_HOST})
        for export in exports:
            plan.add(f"{model} {export.quant}", str(export.output), {})
        for name, directory in programs:
            plan.add(name, str(directory), {})
    report = EdgeReport(plan.environment, tuple(plan.rows))
    if show is not None:
        show(report)
    write_reports(dict.fromkeys(paths, report.write))
    return report


class _Plan:
    """Rows so far; the first one is what the others are compared with."""

    def __init__(
        self,
        problems: Sequence[Problem],
        sampling_params: SamplingParams,
        kwargs: Mapping[str, Any],
        command: str,
    ) -> None:
        self._problems, self._params, self._kwargs = problems, sampling_params, kwargs
        self._command = command
        self._first: list[tuple[int, ...]] = []
        self.rows: list[EdgeRow] = []
        self.environment: dict[str, Any] = {}

    def add(self, name: str, model: str, settings: Mapping[str, Any]) -> None:
        """Decodes every problem with a model or a bundle and appends the row."""
        with diffulex.Diffulex(model, **{**self._kwargs, **settings}) as engine:
            if not self.environment:
                self.environment = describe_environment(engine, self._command, len(self._problems))
                del self.environment["model"]
            run, outputs = answer_problems(engine, self._problems, self._params)
            threads = self.environment["threads"]
        answers = [tuple(output.token_ids) for output in outputs]
        if not self.rows:
            self._first = answers
        same = sum(mine == first for mine, first in zip(answers, self._first, strict=True))
        first_run = self.rows[0].run if self.rows else run
        times, quant = None, ""
        if not settings:
            bundle = read_bundle(Path(model))
            quant = str(bundle.facts.get("quant", "none"))
            times = bench_bundle(Path(model), threads, rows=_BENCH_ROWS, repeat=_BENCH_REPEAT)
        self.rows.append(
            EdgeRow(
                name=name,
                quant=quant,
                run=run,
                lost=first_run.total.accuracy - run.total.accuracy,
                same_answers=same / len(answers),
                times=times,
            )
        )
