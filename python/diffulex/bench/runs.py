# SPDX-License-Identifier: Apache-2.0
"""Finished runs, read back: folders of `eval`, and files of `throughput`, `serve` and older programs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffulex.bench.run_directory import MANIFEST, read_jsonl
from diffulex.errors import ConfigError

__all__ = ["Run", "main_score", "read_run"]

STATS = "diffulex_stats.json"


def main_score(scores: Mapping[str, float] | None) -> float:
    """``exact_match``, or the first of the scores; 0 without any."""
    if scores is None:
        return 0.0
    return float(scores.get("exact_match", next(iter(scores.values()), 0.0)))


@dataclass(frozen=True, slots=True)
class Run:
    """What one measurement left.

    Attributes:
        path: as it was named.
        stats: its numbers.
        manifest: of ``run.json``; empty for a file of numbers.
        results: accuracy by task, in the keys of lm-eval.
        samples: the answers, if they were kept.
    """

    path: Path
    stats: Mapping[str, Any]
    manifest: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    samples: tuple[Mapping[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """What tells it from others in a table."""
        return self.path.stem if self.path.is_file() else self.path.name

    @property
    def accuracy(self) -> float | None:
        """Mean of the main metric over tasks, weighted by their answers; None without scores."""
        sums, count = 0.0, 0
        for result in self.results.values():
            metrics = [key for key in result if key.endswith(",none") and "_stderr" not in key]
            weight = result.get("scored", result.get("samples"))
            if metrics and isinstance(weight, int):
                key = "exact_match,none" if "exact_match,none" in metrics else metrics[0]
                sums, count = sums + weight * float(result[key]), count + weight
        if count:
            return sums / count
        found = self.stats.get("accuracy")
        return None if found is None else float(found)

    def number(self, key: str) -> float | None:
        """A figure of its numbers; None where it is missing, no number or not finite."""
        value = self.stats.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if math.isfinite(value) else None

    def setting(self, section: str, key: str) -> Any:
        """A setting of its manifest; None where it says nothing."""
        return self.manifest.get("config", {}).get(section, {}).get(key)

    def lengths(self) -> tuple[float, float, int]:
        """Mean, median and most characters of its answers."""
        lengths = [len(str(sample["text"])) for sample in self.samples] or [0]
        return statistics.fmean(lengths), statistics.median(lengths), max(lengths)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"run: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"run: expected JSON in {path}, got {error}") from error


def _results(folder: Path) -> dict[str, Any]:
    """The newest accuracies of a folder, those of lm-eval's subfolders included."""
    files = sorted(folder.rglob("results_*.json"), key=lambda path: path.name)
    return dict(_read_json(files[-1]).get("results", {})) if files else {}


def read_run(path: Path) -> Run:
    """A folder of `eval`, or a JSON file of `throughput`, `serve` or an older program.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    if path.is_dir():
        if not (path / MANIFEST).is_file() or not (path / STATS).is_file():
            raise ConfigError(
                f"run: expected {MANIFEST} and {STATS} in {path}, got no finished run"
            )
        return Run(
            path=path,
            stats=_read_json(path / STATS),
            manifest=_read_json(path / MANIFEST),
            results=_results(path),
            samples=tuple(read_jsonl(path / "samples.jsonl")),
        )
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ConfigError(f"run: expected an object in {path}, got {type(content).__name__}")
    if isinstance(content.get("metrics"), dict):  # older programs: config, metrics, timestamp
        numbers = {**content["metrics"], "timestamp": content.get("timestamp")}
        config = content.get("config") or {}
        nested = config if "engine" in config else {"engine": config, "eval": config}
        return Run(path, numbers, {"config": nested})
    config = content.get("config")
    return Run(path, content, {"config": config} if isinstance(config, dict) else {})
