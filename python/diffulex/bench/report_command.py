# SPDX-License-Identifier: Apache-2.0
"""``diffulex bench report``: one or several runs as a page or a table, with plots."""

from __future__ import annotations

import argparse
import csv
import html
import importlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diffulex.bench.evaluate import fitted, markdown_table, percent
from diffulex.bench.plots import check_matplotlib, plots_of
from diffulex.bench.runs import Run, read_run
from diffulex.config.flags import Parser
from diffulex.errors import ConfigError

__all__ = [
    "add_report_flags",
    "compare_results",
    "generate_report",
    "publication_rows",
    "run_report",
]

#: Columns of `compare_results`, the setting or number each is read from, and in which section.
_COLUMNS = (
    ("model_path", "engine", "model_path"), ("model_name", "engine", "model_name"),
    ("decoding_strategy", "engine", "decoding_strategy"), ("dataset", "eval", "dataset_name"),
    ("num_samples", "", "total_samples"), ("total_tokens", "", "total_tokens"),
    ("avg_tokens_per_sample", "", "avg_tokens_per_sample"), ("avg_nfe", "", "avg_nfe_per_sample"),
    ("e2e_total_time_s", "", "e2e_total_time_s"), ("ttft_s", "", "ttft_s"),
    ("tpot_s", "", "tpot_s"), ("e2e_throughput_tok_s", "", "e2e_throughput_tok_s"),
    ("prefill_throughput_tok_s", "", "prefill_throughput_tok_s"),
    ("decode_throughput_tok_s", "", "decode_throughput_tok_s"),
)  # fmt: skip
_OLDER_NAMES = {"total_samples": "num_samples", "avg_nfe_per_sample": "avg_nfe"}
#: The table for publication, in this order.
_PUBLICATION: tuple[tuple[str, str], ...] = (
    ("Samples", "total_samples"), ("Visible tokens", "total_tokens"),
    ("Server tokens", "server_tokens"), ("Wall time (s)", "wall_time_s"),
    ("E2E time (s)", "e2e_total_time_s"), ("Agg e2e TPS", "e2e_throughput_tok_s"),
    ("Avg e2e TPS", "avg_e2e_tps"), ("Agg decode TPS", "decode_throughput_tok_s"),
    ("Avg decode TPS", "avg_decode_tps"), ("Client wall e2e TPS", "client_wall_e2e_tps_tok_s"),
    ("Accuracy", "accuracy"), ("TPF", "tpf_aggregate"), ("decode TPF", "decode_tpf_aggregate"),
    ("Concurrency", "concurrency"), ("TP", "tp"),
)  # fmt: skip
_STYLE = (
    "body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:90%;display:block;overflow-x:auto}"
    "td,th{border:1px solid #bbb;padding:.25em .6em;text-align:right}td:first-child{text-align:left}"
    "svg{max-width:100%;height:auto}"
)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _row(run: Run) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column, section, key in _COLUMNS:
        if section:
            row[column] = run.setting(section, key)
        else:
            row[column] = run.stats.get(key, run.stats.get(_OLDER_NAMES.get(key, key)))
    return {**row, "accuracy": run.accuracy, "timestamp": run.stats.get("timestamp")}


def generate_report(results_file: str | Path, output_file: str | Path | None = None) -> str:
    """One run as text: its configuration and its metrics.

    Args:
        results_file: folder of a run, or a file of an older program.
        output_file: where the text is written as well.

    Raises:
        ConfigError: the run cannot be read, or the text not be written.
    """
    row = _row(read_run(Path(results_file)))
    sections = {"Configuration": [], "Metrics": []}  # type: dict[str, list[list[str]]]
    for column, value in row.items():
        names = [name for name, section, _ in _COLUMNS if section]
        sections["Configuration" if column in names else "Metrics"].append([column, _text(value)])
    blocks = [f"{title}\n{fitted(rows)}" for title, rows in sections.items()]
    text = "\n\n".join(blocks) + "\n"
    if output_file is not None:
        _write(Path(output_file), text)
    return text


def compare_results(files: Sequence[str | Path], output_file: str | Path | None = None) -> Any:
    """A row a run: a data frame where pandas is installed, else a list of dictionaries.

    Args:
        files: folders of runs, or files of older programs.
        output_file: where the rows are written as CSV.

    Raises:
        ConfigError: a run cannot be read, or the file not be written.
    """
    rows = [_row(read_run(Path(name))) for name in files]
    if output_file is not None:
        _write(Path(output_file), _csv(rows))
    try:
        pandas: Any = importlib.import_module("pandas")
    except ModuleNotFoundError:
        return rows
    return pandas.DataFrame(rows)


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    target = io.StringIO()
    writer = csv.DictWriter(target, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue()


def publication_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Header and a row a run, in the columns of the published tables."""
    rows = [["Benchmark", "Engine/config", *(label for label, _ in _PUBLICATION)]]
    for run in runs:
        is_server = run.setting("eval", "endpoint") is not None
        facts = {
            **run.stats,
            "accuracy": None if run.accuracy is None else percent(run.accuracy),
            "server_tokens": run.stats.get("total_tokens") if is_server else None,
            "tp": run.stats.get("tp", 1),
        }
        name = run.setting("eval", "dataset_name") or str(run.stats.get("dataset", ""))
        rows.append([str(name), run.name, *(_text(facts.get(key)) for _, key in _PUBLICATION)])
    return rows


def _figures_by_run(runs: Sequence[Run]) -> str:
    """A line a figure that a run has, a column a run: narrow enough for a terminal."""
    columns = zip(*publication_rows(runs), strict=True)
    return fitted([column for column in columns if any(column[1:])])


def _markdown(runs: Sequence[Run], path: Path) -> str:
    """The table, and pictures in files beside `path`."""
    lines = ["# Runs", "", *markdown_table(publication_rows(runs)), ""]
    for place, (title, picture) in enumerate(plots_of(runs)):
        name = f"{path.stem}_{place}.svg"
        _write(path.with_name(name), picture)
        lines += [f"![{title}]({name})", ""]
    return "\n".join(lines)


def _html(runs: Sequence[Run], path: Path) -> str:
    """A page that needs no other file."""
    del path
    header, *rows = publication_rows(runs)
    cells = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows]
    parts = [f"<table>{''.join(cells)}</table>"]
    parts += [f"<h2>{html.escape(title)}</h2>{picture}" for title, picture in plots_of(runs)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Runs</title>'
        f"<style>{_STYLE}</style></head><body><h1>Runs</h1>{''.join(parts)}</body></html>\n"
    )


_WRITERS: dict[str, Callable[[Sequence[Run], Path], str]] = {
    ".html": _html,
    ".md": _markdown,
    ".csv": lambda runs, _: _csv([_row(run) for run in runs]),
    ".txt": lambda runs, _: _figures_by_run(runs) + "\n",
}
_WITH_PLOTS = (".html", ".md")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output: cannot write {path}: {error.strerror}") from error


def add_report_flags(parser: Parser) -> None:
    """The runs and where the report goes."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder or JSON file")
    parser.add_argument(
        "--output", action="append", default=[], type=Path, metavar="FILE",
        help=f"write a report, {', '.join(_WRITERS)}; may be given more than once",
    )  # fmt: skip
    parser.set_defaults(command=run_report)


def run_report(options: argparse.Namespace) -> int:
    """Prints the table of the runs and writes the reports.

    Raises:
        ConfigError: a run cannot be read, or a report not be written.
    """
    for path in options.output:
        if path.suffix not in _WRITERS:
            raise ConfigError(
                f"output: expected a file that ends in {', '.join(_WRITERS)}, got {str(path)!r}"
            )
        if path.suffix in _WITH_PLOTS:
            check_matplotlib("bench report")
    runs = [read_run(path) for path in options.runs]
    print(generate_report(runs[0].path) if len(runs) == 1 else _figures_by_run(runs))
    for path in options.output:
        _write(path, _WRITERS[path.suffix](runs, path))
    return 0
