# SPDX-License-Identifier: Apache-2.0
"""Task files: what is asked, with which items, and how an answer is scored.

They have the format of lm-eval. What is read here is the part that the bundled tasks use; a task that
needs more of it is run by lm-eval.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from diffulex.bench.datasets import load_split, read_items
from diffulex.errors import ConfigError

__all__ = ["BUNDLED", "Task", "read_tasks", "split_tasks", "task_names", "template_marker"]

BUNDLED = Path(__file__).parent / "tasks"
_PACKAGE = "diffulex.bench.tasks"
#: Keys that are read here. A file with any other one is run by lm-eval.
_KEYS = {
    "custom_dataset", "dataset_kwargs", "dataset_path", "doc_to_target", "doc_to_text",
    "filter_list", "generation_kwargs", "metadata", "metric_list", "num_fewshot", "output_type",
    "process_results", "repeats", "tag", "task", "task_alias", "test_split", "unsafe_code",
}  # fmt: skip
#: Tokens by which templates of published models mark roles.
_CONTROL = re.compile(
    r"<\|im_(start|end)\|>|<role>|<\|role_end\|>|<\|turn>|<turn\|>|<\|start_header_id\|>|<\|eot_id\|>|\[INST\]"
)
#: The scores whose programs the harness runs: after all answers, in a sandbox, if that is allowed.
_CODE_SCORES = ("functions.code", "functions.code_definitions")


@dataclass(frozen=True, slots=True)
class Task:
    """One task of which everything is known here.

    Attributes:
        data: name of a bundled data set, or None for a file.
        data_files: file of the items in place of the set's.
        is_chat: the prompt is a user message, which the checkpoint's chat template wraps.
        score: item and answers -> named scores, as `process_results` of lm-eval.
        metrics: names of those scores, as far as the file lists them.
    """

    name: str
    path: Path
    data: str | None
    data_files: str | None
    template: str
    is_chat: bool
    generation_kwargs: Mapping[str, Any]
    score: Callable[[dict[str, Any], Sequence[Any]], Mapping[str, float]]
    metrics: tuple[str, ...] = ()
    repeats: int = 1
    unsafe_code: bool = False
    definitions_only: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def until(self) -> list[str]:
        """Texts that end an answer."""
        return stop_terms(self.generation_kwargs.get("until"))

    def items(
        self, data_files: str | None = None, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """The first items; `data_files` replaces the file of the task.

        Raises:
            ConfigError: they cannot be had.
        """
        files = data_files or self.data_files
        if self.data is None:
            if files is None:
                raise ConfigError(f"task {self.name}: expected data_files, got none")
            return read_items(Path(files))[:limit]
        return load_split(self.data, files)[:limit]

    def prompt(self, item: Mapping[str, Any]) -> str:
        """The text of an item; ConfigError where it lacks what the template names."""
        from jinja2 import Environment, StrictUndefined, TemplateError  # noqa: PLC0415

        env = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
        try:
            return env.from_string(self.template).render(**item)
        except TemplateError as error:
            raise ConfigError(f"task {self.name}: cannot write the prompt: {error}") from error


def stop_terms(until: Any) -> list[str]:
    """A text or a list as a list without empty entries."""
    terms = [until] if isinstance(until, str) else list(until or [])
    return [str(term) for term in terms if term]


def template_marker(prompt: str) -> str | None:
    """The token by which a prompt shows that it is written with a chat template; None: it is plain."""
    found = _CONTROL.search(prompt)
    return None if found is None else found[0]


class _Function(str):
    """The text after ``!function``, with the directory it is relative to."""

    folder: Path


def _read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A task file over those it includes."""
    import yaml  # noqa: PLC0415 (slow to import)

    # Ten times as fast where the library of C is there.
    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass

    def function(loader: Any, node: Any) -> _Function:
        result = _Function(loader.construct_scalar(node))
        result.folder = path.parent
        return result

    Loader.add_constructor("!function", function)
    if path in seen:
        raise ConfigError(f"task file {path}: expected no circle of includes, got one")
    try:
        with path.open(encoding="utf-8") as file:
            config = yaml.load(file, Loader=Loader)
    except OSError as error:
        raise ConfigError(f"task file: cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"task file {path}: expected YAML, got {reason}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"task file {path}: expected a map, got {config!r}")
    included = config.pop("include", [])
    result: dict[str, Any] = {}
    for name in [included] if isinstance(included, str) else included:
        base = _read_yaml((path.parent / name).resolve(), (*seen, path))
        base.pop("task", None)
        result.update(base)
    return {**result, **config}


def _module(function: _Function, name: str) -> ModuleType:
    if function.folder == BUNDLED:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    path = function.folder / f"{name}.py"
    full = f"_diffulex_task_{abs(hash(str(path)))}"
    if full in sys.modules:
        return sys.modules[full]
    spec = importlib.util.spec_from_file_location(full, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"task file: expected the module {path}, got none")
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def _resolved(function: _Function) -> Callable[..., Any]:
    name, _, attribute = function.rpartition(".")
    found = getattr(_module(function, name), attribute, None)
    if not callable(found):
        raise ConfigError(f"task file: expected the function {function} in {function.folder}")
    return found  # type: ignore[no-any-return]


def _is_understood(config: Mapping[str, Any]) -> bool:
    """Whether a file has nothing but what is read here, of each key what is done here."""
    num_repeats = config.get("repeats", 1)
    take_all = [{"function": "take_first_k", "k": num_repeats}]
    metrics = config.get("metric_list") or []
    return (
        config.keys() <= _KEYS
        and config.get("output_type", "generate_until") == "generate_until"
        and not config.get("num_fewshot")
        and set(config.get("dataset_kwargs") or {}) <= {"name", "data_files"}
        and all(
            isinstance(entry, Mapping)
            and "metric" in entry
            and entry.get("aggregation", "mean") == "mean"
            for entry in metrics
        )
        and all(entry.get("filter") == take_all for entry in config.get("filter_list") or [])
    )


def _task(path: Path, config: Mapping[str, Any]) -> Task | None:
    """The task of a file; None if it needs more than is read here."""
    config = {key: value for key, value in config.items() if value is not None}
    score, text = config.get("process_results"), config.get("doc_to_text")
    kwargs = config.get("dataset_kwargs") or {}
    items = config.get("custom_dataset")
    is_bundled = isinstance(items, _Function) and items.folder == BUNDLED and "name" in kwargs
    is_file = items is None and config.get("dataset_path") == "json"
    if not isinstance(score, _Function) or not isinstance(text, str):
        return None
    if isinstance(text, _Function) or not (is_bundled or is_file):
        return None
    runs_code = score.folder == BUNDLED and score in _CODE_SCORES
    if not _is_understood(config) or (config.get("unsafe_code") and not runs_code):
        return None
    files = kwargs.get("data_files")
    if isinstance(files, Mapping) and len(files) == 1:
        (files,) = files.values()
    if files is not None and not isinstance(files, str):
        return None
    metadata = config.get("metadata") or {}
    return Task(
        name=str(config["task"]),
        path=path,
        data=str(kwargs["name"]) if is_bundled else None,
        data_files=None if files is None else str(path.parent / files),
        template=text,
        is_chat=bool(metadata.get("chat")),
        generation_kwargs=dict(config.get("generation_kwargs") or {}),
        score=_resolved(score),
        metrics=tuple(str(entry["metric"]) for entry in config.get("metric_list") or ()),
        repeats=int(config.get("repeats") or 1),
        unsafe_code=runs_code,
        definitions_only=str(score) == "functions.code_definitions",
        config={key: str(value) for key, value in config.items()},
    )


def _files(folders: Iterable[Path]) -> dict[str, Path]:
    """Name of every task -> its file; a later folder wins."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            config = _read_yaml(path)
            if isinstance(config.get("task"), str):
                found[config["task"]] = path
    return found


def include_folders(include_path: str | None) -> list[Path]:
    """Where tasks are looked for: the bundled ones and a folder, or nowhere for an empty text.

    Raises:
        ConfigError: the folder is none.
    """
    if include_path == "":
        return []
    if include_path is None:
        return [BUNDLED]
    folder = Path(include_path)
    if not folder.is_dir():
        raise ConfigError(f"include_path: expected a directory, got {include_path!r}")
    return [folder.resolve()]


def task_names(include_path: str | None = None) -> list[str]:
    """Names of the tasks in the folders, sorted."""
    return sorted(_files(include_folders(include_path)))


def read_tasks(names: str, include_path: str | None = None) -> list[Task] | None:
    """The tasks of a list separated by commas; None if one of them has to be run by lm-eval.

    Raises:
        ConfigError: a file cannot be read.
    """
    tasks, others = split_tasks(names, include_path)
    return None if others else tasks


def split_tasks(names: str, include_path: str | None = None) -> tuple[list[Task], list[str]]:
    """The tasks of a list separated by commas, and the names of those that lm-eval has to run.

    Raises:
        ConfigError: a file cannot be read, or the list is empty.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise ConfigError(f"dataset: expected names of tasks, got {names!r}")
    files = _files(include_folders(include_path))
    tasks, others = [], []
    for name in wanted:
        task = _task(files[name], _read_yaml(files[name])) if name in files else None
        if task is None:
            others.append(name)
        else:
            tasks.append(task)
    return tasks, others
