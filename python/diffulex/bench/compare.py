# SPDX-License-Identifier: Apache-2.0
"""``diffulex bench compare BASE CAND``: what changed between two runs, and whether that may be.

Answers are paired by task, item and repetition. The exact test of McNemar says how likely the items
that changed sides would part so unevenly if both runs were equally good.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffulex.bench.evaluate import TERMINAL_COLUMNS, aligned, percent
from diffulex.bench.runs import Run, main_score, read_run
from diffulex.config.flags import Parser, number, positive_integer
from diffulex.errors import ConfigError

__all__ = ["Comparison", "add_compare_flags", "compare_runs", "mcnemar", "run_compare"]

#: Figures that may not get worse, and the sign of what is better.
PERFORMANCE = {
    "e2e_throughput_tok_s": 1, "decode_throughput_tok_s": 1, "prefill_throughput_tok_s": 1,
    "avg_e2e_tps": 1, "avg_decode_tps": 1, "tpf_aggregate": 1, "decode_tpf_aggregate": 1,
    "ttft_s": -1, "tpot_s": -1,
    # throughput
    "steps_per_s": 1, "tokens_per_s": 1, "ms_per_prefill_step": -1, "ms_per_decode_step": -1,
    # serve
    "request_throughput": 1, "output_throughput": 1, "total_token_throughput": 1, "tpf": 1,
    "mean_ttft_ms": -1, "mean_tpot_ms": -1, "mean_itl_ms": -1, "mean_e2el_ms": -1,
}  # fmt: skip
_GROUPS = ("both right", "regress", "improve", "both wrong")
_SHOWN_IDS = 20
_LONG_CHARS = 3000
#: What has to agree for answers to be comparable.
_HASHES = ("data_sha256", "first_prompt_sha256")


def mcnemar(num_regress: int, num_improve: int) -> float:
    """Two-sided exact p-value of the items that changed sides; 1 if none did."""
    total = num_regress + num_improve
    tail: int = sum(math.comb(total, k) for k in range(min(num_regress, num_improve) + 1))
    return min(1.0, float(2 * tail / 2**total))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        groups: ids of the paired items by what became of them; empty without answers.
        performance: name, value of the base, value of the candidate, and the gain as a share (below
            0 it is worse).
        warnings: why the two are not quite comparable.
    """

    base: Run
    candidate: Run
    groups: Mapping[str, tuple[str, ...]]
    performance: tuple[tuple[str, float, float, float], ...]
    warnings: tuple[str, ...] = ()

    @property
    def num_paired(self) -> int:
        return sum(map(len, self.groups.values()))

    @property
    def p_value(self) -> float:
        return mcnemar(len(self.groups["regress"]), len(self.groups["improve"]))

    @property
    def accuracy_change(self) -> float | None:
        """Points, of the paired items; of the totals of runs whose answers were not kept."""
        if self.num_paired:
            gain = len(self.groups["improve"]) - len(self.groups["regress"])
            return 100 * gain / self.num_paired
        before, after = self.base.accuracy, self.candidate.accuracy
        return None if before is None or after is None else 100 * (after - before)

    def failures(self, max_regression: float | None, max_accuracy_drop: float | None) -> list[str]:
        """What is worse than allowed.

        Args:
            max_regression: as a share; None allows everything.
            max_accuracy_drop: in points; None allows everything.

        Raises:
            ConfigError: the runs have nothing that the limit could be held against.
        """
        failures = []
        if max_regression is not None:
            if not self.performance:
                raise ConfigError("compare: expected figures of speed in both runs, got none")
            failures += [
                f"{name}: {-gain:.1%} worse, at most {max_regression:.1%} is allowed"
                for name, _, _, gain in self.performance
                if gain < -max_regression
            ]
        if max_accuracy_drop is not None:
            change = self.accuracy_change
            if change is None:
                raise ConfigError("compare: expected scores in both runs, got none")
            if change < -max_accuracy_drop:
                failures.append(
                    f"accuracy: {-change:.2f} points lower, at most {max_accuracy_drop:g} are allowed"
                )
        return failures

    def as_dict(self) -> dict[str, Any]:
        return {
            "base": str(self.base.path),
            "candidate": str(self.candidate.path),
            "accuracy": [self.base.accuracy, self.candidate.accuracy],
            "accuracy_change_points": self.accuracy_change,
            "paired": self.num_paired,
            "mcnemar_p": self.p_value if self.num_paired else None,
            "migration": {name: list(ids) for name, ids in self.groups.items()},
            "answers": [_answer_facts(run) for run in (self.base, self.candidate)],
            "performance": {
                name: {"base": before, "candidate": after, "gain": gain}
                for name, before, after, gain in self.performance
            },
            "warnings": list(self.warnings),
        }

    def to_text(self) -> str:
        """Tables for a terminal."""
        blocks = [f"base       {self.base.path}\ncandidate  {self.candidate.path}"]
        blocks += [f"warning: {text}" for text in self.warnings]
        change = self.accuracy_change
        if change is not None:
            blocks.append(self._accuracy_text(change))
        if self.base.samples and self.candidate.samples:
            facts = [_answer_facts(run) for run in (self.base, self.candidate)]
            rows = [["answers", "base", "candidate"]]
            rows += [
                [key, *(f"{fact.get(key, 0):g}" for fact in facts)]
                for key in dict.fromkeys([*facts[0], *facts[1]])
            ]
            blocks.append(aligned(rows))
        rows = [["speed", "base", "candidate", "gain"]]
        rows += [
            [n, f"{b:.4g}", f"{a:.4g}", f"{100 * g:+.1f} %"] for n, b, a, g in self.performance
        ]
        blocks.append(aligned(rows))
        return "\n\n".join(blocks)

    def _accuracy_text(self, change: float) -> str:
        before, after = self.base.accuracy, self.candidate.accuracy
        shown = [percent(value) if value is not None else "?" for value in (before, after)]
        lines = [f"accuracy {shown[0]} -> {shown[1]}, {change:+.2f} points"]
        if self.num_paired:
            lines[0] += f" on {self.num_paired} paired answers, McNemar p = {self.p_value:.3g}"
            for name in _GROUPS:
                ids = self.groups[name]
                more = ", ..." if len(ids) > _SHOWN_IDS else ""
                lines.append(f"  {name:10} {len(ids):5}  {', '.join(ids[:_SHOWN_IDS])}{more}")
        indent = " " * 20  # where the ids begin
        return "\n".join(
            textwrap.fill(line, TERMINAL_COLUMNS, subsequent_indent=indent, break_on_hyphens=False)
            for line in lines
        )

    def examples(self, count: int, chars: int) -> str:
        """The first answers that changed sides, cut to a number of characters."""
        texts = [{_id(s): str(s["text"]) for s in r.samples} for r in (self.base, self.candidate)]
        blocks = []
        for group in ("regress", "improve"):
            for key in self.groups[group][:count]:
                before, after = (text[key][:chars] for text in texts)
                blocks.append(f"--- {group} {key}: base\n{before}\n--- candidate\n{after}")
        return "\n\n".join(blocks)


def _id(sample: Mapping[str, Any]) -> str:
    return str(sample.get("id", ""))


def _answer_facts(run: Run) -> dict[str, float]:
    mean, median, most = run.lengths()
    texts = [str(sample["text"]) for sample in run.samples]
    reasons = Counter(str(s["score_reason"]) for s in run.samples if s.get("score_reason"))
    return {
        "mean characters": mean,
        "median characters": median,
        "most characters": most,
        f"over {_LONG_CHARS} characters": sum(len(text) > _LONG_CHARS for text in texts),
        "syntax errors": sum(sample.get("score_reason") == "syntax" for sample in run.samples),
        "mask leaks": sum(bool(sample.get("mask_leak")) for sample in run.samples),
        "without a fence": sum("```" not in text for text in texts),
        # How programs failed, and why answers have no score.
        **{f"reason {name}": count for name, count in sorted(reasons.items()) if name != "syntax"},
    }


def _paired(base: Run, candidate: Run) -> dict[str, tuple[str, ...]]:
    scored = [
        {_id(s): main_score(s["scores"]) for s in run.samples if s.get("scores") is not None}
        for run in (base, candidate)
    ]
    found: dict[str, list[str]] = {name: [] for name in _GROUPS}
    for key, before in scored[0].items():
        if key in scored[1]:
            was, is_now = before >= 0.5, scored[1][key] >= 0.5
            found[_GROUPS[2 * (not was) + (not is_now)]].append(key)
    return {name: tuple(ids) for name, ids in found.items()}


def _performance(base: Run, candidate: Run) -> tuple[tuple[str, float, float, float], ...]:
    rows = []
    for name, sign in PERFORMANCE.items():
        before, after = base.number(name), candidate.number(name)
        if before is not None and after is not None and before > 0:
            rows.append((name, before, after, sign * (after - before) / before))
    return tuple(rows)


def _conditions(base: Run, candidate: Run) -> list[str]:
    """What decides beside the answers which programs pass."""
    found = []
    before, after = (run.manifest.get("sandbox") for run in (base, candidate))
    if before != after:
        found.append(f"the sandbox of programs differs: {before} and {after}")
    scales = [_time_scales(run) for run in (base, candidate)]
    found += [
        f"{name}: the code_time_scale of the runs differs: {scales[0][name]:g} and {scales[1][name]:g}"
        for name in sorted(scales[0].keys() & scales[1].keys())
        if scales[0][name] != scales[1][name]
    ]
    return found


def _time_scales(run: Run) -> dict[str, float]:
    tasks = run.manifest.get("tasks", {})
    scales = {name: facts.get("code_time_scale") for name, facts in tasks.items()}
    return {name: scale for name, scale in scales.items() if scale is not None}


def _differences(base: Run, candidate: Run) -> list[str]:
    """Tasks whose items or prompts are not the same."""
    tasks = [run.manifest.get("tasks", {}) for run in (base, candidate)]
    found = [
        f"{name}: the {key} of the runs differ"
        for name in tasks[0].keys() & tasks[1].keys()
        for key in _HASHES
        if tasks[0][name].get(key) != tasks[1][name].get(key)
    ]
    if tasks[0].keys() != tasks[1].keys():
        found.append(f"the tasks differ: {', '.join(tasks[0])} and {', '.join(tasks[1])}")
    return sorted(found)


def compare_runs(base: Run, candidate: Run, *, is_forced: bool = False) -> Comparison:
    """Both runs side by side.

    Args:
        base: the one to compare with.
        candidate: the other one.
        is_forced: compare answers to other items or prompts, with a warning.

    Raises:
        ConfigError: the runs were asked different things and `is_forced` is False.
    """
    differences = _differences(base, candidate)
    if differences and not is_forced:
        raise ConfigError(
            f"compare: expected runs of the same questions, got others ({'; '.join(differences)});"
            " --force compares them nevertheless"
        )
    warnings = (*differences, *_conditions(base, candidate))
    groups = _paired(base, candidate)
    return Comparison(base, candidate, groups, _performance(base, candidate), warnings)


def _share(text: str) -> float:
    value = number(text.removesuffix("%"))
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected percent of at least 0, got {text!r}")
    return value / 100


def _points(text: str) -> float:
    return 100 * _share(text)


def add_compare_flags(parser: Parser) -> None:
    """The two runs and what may get worse."""
    parser.add_argument("base", metavar="BASE", type=Path, help="folder or JSON file of a run")
    parser.add_argument("candidate", metavar="CAND", type=Path, help="the run to judge")
    parser.add_argument(
        "--max-regression", type=_share, metavar="P%",
        help="exit 1 if a figure of speed is worse by more than this many percent",
    )  # fmt: skip
    parser.add_argument(
        "--max-accuracy-drop", type=_points, metavar="POINTS",
        help="exit 1 if the accuracy is lower by more than this many points",
    )  # fmt: skip
    parser.add_argument("--examples", type=positive_integer, help="print so many changed answers")
    parser.add_argument(
        "--chars", type=positive_integer, default=900, help="most characters of each [900]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--force", action="store_true", help="compare runs of different questions, with a warning"
    )
    parser.set_defaults(command=run_compare)


def run_compare(options: argparse.Namespace) -> int:
    """Prints what changed; 1 if something got worse than allowed.

    Raises:
        ConfigError: a run cannot be read, or the two cannot be compared.
    """
    result = compare_runs(
        read_run(options.base), read_run(options.candidate), is_forced=options.force
    )
    failures = result.failures(options.max_regression, options.max_accuracy_drop)
    if options.json:
        print(json.dumps({**result.as_dict(), "failures": failures}, indent=1))
    else:
        print(result.to_text())
        if options.examples:
            print("\n" + result.examples(options.examples, options.chars))
        _print_failures(failures)
    return 1 if failures else 0


def _print_failures(failures: Sequence[str]) -> None:
    if failures:
        print("\nworse than allowed:\n" + "\n".join(f"  {text}" for text in failures))
