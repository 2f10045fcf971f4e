# SPDX-License-Identifier: Apache-2.0
"""Accuracy and speed of a model on word problems with integer answers.

An answer counts when its last ``#### <integer>`` line holds the right integer. Speed metrics follow
the definitions of the engine's results: steps are engine steps, a forward is counted per request.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import diffulex
from diffulex.bench.problem_file import load_problems
from diffulex.bench.word_problems import Problem, is_correct
from diffulex.checkpoint.resolve import demo_dir
from diffulex.config.table import check_value
from diffulex.errors import ConfigError
from diffulex.interruption import import_at_once
from diffulex.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diffulex import Diffulex, GenerationOutputs, SamplingParams

logger = get_logger(__name__)

HELDOUT_FILE = "heldout.jsonl"
_Z95 = 1.959963984540054


class Setting(NamedTuple):
    """One run of an evaluation; None leaves the engine's default."""

    buffer_size: int | None = None
    accept_threshold: float | None = None


class Interval(NamedTuple):
    """Bounds of a proportion."""

    low: float
    high: float


def wilson_interval(num_correct: int, num_total: int, z: float = _Z95) -> Interval:
    """Wilson score interval of a proportion (95 % by default).

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if num_total < 1 or not 0 <= num_correct <= num_total:
        raise ValueError(f"wilson_interval: expected 0 <= n <= N, got {num_correct} of {num_total}")
    share = num_correct / num_total
    scale = 1 + z * z / num_total
    center = (share + z * z / (2 * num_total)) / scale
    spread = share * (1 - share) / num_total + z * z / (4 * num_total * num_total)
    half = z * math.sqrt(spread) / scale
    return Interval(max(0.0, center - half), min(1.0, center + half))


@dataclass(frozen=True, slots=True)
class Score:
    """Correct answers of one group of problems."""

    group: str
    num_problems: int
    num_correct: int
    completion_tokens: int
    nfe: int

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_problems

    @property
    def interval(self) -> Interval:
        return wilson_interval(self.num_correct, self.num_problems)

    @property
    def tpf(self) -> float:
        """Completion tokens per forward of a request, prefill included."""
        return self.completion_tokens / self.nfe if self.nfe else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "accuracy": self.accuracy,
            "wilson_95": list(self.interval),
            "tpf": self.tpf,
        }


@dataclass(frozen=True, slots=True)
class RunReport:
    """Results of one setting."""

    setting: Mapping[str, Any]
    total: Score
    levels: tuple[Score, ...]
    metrics: Mapping[str, Any]
    wrong_ids: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "setting": dict(self.setting),
            "total": self.total.as_dict(),
            "levels": [score.as_dict() for score in self.levels],
            "metrics": dict(self.metrics),
            "wrong_ids": list(self.wrong_ids),
        }


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Every setting of one command."""

    environment: Mapping[str, Any]
    runs: tuple[RunReport, ...]

    def to_json(self) -> str:
        """One object with ``environment`` and ``runs``."""
        runs = [run.as_dict() for run in self.runs]
        return json.dumps({"environment": dict(self.environment), "runs": runs}, indent=2) + "\n"

    def to_markdown(self) -> str:
        """A document with the command, the machine and one table per setting."""
        lines = markdown_table([_SUMMARY_HEADER, *map(_summary_cells, self.runs)])
        for run in self.runs:
            lines += ["", f"## {_setting_text(run)}", ""]
            lines += markdown_table([_LEVEL_HEADER, *map(_level_cells, (*run.levels, run.total))])
        return markdown_document("Evaluation report", self.environment, lines)

    def to_text(self) -> str:
        """Aligned tables for a terminal of 80 columns; files have every number of the summary."""
        cells = [_summary_cells(run) for run in self.runs]
        blocks = [aligned([list(_SHORT_SUMMARY), *map(_short, cells)])]
        for run in self.runs:
            rows = [_LEVEL_HEADER, *(_level_cells(s) for s in (*run.levels, run.total))]
            blocks.append(f"{_setting_text(run)}\n{aligned(rows)}")
        return "\n\n".join(blocks)

    def write(self, path: Path) -> None:
        """Writes JSON or Markdown, by the suffix of `path`."""
        text = self.to_json() if path.suffix == ".json" else self.to_markdown()
        path.write_text(text, encoding="utf-8")


_SUMMARY_HEADER = [
    "buffer", "accept", "accuracy", "95 %", "tokens", "sum NFE", "TPF", "decode TPF",
    "tokens/s", "decode tokens/s", "engine s",
]  # fmt: skip
#: What a terminal shows of them, by a shorter name; `decode` is decode tokens per second.
_SHORT_SUMMARY = {
    "buffer": "buffer", "accept": "accept", "accuracy": "accuracy", "95 %": "95 %", "TPF": "TPF",
    "NFE": "sum NFE", "tok/s": "tokens/s", "decode": "decode tokens/s", "seconds": "engine s",
}  # fmt: skip
_LEVEL_HEADER = ["level", "problems", "correct", "accuracy", "95 %", "TPF"]


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def interval_text(score: Score) -> str:
    return f"{100 * score.interval.low:.1f}-{100 * score.interval.high:.1f}"


def _summary_cells(run: RunReport) -> list[str]:
    metrics = run.metrics
    return [
        str(run.setting["buffer_size"]),
        str(run.setting["accept_threshold"]),
        percent(run.total.accuracy),
        interval_text(run.total),
        str(metrics["total_tokens"]),
        str(metrics["request_nfe"]),
        f"{metrics['tpf_aggregate']:.3f}",
        f"{metrics['decode_tpf_aggregate']:.3f}",
        f"{metrics['e2e_throughput_tok_s']:.1f}",
        f"{metrics['decode_throughput_tok_s']:.1f}",
        f"{metrics['engine_time_s']:.2f}",
    ]


def _short(cells: Sequence[str]) -> list[str]:
    """Of the cells of a summary, those that a terminal shows."""
    return [cells[_SUMMARY_HEADER.index(name)] for name in _SHORT_SUMMARY.values()]


def _level_cells(score: Score) -> list[str]:
    return [
        score.group,
        str(score.num_problems),
        str(score.num_correct),
        percent(score.accuracy),
        interval_text(score),
        f"{score.tpf:.3f}",
    ]


def _setting_text(run: RunReport) -> str:
    setting = run.setting
    return f"buffer {setting['buffer_size']}, accept threshold {setting['accept_threshold']}"


def markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first row is its header."""
    header, *body = rows
    return [*map(markdown_row, (header, ["---"] * len(header), *body))]


def markdown_document(title: str, environment: Mapping[str, Any], lines: Sequence[str]) -> str:
    """A document with the command, the machine and then `lines`.

    Args:
        title: of the document.
        environment: of `describe_environment`.
        lines: what comes after it.
    """
    facts = [f"- {key}: {value}" for key, value in environment.items() if key != "command"]
    head = [f"# {title}", "", "```", str(environment["command"]), "```", "", *facts, ""]
    return "\n".join([*head, *lines, ""])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


#: Columns of the terminals that tables are written for, and the least that a broken text gets.
TERMINAL_COLUMNS = 80
_LEAST_COLUMNS = 18


def fitted(rows: Sequence[Sequence[str]]) -> str:
    """`aligned` in 80 columns, for names of any length and any number of columns.

    Args:
        rows: cells; the first of a row is its label.

    Returns:
        The table. Long cells go on in the next line, columns that have no place beside the others
        in a further table, which begins with the labels again.
    """
    labels = [row[0] for row in rows]
    left = TERMINAL_COLUMNS - max(map(len, labels))
    limit = max(_LEAST_COLUMNS, left // max(1, len(rows[0]) - 1) - 2)
    tables: list[list[list[list[str]]]] = []
    room = 0
    for column in zip(*(row[1:] for row in rows), strict=True):
        cells = [_broken(cell, limit) for cell in column]
        width = 2 + max(len(piece) for pieces in cells for piece in pieces)
        if room < width:
            tables.append([])
            room = left
        tables[-1].append(cells)
        room -= width
    return "\n\n".join(aligned(_lines_of(labels, columns)) for columns in tables)


def _lines_of(labels: Sequence[str], columns: Sequence[Sequence[list[str]]]) -> list[list[str]]:
    """Rows of a table whose cells are lists of lines."""
    rows = []
    for label, *cells in zip(labels, *columns, strict=True):
        for place, pieces in enumerate(zip_longest(*cells, fillvalue="")):
            rows.append([label if place == 0 else "", *pieces])
    return rows


def _broken(text: str, limit: int) -> list[str]:
    """`text` in pieces of at most `limit` characters, which end at a separator where one is near."""
    pieces = []
    while len(text) > limit:
        end = max(text.rfind(mark, limit // 2, limit) for mark in "/_-,. ") + 1 or limit
        pieces.append(text[:end].rstrip())
        text = text[end:]
    return [*pieces, text]


def grade(
    setting: Mapping[str, Any], problems: Sequence[Problem], outputs: GenerationOutputs
) -> RunReport:
    """Scores the outputs of `problems`, in the same order."""
    is_right = [
        is_correct(problem, output.text) for problem, output in zip(problems, outputs, strict=True)
    ]
    indices = range(len(problems))

    def score(group: str, members: Sequence[int]) -> Score:
        return Score(
            group=group,
            num_problems=len(members),
            num_correct=sum(is_right[i] for i in members),
            completion_tokens=sum(outputs[i].metrics.completion_tokens for i in members),
            nfe=sum(outputs[i].metrics.nfe for i in members),
        )

    by_level = {
        level: [i for i in indices if problems[i].level == level]
        for level in sorted({problem.level for problem in problems})
    }
    return RunReport(
        setting=setting,
        total=score("all", indices),
        levels=tuple(score(str(level), members) for level, members in by_level.items()),
        metrics=_run_metrics(outputs),
        wrong_ids=tuple(i for i in indices if not is_right[i]),
    )


def _run_metrics(outputs: GenerationOutputs) -> dict[str, Any]:
    """The numbers of the engine's results, plus what tells two runs apart.

    Its `total_nfe` is left out: `engine_steps` counts forwards of the engine, `request_nfe` sums
    the forwards every request took part in.
    """
    numbers = {key: value for key, value in outputs.as_dict().items() if key != "total_nfe"}
    return {
        **numbers,
        "engine_steps": outputs.stats.num_steps,
        "engine_time_s": outputs.stats.total_s,
    }


def run_evaluation(
    engine_kwargs: Mapping[str, Any],
    *,
    settings: Sequence[Setting],
    sampling_params: SamplingParams,
    data: str | None = None,
    limit: int | None = None,
    outputs: Sequence[str] = (),
    show: Callable[[EvaluationReport], None] | None = None,
    command: str = "",
) -> EvaluationReport:
    """Runs every setting over the same problems and writes the reports.

    Args:
        engine_kwargs: keyword arguments of `Diffulex`, without those of `settings`.
        settings: runs, in order.
        sampling_params: of every request.
        data: problems as JSON lines; None takes the held-out set of the bundled model.
        limit: only the first problems.
        outputs: report files, ``.json`` or ``.md``.
        show: receives the report before the files are written.
        command: how to repeat the evaluation.

    Raises:
        ConfigError: unusable settings, data or report files; nothing has been run then. Or a
            report could not be written after all.
    """
    for setting in settings:
        for name, value in setting._asdict().items():
            if value is not None:
                check_value(name, value)
    problems = read_problems(data)[:limit]
    paths = [checked_output(Path(name)) for name in outputs]
    environment: dict[str, Any] = {}
    runs = []
    import_at_once("diffulex.engine.engine")
    for setting in settings:
        with diffulex.Diffulex(**_with_setting(engine_kwargs, setting)) as engine:
            environment = environment or describe_environment(engine, command, len(problems))
            runs.append(run_problems(engine, problems, sampling_params))
    report = EvaluationReport(environment, tuple(runs))
    if show is not None:
        show(report)
    write_reports(dict.fromkeys(paths, report.write))
    return report


def run_problems(
    engine: Diffulex, problems: Sequence[Problem], sampling_params: SamplingParams
) -> RunReport:
    """Decodes and grades every problem with the settings of `engine`.

    An engine with a `profiler_config` records the steps.
    """
    return answer_problems(engine, problems, sampling_params)[0]


def answer_problems(
    engine: Diffulex, problems: Sequence[Problem], sampling_params: SamplingParams
) -> tuple[RunReport, GenerationOutputs]:
    """`run_problems`, with the answers in the order of the problems."""
    decoding = engine.config.decoding
    shown = {
        "buffer_size": decoding.buffer_size,
        "accept_threshold": decoding.accept_threshold,
        "block_size": decoding.block_size,
    }
    logger.info("evaluating %d problems: %s", len(problems), shown)
    prompts = [_encode(engine, problem) for problem in problems]
    if engine.config.kernel.profiler_config is not None:
        engine.start_profile("eval")
    result = engine.generate(prompts, sampling_params, use_tqdm=True, summary=False)
    if engine.is_profiling:
        engine.stop_profile()
    return grade(shown, problems, result), result


def write_reports(writers: Mapping[Path, Callable[[Path], None]]) -> None:
    """Writes every file, and then raises a ConfigError if one of them failed."""
    failures = [failure for path, write in writers.items() if (failure := _write(path, write))]
    if failures:
        raise ConfigError(failures[0])


def _write(path: Path, write: Callable[[Path], None]) -> str | None:
    """Writes one file; the reason if that fails."""
    try:
        write(path)
    except OSError as error:
        return f"output: cannot write {path}: {error.strerror}"
    return None


def _with_setting(engine_kwargs: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    kwargs = dict(engine_kwargs)
    if setting.buffer_size is not None:
        kwargs["buffer_size"] = setting.buffer_size
    if setting.accept_threshold is not None:
        thresholds = dict(kwargs.get("decoding_thresholds") or {})
        thresholds["accept_threshold"] = setting.accept_threshold
        kwargs["decoding_thresholds"] = thresholds
    return kwargs


def _encode(engine: Diffulex, problem: Problem) -> list[int]:
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError("evaluate: expected an engine with a tokenizer, got none")
    if not tokenizer.has_chat_template:
        return tokenizer.encode(problem.question)
    return tokenizer.apply_chat_template([{"role": "user", "content": problem.question}])


def read_problems(data: str | Path | None) -> list[Problem]:
    """Problems of a JSON lines file; None takes the held-out set of the bundled model.

    Raises:
        ConfigError: the file cannot be read or holds no problems.
    """
    path = demo_dir() / HELDOUT_FILE if data is None else Path(data)
    try:
        problems = load_problems(path)
    except OSError as error:
        raise ConfigError(f"data: cannot read {path}: {error.strerror}") from error
    if not problems:
        raise ConfigError(f"data: expected problems in {path}, got an empty file")
    return problems


def checked_output(path: Path, further: tuple[str, ...] = ()) -> Path:
    """A report file that can be written; ConfigError before the run rather than after it.

    Args:
        further: suffixes beside ``.json`` and ``.md``.
    """
    *first, last = (".json", ".md", *further)
    if path.suffix not in (*first, last):
        names = f"{', '.join(first)} or {last}"
        raise ConfigError(f"output: expected a {names} file, got {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"output: expected an existing directory, got {str(path.parent)!r}")
    if path.is_dir():
        raise ConfigError(f"output: expected a file, got the directory {str(path)!r}")
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"output: cannot write {path}: {error.strerror}") from error
    return path


def describe_environment(engine: Diffulex, command: str, num_problems: int) -> dict[str, Any]:
    """What was run, where and when."""
    import torch  # noqa: PLC0415 (the command line imports this module for every command)

    model = engine.config.model
    is_cuda = model.device.startswith("cuda")
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "model": model.model,
        "problems": num_problems,
        "device": torch.cuda.get_device_name(model.device) if is_cuda else platform.machine(),
        "dtype": model.dtype,
        "threads": torch.get_num_threads(),
        "diffulex": diffulex.__version__,
        "torch": torch.__version__,
    }
