# SPDX-License-Identifier: Apache-2.0
"""One evaluation from its settings to the files of its run.

Every answer is written down as it ends, so that a run that was interrupted goes on where it was.
Programs that a model wrote are run after all answers are there, so that the engine's times have
nothing of theirs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.bench.config import BenchmarkConfig
from diffulex.bench.endpoint import EndpointRunner, endpoint_stats
from diffulex.bench.live import Live
from diffulex.bench.manifest import new_manifest, utc_now
from diffulex.bench.report import report_markdown, report_text
from diffulex.bench.requests import cut_at, request_params, warm_up_params
from diffulex.bench.results import NOT_SCORABLE, metrics_record, run_stats, task_results
from diffulex.bench.run_directory import (
    FULL_RESPONSES,
    MANIFEST,
    RESPONSE_FILES,
    SAMPLES,
    TRACE,
    RunDirectory,
    read_jsonl,
)
from diffulex.bench.runner import BatchResult, BenchmarkRunner
from diffulex.bench.runs import main_score
from diffulex.bench.scoring.code import code_job, scored
from diffulex.bench.scoring.code_worker import check_imports, run_jobs
from diffulex.bench.scoring.confinement import sandbox
from diffulex.bench.scoring.extract import has_mask_leak
from diffulex.bench.task import Task
from diffulex.errors import ConfigError, DiffulexError
from diffulex.log import get_logger
from diffulex.trace.files import trace_record

if TYPE_CHECKING:
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.engine.output import RequestOutput

__all__ = ["MAX_FAILED", "EvaluationError", "Harness", "check_same"]

logger = get_logger(__name__)

#: More failed requests than this share end a run.
MAX_FAILED = 0.01
ERRORS = "errors.jsonl"


class EvaluationError(DiffulexError, RuntimeError):
    """A run ended without a result that could be relied on."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One question of a run: an item, asked for the n-th time."""

    task: Task
    doc_id: int
    run: int
    repeat: int
    item: Mapping[str, Any]
    prompt: str

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.task.name, self.doc_id, self.run, self.repeat


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Harness:
    """Runs tasks with one model.

    Args:
        config: checked settings.
        tasks: of `read_tasks`.
        directory: where the files go.
        style: of the progress, as for `Live`.
        api_key: of a server that is evaluated; written nowhere.
    """

    def __init__(
        self,
        config: BenchmarkConfig,
        tasks: Sequence[Task],
        directory: RunDirectory,
        style: str = "auto",
        api_key: str | None = None,
    ) -> None:
        self._config, self._tasks = config, tasks
        self._api_key = api_key
        self._directory, self._style = directory, style
        self._items = {task.name: self._read(task) for task in tasks}
        self.manifest = new_manifest(config)
        #: Whether the folder is that of an interrupted run which has not gone on yet.
        self._is_resuming = False
        self._records: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []
        self._runs_code = config.eval.confirm_run_unsafe_code
        has_code = any(task.unsafe_code for task in tasks)
        self.manifest["sandbox"] = sandbox() if has_code and self._runs_code else "none"
        if has_code and not self._runs_code:
            logger.warning(
                "programs are not run and not scored: expected --confirm-run-unsafe-code, got none"
            )

    def _read(self, task: Task) -> list[dict[str, Any]]:
        chosen = self._config.eval
        if chosen.num_fewshot:
            raise ConfigError(
                f"num_fewshot: expected 0 for the task {task.name}, whose prompt is fixed,"
                f" got {chosen.num_fewshot}"
            )
        if chosen.apply_chat_template and not task.is_chat:
            raise ConfigError(
                f"apply_chat_template: expected a task whose metadata has chat, got {task.name},"
                " whose prompt is written with its template"
            )
        return task.items(chosen.dataset_data_files, chosen.dataset_limit)

    def continue_run(self) -> None:
        """Takes over the records of an interrupted run, and what they were made with: `run` asks no
        further question of another model, tokenizer, prompt or with other parameters. Until then the
        folder stays as it is.

        Raises:
            ConfigError: its items are not those of this one.
        """
        before = json.loads((self._directory.path / MANIFEST).read_text(encoding="utf-8"))
        for name, facts in before["tasks"].items():
            if facts["data_sha256"] != self._data_hash(name):
                raise ConfigError(f"resume: expected the same items of {name}, got others")
        # What failed is asked again.
        kept = read_jsonl(self._directory.path / SAMPLES)
        self._records = [record for record in kept if not record["error"]]
        self._is_resuming = True
        for key in ("segments", "started", "tasks", "engine"):
            if key in before:
                self.manifest[key] = before[key]
        self.manifest["resumed"] = [*before.get("resumed", []), utc_now()]
        logger.info(
            "going on with %s: %d answers are there", self._directory.path, len(self._records)
        )

    def _data_hash(self, name: str) -> str:
        return _sha256(json.dumps(self._items[name], sort_keys=True))

    def run(self) -> int:
        """Asks, scores and writes everything; 0, or 3 where a few requests failed.

        Raises:
            EvaluationError: more than 1 % of the requests failed.
            KeyboardInterrupt: after what there is has been written.
            ConfigError: the engine cannot be started with these settings, or is not that of the run
                that goes on.
        """
        if not self._is_resuming:
            self._save_manifest()
        status = "failed"
        try:
            self._check_programs()
            self._ask_all()
            self._score_programs()
            status = "done"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            if not self._is_resuming:  # a run that may not go on stays what it was
                self.manifest["ended"], self.manifest["status"] = utc_now(), status
                self._write_results()
        num_failed = sum(bool(record["error"]) for record in self._records)
        if num_failed > MAX_FAILED * len(self._records):
            self.manifest["status"] = "failed"
            self._save_manifest()
            raise EvaluationError(
                f"eval: expected at most {MAX_FAILED:.0%} failed requests, got {num_failed} of"
                f" {len(self._records)}; see {self._directory.path / ERRORS}"
            )
        return 3 if num_failed else 0

    # Asking.

    def _ask_all(self) -> None:
        with self._opened() as runner:
            facts = runner.facts()
            check_same(self.manifest.get("engine"), facts, "model_files", "tokenizer_files")
            self.manifest["engine"] = facts
            requests = [self._requests(runner, task) for task in self._tasks]
            self._begin()
            self._warm_up(runner, requests[0])
            for run in range(self._config.eval.repeat):
                for task, batch in zip(self._tasks, requests, strict=True):
                    self._ask(runner, task, [dataclasses.replace(r, run=run) for r in batch])

    def _opened(self) -> BenchmarkRunner | EndpointRunner:
        """An engine in this process, or a server."""
        chosen = self._config.eval
        if chosen.endpoint is not None:
            return EndpointRunner(self._config, self._api_key)
        kwargs = self._config.get_diffulex_kwargs()
        model = kwargs.pop("model")
        runner = BenchmarkRunner(model, self._config.engine.tokenizer_path, **kwargs)
        runner.system, runner.add_bos_token = chosen.system_instruction, chosen.add_bos_token
        return runner

    def _begin(self) -> None:
        """From here on the folder is that of this run."""
        if self._is_resuming:
            for name in (SAMPLES, ERRORS, TRACE):
                self._directory.drop_cut_line(name)
            self._directory.replace_records(SAMPLES, self._records)
            self._is_resuming = False
        self._save_manifest()

    def _requests(self, runner: BenchmarkRunner | EndpointRunner, task: Task) -> list[_Request]:
        requests = []
        for doc_id, item in enumerate(self._items[task.name]):
            prompt = runner.prompt(task, task.prompt(item))
            requests += [
                _Request(task, doc_id, 0, repeat, item, prompt) for repeat in range(task.repeats)
            ]
        params = request_params(self._config, task.generation_kwargs)
        facts = {
            "file": str(task.path.name),
            "items": len(self._items[task.name]),
            "data_sha256": self._data_hash(task.name),
            "first_prompt_sha256": _sha256(requests[0].prompt),
            "sampling": dataclasses.asdict(params),
            "code_time_scale": self._config.eval.code_time_scale if task.unsafe_code else None,
        }
        before = self.manifest["tasks"].get(task.name)
        check_same(before, facts, "first_prompt_sha256", "sampling")
        self.manifest["tasks"][task.name] = facts
        return requests

    def _params(self, request: _Request) -> SamplingParams:
        params = request_params(self._config, request.task.generation_kwargs)
        if params.seed is not None:  # otherwise every repetition would be the same answer
            seed = params.seed + request.run * request.task.repeats + request.repeat
            return dataclasses.replace(params, seed=seed)
        if request.run or request.repeat:
            return dataclasses.replace(params, seed=request.run * 1_000_003 + request.repeat)
        return params

    def _warm_up(
        self, runner: BenchmarkRunner | EndpointRunner, requests: Sequence[_Request]
    ) -> None:
        """A few answers that are not counted; their prompts are forgotten again."""
        first = requests[: self._config.eval.warmup_requests]
        params = [warm_up_params(self._params(request)) for request in first]
        asked: Any = [runner.encoded(request.prompt) for request in first]
        if first and runner.run(asked, params).is_interrupted:
            raise KeyboardInterrupt
        runner.forget_prompts()
        self.manifest["warmup_requests"] = len(first)

    def _ask(
        self, runner: BenchmarkRunner | EndpointRunner, task: Task, batch: Sequence[_Request]
    ) -> None:
        done = {tuple(record["key"]) for record in self._records}
        todo = [request for request in batch if request.key not in done]
        if not todo:
            return
        keys = {request.key for request in batch}
        kept = [record for record in self._records if tuple(record["key"]) in keys]
        is_code = task.unsafe_code
        right = None if is_code else sum(main_score(r["scores"]) for r in kept)
        live = Live(task.name, len(batch), self._style, len(kept), right)
        self._last = []

        def finished(place: int, output: RequestOutput) -> None:
            record = self._record(todo[place], output, runner.full_text(output))
            record |= runner.further_facts(place)
            self._last.append(record)
            self._directory.append(SAMPLES, record)
            if output.trajectory is not None and isinstance(runner, BenchmarkRunner):
                self._trace(runner, todo[place], output)
            live.finished(output, None if is_code else main_score(record["scores"]))

        try:
            asked: Any = [runner.encoded(request.prompt) for request in todo]
            result = runner.run(asked, [self._params(r) for r in todo], finished)
        finally:
            self._records += self._last
            live.close()
        self._close_segment(task, todo, result)

    def _trace(self, runner: BenchmarkRunner, request: _Request, output: RequestOutput) -> None:
        model = Path(self._config.model_path).name
        line = trace_record(output, runner.tokenizer, question=request.prompt, model=model)
        self._directory.append(TRACE, {**line, "key": list(request.key)})

    def _close_segment(self, task: Task, todo: Sequence[_Request], result: BatchResult) -> None:
        for place, message in result.errors.items():
            request = todo[place]
            record = {**_head(request), **_failed(message)}
            if not task.unsafe_code:  # a program is scored with the others
                record["scores"], _ = _scores(request, "")
            self._records.append(record)
            self._directory.append(SAMPLES, record)
            self._directory.append(ERRORS, {"key": list(request.key), "error": message})
            logger.warning("%s item %d: %s", task.name, request.doc_id, message)
        segment = {"task": task.name, "stats": dataclasses.asdict(result.stats)}
        self.manifest["segments"].append(segment)
        self._save_manifest()
        if result.is_interrupted:
            raise KeyboardInterrupt

    def _record(self, request: _Request, output: RequestOutput, full_text: str) -> dict[str, Any]:
        text = cut_at(output.text, request.task.until)
        scores, reason = (
            (None, "not_scored") if request.task.unsafe_code else _scores(request, text)
        )
        return {
            **_head(request),
            "text": text,
            # The usual case needs no second copy.
            "full_text": None if full_text == text else full_text,
            "reason": output.completion_reason,
            "scores": scores,
            "score_reason": reason,
            "mask_leak": has_mask_leak(output.text),
            "error": None,
            "metrics": metrics_record(output.metrics),
        }

    # Scoring programs.

    def _check_programs(self) -> None:
        """Raises ConfigError, before anything is asked, where tests need a package that is not here."""
        if self._runs_code:
            tasks = [task for task in self._tasks if task.unsafe_code]
            check_imports(code_job(item, "") for task in tasks for item in self._items[task.name])

    def _score_programs(self) -> None:
        """Runs every program that has no verdict yet, several at a time."""
        if not self._runs_code:
            return
        tasks = {task.name: task for task in self._tasks if task.unsafe_code}
        open_records = [
            record
            for record in self._records
            if record["task"] in tasks and record["scores"] is None
        ]
        jobs = [
            code_job(
                self._items[record["task"]][record["doc_id"]],
                record["text"],
                definitions_only=tasks[record["task"]].definitions_only,
                time_scale=self._config.eval.code_time_scale,
            )
            for record in open_records
        ]
        for record, verdict in zip(open_records, run_jobs(jobs), strict=True):
            if verdict.reason != "invalid_item":
                record["scores"] = scored(verdict)
            if verdict.reason == "invalid_item" or not record["error"]:
                record["score_reason"] = verdict.reason

    # Writing.

    def _save_manifest(self) -> None:
        self._directory.replace_json(MANIFEST, self.manifest)

    def results(self) -> dict[str, Any]:
        """Accuracy of every task."""
        return {
            task.name: task_results([r for r in self._records if r["task"] == task.name])
            for task in self._tasks
        }

    def stats(self) -> dict[str, Any]:
        """The numbers of the run."""
        stats = run_stats if self._config.eval.endpoint is None else endpoint_stats
        return stats(self._records, self.manifest["segments"], self._last)

    def report(self) -> str:
        """The page for a terminal."""
        return report_text(self.manifest, self.stats(), self.results())

    def _write_results(self) -> None:
        order = {task.name: place for place, task in enumerate(self._tasks)}
        self._records.sort(key=lambda record: (order[record["task"]], record["key"][1:]))
        stats, results = self.stats(), self.results()
        stamp = self.manifest["ended"].replace(":", "-")
        self._directory.replace_records(SAMPLES, self._records)
        self._directory.replace_json("diffulex_stats.json", stats)
        self._directory.replace_json(
            f"results_{stamp}.json",
            {
                "results": results,
                "configs": {task.name: dict(task.config) for task in self._tasks},
                "n-samples": {name: len(items) for name, items in self._items.items()},
            },
        )
        texts = [record["text"] for record in self._records]
        whole = [record.get("full_text") or record["text"] for record in self._records]
        for name in RESPONSE_FILES:
            self._directory.replace_json(name, whole if name == FULL_RESPONSES else texts)
        self._directory.replace("report.md", report_markdown(self.manifest, stats, results))
        self._directory.replace("report.txt", report_text(self.manifest, stats, results))
        self._save_manifest()

    @property
    def has_answers(self) -> bool:
        """Whether anything was answered."""
        return bool(self._records)

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self._directory.path


def check_same(before: Mapping[str, Any] | None, now: Mapping[str, Any], *keys: str) -> None:
    """Raises ConfigError where facts of an interrupted run, read from JSON, are not those of now."""
    for key in keys:
        if before is not None and before[key] != json.loads(json.dumps(now[key])):
            raise ConfigError(
                f"resume: expected the {key} of the interrupted run {before[key]}, got {now[key]}"
            )


def _head(request: _Request) -> dict[str, Any]:
    return {
        "key": list(request.key),
        "id": "/".join(map(str, request.key)),
        "task": request.task.name,
        "doc_id": request.doc_id,
        "run": request.run,
        "prompt_sha256": _sha256(request.prompt),
    }


def _scores(request: _Request, text: str) -> tuple[dict[str, float], str | None]:
    """The scores of an answer, and None; 0 and the error where it cannot be scored."""
    task = request.task
    try:
        found = task.score(dict(request.item), [text])
        return {name: float(value) for name, value in found.items()}, None
    except Exception as error:
        reason = f"{NOT_SCORABLE}: {type(error).__name__}: {error}"
        logger.warning("%s item %d: %s", task.name, request.doc_id, reason)
        return dict.fromkeys(task.metrics, 0.0), reason


def _failed(message: str) -> dict[str, Any]:
    """What stands in the place of an answer that there is not; its text counts as the answer."""
    return {
        "text": "",
        "full_text": None,
        "reason": "error",
        "scores": None,
        "score_reason": "error",
        "error": message,
        "metrics": None,
    }
