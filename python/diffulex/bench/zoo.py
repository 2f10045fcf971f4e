# SPDX-License-Identifier: Apache-2.0
"""One table and one plot for several models, each under its own decoding strategy.

A zoo is a directory with `zoo.json`:

    {"data": "heldout.jsonl",
     "curves": [{"name": "d2f", "model": "d2f_llada", "engine": {...}, "sampling": {...},
                 "sweep": {"key": "accept_threshold", "values": [0.95, 0.9]}}]}

A curve is one model with engine settings; the sweep makes one run per value of one key. `model` is
`demo` or a directory beside `zoo.json`.
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
    markdown_row,
    percent,
    read_problems,
    run_problems,
    write_reports,
)
from diffulex.config.sampling_params import SamplingParams
from diffulex.config.table import THRESHOLD_KEYS
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Curve", "ZooReport", "read_zoo", "run_zoo"]

ZOO_FILE = "zoo.json"
#: Names of the report files, beside which nothing else is written.
REPORT_STEM = "zoo_results"
_CURVE_KEYS = {"name", "model", "engine", "sampling", "sweep"}
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:gray")
_HEADER = [
    "curve", "strategy", "buffer", "setting", "accuracy", "95 %", "TPF", "NFE", "tokens/s",
    "decode tokens/s",
]  # fmt: skip


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
            "nfe_per_problem": self.nfe,
            **self.run.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class ZooReport:
    """Every run of a zoo."""

    environment: Mapping[str, Any]
    rows: tuple[ZooRow, ...]

    def to_text(self) -> str:
        """An aligned table for a terminal."""
        return aligned([_HEADER, *(row.cells() for row in self.rows)])

    def write_markdown(self, path: Path) -> None:
        """A document with the command, the machine and the table."""
        lines = ["# Results of the zoo", "", "```", str(self.environment["command"]), "```", ""]
        facts = {key: value for key, value in self.environment.items() if key != "command"}
        lines += [f"- {key}: {value}" for key, value in facts.items()]
        lines += ["", markdown_row(_HEADER), markdown_row(["---"] * len(_HEADER))]
        lines += [markdown_row(row.cells()) for row in self.rows]
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")

    def write_json(self, path: Path) -> None:
        """One object with ``environment`` and ``runs``."""
        runs = [row.as_dict() for row in self.rows]
        text = json.dumps({"environment": dict(self.environment), "runs": runs}, indent=1) + "\n"
        path.write_text(text, encoding="utf-8")

    def write_plot(self, path: Path) -> None:
        """Accuracy against TPF, one curve per name, as SVG."""
        import matplotlib as mpl  # noqa: PLC0415 (an optional dependency)
        from cycler import cycler  # noqa: PLC0415 (comes with it)

        mpl.use("svg")
        import matplotlib.pyplot as plt  # noqa: PLC0415

        # Text stays text and ids do not change from run to run.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "diffulex"}):
            figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
            # More curves than colours: the marker changes with every round of colours.
            axes.set_prop_cycle(cycler(marker=["o", "s", "^"]) * cycler(color=_COLOURS))
            for name in dict.fromkeys(row.curve for row in self.rows):
                totals = [row.run.total for row in self.rows if row.curve == name]
                tpf = [total.tpf for total in totals]
                accuracy = [100 * total.accuracy for total in totals]
                axes.plot(tpf, accuracy, markersize=5, label=name)
            axes.set_xlabel("tokens per forward (TPF)")
            axes.set_ylabel("exact answers, %")
            axes.grid(alpha=0.3)
            figure.legend(fontsize="small", loc="outside right upper")
            figure.savefig(path, format="svg", metadata={"Date": None})
            plt.close(figure)


def read_zoo(directory: Path) -> tuple[str, list[Curve]]:
    """The file of problems and the curves of a zoo directory.

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
    curves = [_read_curve(path, directory, item) for item in content["curves"]]
    return str(directory / content["data"]), curves


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
    data, curves = read_zoo(directory)
    problems = read_problems(data)[:limit]
    paths: dict[str, Path] = {}
    if output_dir is not None:
        if not output_dir.is_dir():
            raise ConfigError(f"output_dir: expected an existing directory, got '{output_dir}'")
        _check_matplotlib()
        paths = {end: output_dir / f"{REPORT_STEM}.{end}" for end in ("json", "md", "svg")}
        for end in ("json", "md"):
            checked_output(paths[end])
    environment: dict[str, Any] = {}
    rows: list[ZooRow] = []
    for curve in curves:
        params = dataclasses.replace(sampling_params or SamplingParams(), **curve.sampling)
        for settings in curve.settings():
            kwargs = {"model": curve.model, **(engine_kwargs or {}), **settings}
            with diffulex.Diffulex(**kwargs) as engine:
                if not environment:
                    environment = describe_environment(engine, command, len(problems))
                    del environment["model"]
                run = run_problems(engine, problems, params)
                decoding = engine.config.decoding
            strategy = decoding.decoding_strategy
            if decoding.sampling_mode == "edit" and strategy == "multi_bd":
                strategy = "multi_bd + edit"
            value = getattr(decoding, curve.sweep_key)
            setting = f"{curve.sweep_key.removeprefix('diffusion_gemma_')} {value}"
            rows.append(ZooRow(curve.name, strategy, decoding.buffer_size, setting, run))
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


def _check_matplotlib() -> None:
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415
    except ImportError as error:
        raise ConfigError(
            "eval --zoo: expected matplotlib for the plot, got none: pip install matplotlib"
        ) from error
