# SPDX-License-Identifier: Apache-2.0
"""The commands of ``python -m diffulex.bench`` that evaluate: their flags and what runs them."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

from diffulex.bench.arg_parser import (
    add_eval_flags,
    benchmark_config,
    flag_settings,
    refuse_settings,
)
from diffulex.bench.config import BenchmarkConfig
from diffulex.bench.datasets import data_path, data_sets, fetch, read_items, sha256
from diffulex.bench.run_directory import MANIFEST, RunDirectory
from diffulex.bench.task import read_tasks, split_tasks, task_names
from diffulex.env import get_text
from diffulex.errors import ConfigError
from diffulex.log import configure, get_logger, logged_to

if TYPE_CHECKING:
    from diffulex.bench.task import Task
    from diffulex.config.flags import Parser

__all__ = ["add_bench_eval_flags", "add_tasks_flags", "run_eval", "run_tasks"]

logger = get_logger(__name__)

#: Flags in the short help.
_COMMON = (
    "config_file", "preset", "resume", "engine_arg", "dataset_name", "dataset_limit", "include_path",
    "temperature", "max_tokens", "output_dir", "confirm_run_unsafe_code", "apply_chat_template",
    "num_fewshot", "save_trace", "endpoint", "model_path", "model_name", "decoding_strategy",
    "max_num_reqs", "accept_threshold",
)  # fmt: skip


def add_bench_eval_flags(parser: Parser) -> None:
    """``eval``: settings in, a folder with results out."""
    add_eval_flags(parser)
    parser.shorten_help(_COMMON)
    parser.set_defaults(command=run_eval)


def add_tasks_flags(parser: Parser) -> None:
    """``tasks``: what can be asked, and whether its items are here."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--fetch", metavar="NAME", help="read a data set from the hub and keep it")
    group.add_argument(
        "--verify", action="store_true", help="read the items of every task; 1 if some are missing"
    )
    group.add_argument("--path", action="store_true", help="print the folder of the task files")
    parser.add_argument("--include-path", metavar="DIR", help="a folder with further task files")
    parser.set_defaults(command=run_tasks)


def run_eval(options: argparse.Namespace) -> int:
    """Evaluates one model; 0, or 3 where a few requests failed.

    Raises:
        ConfigError: settings that cannot be used.
        EvaluationError: too many requests failed.
    """
    if options.log_file is not None:
        configure(level=options.log_level or "info", file=options.log_file)
    if options.resume is None:
        config = benchmark_config(options)
        directory = None
    else:
        refuse_settings(options, "--resume")
        directory = RunDirectory.resume(Path(options.resume))
        saved = json.loads((directory.path / MANIFEST).read_text(encoding="utf-8"))
        config = _saved_config(saved["config"], saved["origins"])
        config.update(flag_settings(options), "flag")  # what is not refused
    for line in config.describe():
        logger.debug("%s", line)
    tasks, others = split_tasks(config.eval.dataset_name, config.eval.include_path)
    if not others:
        run = RunDirectory.create(config.eval) if directory is None else directory
        return _run_harness(config, tasks, run, options, is_resumed=directory is not None)
    return _run_mixed(config, tasks, others, options, directory)


def _run_harness(
    config: BenchmarkConfig,
    tasks: list[Task],
    directory: RunDirectory,
    options: argparse.Namespace,
    *,
    is_resumed: bool = False,
) -> int:
    from diffulex.bench.harness import Harness  # noqa: PLC0415 (slow to import)

    api_key = options.api_key or get_text("OPENAI_API_KEY") or None
    harness = Harness(config, tasks, directory, options.progress, api_key)
    if is_resumed:
        harness.continue_run()
    try:
        with logged_to(directory.log_path):
            code = harness.run()
    finally:
        if config.eval.save_results and harness.has_answers:
            print(f"results: {harness.path}", flush=True)
    print(harness.report(), flush=True)
    return code


def _run_mixed(
    config: BenchmarkConfig,
    tasks: list[Task],
    others: list[str],
    options: argparse.Namespace,
    interrupted: RunDirectory | None,
) -> int:
    """Our tasks, then those of lm-eval, each part with its own folder."""
    from diffulex.bench.lm_eval_run import check_lm_eval, run_lm_eval  # noqa: PLC0415 (optional)

    if config.eval.endpoint is not None:
        raise ConfigError(
            f"dataset: expected bundled tasks with endpoint, got {', '.join(others)!r}; lm-eval asks"
            " servers by --model local-completions"
        )
    rest = _with_tasks(config, others)
    if not tasks:
        return run_lm_eval(rest, options.progress, interrupted)
    if config.eval.save_results and not config.eval.use_run_subdirectory:
        raise ConfigError(
            "use_run_subdirectory: expected true for bundled tasks beside those of lm-eval, whose"
            " results have a folder each, got false"
        )
    check_lm_eval(rest)
    own = _with_tasks(config, [task.name for task in tasks])
    code = _run_harness(own, tasks, RunDirectory.create(own.eval), options)
    return max(code, run_lm_eval(rest, options.progress))


def _with_tasks(config: BenchmarkConfig, names: list[str]) -> BenchmarkConfig:
    result = copy.deepcopy(config)
    result.eval.dataset_name = ",".join(names)
    return result


def _saved_config(settings: dict[str, object], origins: dict[str, str]) -> BenchmarkConfig:
    config = BenchmarkConfig.from_dict(settings)
    config.origins = dict(origins)
    return config


def run_tasks(options: argparse.Namespace) -> int:
    """Lists the tasks and data sets, fetches one, or reads all."""
    if options.path:
        from diffulex.bench.task import BUNDLED  # noqa: PLC0415

        print(BUNDLED)
        return 0
    if options.fetch is not None:
        print(fetch(options.fetch))
        return 0
    if options.verify:
        return _verify(options.include_path)
    for name in task_names(options.include_path):
        tasks = read_tasks(name, options.include_path)
        print(f"{name:40} {'' if not tasks else tasks[0].data or tasks[0].data_files}")
    return 0


def _verify(include_path: str | None) -> int:
    is_whole = True
    for name, row in data_sets().items():
        path = data_path(name)
        state = "missing" if path is None else f"{len(read_items(path))} items"
        if path is not None and row.get("sha256") not in (None, sha256(path)):
            state = "changed: its SHA-256 is not that of the manifest"
        is_whole &= state.endswith(" items")
        print(f"{name:40} {state} ({row['licence']})")
    for name in task_names(include_path):
        tasks = read_tasks(name, include_path)
        if tasks and tasks[0].data is None:
            print(f"{name:40} {len(tasks[0].items())} items")
    return 0 if is_whole else 1
