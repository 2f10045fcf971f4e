# SPDX-License-Identifier: Apache-2.0
"""Items of the bundled tasks: from a file that is named, from the package, or fetched once.

``data/MANIFEST.json`` lists the sets with their licences. Only those written for this package are in
it; the others are fetched from the hub by their authors' names, put into the form the tasks read, and
kept in the hub's cache. Nothing is fetched when a module is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from diffulex.errors import ConfigError
from diffulex.log import get_logger

__all__ = [
    "data_path", "data_sets", "fetch", "load_benchmark_dataset", "load_gsm8k", "load_humaneval",
    "load_split", "sha256",
]  # fmt: skip

logger = get_logger(__name__)

_DIRECTORY = Path(__file__).parent / "data"
Item = dict[str, Any]


@cache
def data_sets() -> dict[str, dict[str, Any]]:
    """Name of every set -> its row of the manifest."""
    text = (_DIRECTORY / "MANIFEST.json").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = json.loads(text)["sets"]
    return rows


def sha256(path: Path) -> str:
    """Digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _row(name: str) -> dict[str, Any]:
    if name not in data_sets():
        raise ConfigError(f"data set: expected one of {', '.join(data_sets())}, got {name!r}")
    return data_sets()[name]


def _fetched_path(name: str) -> Path:
    from huggingface_hub.constants import HF_HOME  # noqa: PLC0415 (slow to import)

    return Path(HF_HOME) / "diffulex_bench" / f"{name}.json"


def data_path(name: str) -> Path | None:
    """The file of a set, in the package or fetched before; None if it is neither.

    Raises:
        ConfigError: there is no such set.
    """
    row = _row(name)
    path = _DIRECTORY / row["file"] if "file" in row else _fetched_path(name)
    return path if path.is_file() else None


def load_split(name: str, data_files: str | None = None) -> list[Item]:
    """The items of a set; one that is neither bundled nor here yet is fetched.

    Args:
        name: of the manifest.
        data_files: a file of items that is read instead, JSON or JSON lines.

    Raises:
        ConfigError: the items cannot be had.
    """
    if data_files is not None:
        return read_items(Path(data_files))
    path = data_path(name)
    return read_items(fetch(name) if path is None else path)


def read_items(path: Path) -> list[Item]:
    """A list in a JSON file, or one item a line.

    Raises:
        ConfigError: the file cannot be read, or holds something else, or nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"data: cannot read {path}: {reason}") from error
    try:
        if text.lstrip().startswith("["):
            items = json.loads(text)
        else:
            items = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"data: {path}: expected JSON or JSON lines, got {error}") from error
    if not items or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"data: {path}: expected items that are objects, got {str(items)[:80]}")
    return list(items)


def fetch(name: str) -> Path:
    """Reads a set from the hub and keeps it; the file.

    Raises:
        ConfigError: it has no public source, or cannot be read.
    """
    row = _row(name)
    source = row.get("source")
    if source is None:
        raise ConfigError(f"data set {name}: expected data_files, got none: {row['note']}")
    try:
        from datasets import load_dataset  # noqa: PLC0415 (optional)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data set {name}: expected the package datasets (pip install '.[eval]' in the source directory) or"
            " data_files, got neither"
        ) from error
    logger.info("fetching %s from %s", name, source["dataset"])
    try:
        rows = load_dataset(source["dataset"], source.get("config"), split=source["split"])
    except Exception as error:  # of many kinds: no network, no such set, a changed format
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"data set {name}: cannot read {source['dataset']}: {reason}; give data_files instead"
        ) from error
    items = [_CONVERTERS[row["format"]](dict(item)) for item in rows]
    if len(items) != row["rows"]:
        logger.warning("%s: expected %d items, got %d", name, row["rows"], len(items))
    path = _fetched_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text("\n".join(json.dumps(item) for item in items) + "\n", encoding="utf-8")
    new.replace(path)
    return path


def _from_gsm8k(item: Item) -> Item:
    return {"question": item["question"], "ground_truth_answer": item["answer"]}


def _from_math(item: Item) -> Item:
    return {"question": item["problem"], "ground_truth_answer": item["answer"]}


def _from_humaneval(item: Item) -> Item:
    names = ("task_id", "prompt", "test", "entry_point")
    return {
        **{name: item[name] for name in names},
        "question": item["prompt"],
        "prefix": item["prompt"],
        "test_list": [f"{item['test']}\ncheck({item['entry_point']})"],
        "test_method": "function",
        "test_time_limit": 1,
    }


def _from_mbpp(item: Item) -> Item:
    question = item.get("text") or item["prompt"]
    imports = item.get("test_imports") or [item.get("test_setup_code") or ""]
    return {
        "task_id": item["task_id"],
        "question": question,
        "prompt": question,
        "code": item["code"],
        "test_imports": [line for line in imports if line],
        "test_list": [item["test"]] if item.get("test") else list(item["test_list"]),
        "shown_tests": list(item["test_list"]),
        "test_method": "function",
        "test_time_limit": 5 if item.get("test") else 1,
        "prefix": "",
    }


_CONVERTERS: dict[str, Callable[[Item], Item]] = {
    "gsm8k": _from_gsm8k,
    "math": _from_math,
    "humaneval": _from_humaneval,
    "mbpp": _from_mbpp,
}


def load_benchmark_dataset(
    name: str, split: str = "test", limit: int | None = None, data_files: str | None = None
) -> list[Item]:
    """The first items of a set.

    Raises:
        ConfigError: another split than ``test``, or the items cannot be had.
    """
    if split != "test":
        raise ConfigError(f"data set {name}: expected the split test, got {split!r}")
    return load_split(name, data_files)[:limit]


def load_gsm8k(**options: Any) -> list[Item]:
    """GSM8K; options as for `load_benchmark_dataset`."""
    return load_benchmark_dataset("gsm8k", **options)


def load_humaneval(**options: Any) -> list[Item]:
    """HumanEval; options as for `load_benchmark_dataset`."""
    return load_benchmark_dataset("humaneval", **options)
