# SPDX-License-Identifier: Apache-2.0
"""Tasks that only lm-eval can run, and its own command with our model registered."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from typing import Any

from diffulex.bench.config import BenchmarkConfig
from diffulex.bench.harness import ERRORS, check_same
from diffulex.bench.manifest import engine_facts, new_manifest, utc_now
from diffulex.bench.report import bound_name, report_markdown, report_text
from diffulex.bench.run_directory import MANIFEST, SAMPLES, TRACE, RunDirectory, read_jsonl
from diffulex.bench.task import task_names
from diffulex.errors import ConfigError
from diffulex.log import logged_to

__all__ = ["check_lm_eval", "run_command", "run_lm_eval"]


#: Beginning of the name of lm-eval's cache in the folder of a run.
_CACHE = "lm_eval_cache"


def _need_lm_eval(what: str, instead: str = "") -> None:
    try:
        import lm_eval.evaluator  # noqa: PLC0415 (optional)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}: expected {instead}the package lm_eval (pip install '.[eval]' in the source directory), got none:"
            f" {error}"
        ) from error
    del lm_eval


def run_command(arguments: Sequence[str]) -> int:
    """lm-eval's command line, where ``--model diffulex`` is this engine."""
    _need_lm_eval("lm-eval")
    from lm_eval.__main__ import cli_evaluate  # noqa: PLC0415 (optional)

    import diffulex.bench.lm_eval_model  # noqa: F401, PLC0415 (registers the model)

    before, sys.argv = sys.argv, ["lm-eval", *arguments]
    try:
        cli_evaluate()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.argv = before
    return 0


def check_lm_eval(config: BenchmarkConfig) -> Any:
    """lm-eval's tasks, before anything is run.

    Raises:
        ConfigError: lm-eval is missing, does not know a task, or settings mean nothing to it.
    """
    _need_lm_eval(f"dataset {config.eval.dataset_name}", _bundled_instead(config))
    _refuse_settings(config)
    from lm_eval.tasks import TaskManager  # noqa: PLC0415 (optional)

    manager = TaskManager(include_path=config.eval.include_path)
    missing = [name for name in _names(config) if name not in manager.all_tasks]
    if missing:
        raise ConfigError(
            f"dataset: expected a bundled task or one of lm-eval, got {', '.join(missing)!r}"
        )
    return manager


def _bundled_instead(config: BenchmarkConfig) -> str:
    """What an unknown name may have meant, for whoever has no lm-eval."""
    known = task_names(config.eval.include_path)
    unknown = [name for name in _names(config) if name not in known]
    if not unknown:
        return ""
    near = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f", nearest is {near[0]}" if near else ""
    return f"a task of `diffulex bench tasks`{hint}, or "


def _names(config: BenchmarkConfig) -> list[str]:
    return [name.strip() for name in config.eval.dataset_name.split(",")]


def _refuse_settings(config: BenchmarkConfig) -> None:
    """Raises ConfigError for settings that only our own harness has."""
    for key, neutral in (("repeat", 1), ("dataset_data_files", None)):
        value = getattr(config.eval, key)
        if value != neutral:
            raise ConfigError(
                f"{key}: expected {neutral} for {config.eval.dataset_name}, which lm-eval runs,"
                f" got {value!r}"
            )


def run_lm_eval(
    config: BenchmarkConfig, progress: str = "auto", interrupted: RunDirectory | None = None
) -> int:
    """Evaluates with lm-eval's tasks and scores; its files and ours are in one folder.

    Answers and likelihoods are in lm-eval's cache there as they come, until the run is done.

    Args:
        config: checked settings.
        progress: how the state of the run is shown, as for `Live`.
        interrupted: the folder of a run that goes on with the same settings.

    Raises:
        ConfigError: lm-eval is missing, does not know a task, or the run that goes on is done, or was
            one of other files.
        EvaluationError: too many requests failed.
        KeyboardInterrupt: after the answers that were there have been saved.
    """
    manager = check_lm_eval(config)
    directory = interrupted or RunDirectory.create(config.eval)
    with logged_to(directory.log_path):
        return _run(config, manager, directory, progress, interrupted)


def _run(
    config: BenchmarkConfig,
    manager: Any,
    directory: RunDirectory,
    progress: str,
    interrupted: RunDirectory | None,
) -> int:
    from diffulex.bench.lm_eval_model import DiffulexLM  # noqa: PLC0415 (needs lm-eval)

    before = None if interrupted is None else _interrupted_manifest(interrupted)
    manifest = new_manifest(config)
    if before is None:
        directory.replace_json(MANIFEST, manifest)
    save_dir = str(directory.path) if config.eval.save_results else None
    path = config.engine.model_path
    model = DiffulexLM(path, save_dir=save_dir, progress=progress, config=config)
    manifest["engine"] = facts = engine_facts(model.engine)
    if before is not None:
        try:
            check_same(before.get("engine"), facts, "model_files", "tokenizer_files")
        except BaseException:
            model.close()
            raise
        manifest["started"] = before["started"]
        manifest["resumed"] = [*before.get("resumed", []), utc_now()]
        _go_on(directory, model, before.get("totals", {}))
        manifest["totals"] = model.totals
    # Again, with what a run that goes on is compared with.
    directory.replace_json(MANIFEST, manifest)
    results: dict[str, Any] = {"results": {}}
    status = "failed"
    try:
        results = _evaluate(config, model, manager, directory)
        _save(config, directory, results)
        _forget(directory)
        status = "done"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        manifest["ended"], manifest["status"] = utc_now(), status
        manifest["totals"] = model.totals
        directory.replace_json(MANIFEST, manifest)
        stats, scores = model.stats(), _scores(results)
        directory.replace("report.md", report_markdown(manifest, stats, scores))
        directory.replace("report.txt", report_text(manifest, stats, scores))
        model.close()
    print(report_text(manifest, stats, scores), flush=True)
    return 3 if stats["failed_requests"] else 0


def _interrupted_manifest(directory: RunDirectory) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((directory.path / MANIFEST).read_text(encoding="utf-8"))
    if manifest["status"] == "done":
        raise ConfigError(
            f"resume: expected a run that was interrupted, got {directory.path}, which is done"
        )
    return manifest


def _go_on(directory: RunDirectory, model: Any, totals: dict[str, Any]) -> None:
    """Takes over what an interrupted run has; what failed in it is asked again."""
    for name in (SAMPLES, ERRORS, TRACE):
        directory.drop_cut_line(name)
    records = list(read_jsonl(directory.path / SAMPLES))
    failed = [
        record["cache_key"] for record in records if record["error"] and "cache_key" in record
    ]
    for path in directory.path.glob(f"{_CACHE}*.db") if failed else ():
        from sqlitedict import SqliteDict  # noqa: PLC0415 (optional)

        with SqliteDict(str(path), autocommit=True) as cache:
            for key in failed:
                cache.pop(key, None)
    model.go_on(totals, records)
    directory.replace_records(SAMPLES, list(filter(model.is_kept, records)))
    answered = [record for record in records if not record["error"]]
    traces = list(read_jsonl(directory.path / TRACE))
    if len(traces) == len(answered):  # a trace for each answer, in their order
        mates = zip(traces, answered, strict=True)
        directory.replace_records(TRACE, [trace for trace, mate in mates if model.is_kept(mate)])


def _forget(directory: RunDirectory) -> None:
    """Removes lm-eval's cache."""
    for path in directory.path.glob(f"{_CACHE}*"):
        path.unlink(missing_ok=True)  # a journal is gone with its connection


def _evaluate(
    config: BenchmarkConfig, model: Any, manager: Any, directory: RunDirectory
) -> dict[str, Any]:
    from lm_eval import simple_evaluate  # noqa: PLC0415 (optional)

    chosen = config.eval
    seeds = {} if chosen.seed is None else {"random_seed": chosen.seed}
    result: dict[str, Any] = simple_evaluate(
        model=model,
        tasks=_names(config),
        task_manager=manager,
        num_fewshot=chosen.num_fewshot,
        limit=chosen.dataset_limit,
        log_samples=True,
        apply_chat_template=chosen.apply_chat_template,
        system_instruction=chosen.system_instruction,
        confirm_run_unsafe_code=chosen.confirm_run_unsafe_code,
        use_cache=str(directory.path / _CACHE) if chosen.save_results else None,
        **seeds,
    )
    return result


def _save(config: BenchmarkConfig, directory: RunDirectory, results: dict[str, Any]) -> None:
    """lm-eval's own files, under its own names."""
    if not config.eval.save_results:
        return
    from lm_eval.loggers import EvaluationTracker  # noqa: PLC0415 (optional)

    samples = results.pop("samples", {})
    tracker = EvaluationTracker(output_path=str(directory.path))
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])


def _scores(results: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {
            **_labelled(scores, results["configs"].get(name, {}).get("output_type")),
            "samples": results["n-samples"].get(name, {}).get("effective", ""),
        }
        for name, scores in results["results"].items()
    }


def _labelled(scores: dict[str, Any], output_type: str | None) -> dict[str, Any]:
    """Numbers of rolling likelihoods under the name of what they are: bounds."""
    if output_type != "loglikelihood_rolling":
        return scores
    return {bound_name(key): value for key, value in scores.items()}
