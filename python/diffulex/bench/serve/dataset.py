# SPDX-License-Identifier: Apache-2.0
"""What is asked: bundled word problems, the items of a task, a file, or random token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.bench.serve.frames import Api
from diffulex.bench.task import read_tasks, template_marker
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from diffulex.bench.task import Task
    from diffulex.checkpoint.tokenizer import Tokenizer

__all__ = [
    "DATASETS",
    "MAX_STOPS",
    "BenchRequest",
    "DatasetSettings",
    "drawable_ids",
    "make_requests",
    "varied_length",
]

#: Beside these, ``task:NAME`` for every bundled task of ``diffulex bench tasks``.
DATASETS = ("task:word_problems", "random", "jsonl", "sharegpt")
_TASK = "task:"
#: Texts that end an answer, as many as the OpenAI API takes.
MAX_STOPS = 4
#: Turns of a ShareGPT conversation that are used: a question and its answer.
_NUM_TURNS = 2


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request before it has a model and sampling settings: a prompt, or messages."""

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    #: Most tokens of the answer.
    output_len: int
    #: Texts that end it, at most `MAX_STOPS`.
    stop: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """The part of the body that says what is asked."""
        asked = {"prompt": self.prompt} if self.messages is None else {"messages": self.messages}
        return {**asked, "stop": list(self.stop)} if self.stop else asked


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """Which requests to make.

    Attributes:
        name: one of `DATASETS`, or ``task:NAME``.
        path: the file of `jsonl` and `sharegpt`; of a task, in place of its items.
        input_len: prompt tokens of `random`.
        output_len: most tokens of an answer, where the data set does not say.
        range_ratio: `random` draws both lengths from `[len * (1 - r), len * (1 + r)]`.
        token_range: ids `random` draws from, low <= id < high; None takes the tokenizer's.
    """

    name: str = "task:word_problems"
    path: Path | None = None
    num_prompts: int = 200
    seed: int = 0
    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    token_range: tuple[int, int] | None = None


def make_requests(
    settings: DatasetSettings, api: Api, tokenizer: Tokenizer | None
) -> list[BenchRequest]:
    """Exactly `num_prompts` requests; the same settings give the same ones. Short files repeat.

    Raises:
        ConfigError: an unknown data set, an unusable file, or one that does not fit the API.
    """
    if settings.name.startswith(_TASK) and settings.name not in DATASETS:
        return _repeated(_task(settings, api, tokenizer), settings)
    readers: dict[str, Callable[[], list[BenchRequest]]] = {
        "task:word_problems": lambda: _word_problems(settings),
        "random": lambda: _random(settings, tokenizer),
        "jsonl": lambda: _jsonl(settings),
        "sharegpt": lambda: _sharegpt(settings, tokenizer),
    }
    if settings.name not in readers:
        known = ", ".join((*DATASETS, f"{_TASK}NAME"))
        raise ConfigError(f"dataset: expected one of {known}, got {settings.name!r}")
    repeated = _repeated(readers[settings.name](), settings)
    return [_for_api(request, api, tokenizer) for request in repeated]


def _repeated(requests: Sequence[BenchRequest], settings: DatasetSettings) -> list[BenchRequest]:
    return [requests[index % len(requests)] for index in range(settings.num_prompts)]


def _for_api(request: BenchRequest, api: Api, tokenizer: Tokenizer | None) -> BenchRequest:
    """Chat takes messages, the other routes take prompts."""
    if api != "chat":
        if request.messages is not None:
            raise ConfigError(f"dataset: expected prompts for --api {api}, got messages")
        return request
    if request.messages is not None:
        return request
    text = request.prompt
    if isinstance(text, list):
        if tokenizer is None:
            raise ConfigError(
                "dataset: expected --tokenizer to turn token ids into a chat message, got none"
            )
        text = tokenizer.decode(text)
    message = {"role": "user", "content": text}
    return BenchRequest(None, [message], request.output_len)


def _word_problems(settings: DatasetSettings) -> list[BenchRequest]:
    from diffulex.bench.evaluate import read_problems  # noqa: PLC0415 (only this data set)

    problems = read_problems(None)
    random.Random(f"bench serve/{settings.seed}").shuffle(problems)
    return [
        BenchRequest(problem.question, None, settings.output_len)
        for problem in problems[: settings.num_prompts]
    ]


def _task(settings: DatasetSettings, api: Api, tokenizer: Tokenizer | None) -> list[BenchRequest]:
    """The items of a task in an order of the seed, as `diffulex eval --endpoint` asks them."""
    name = settings.name.removeprefix(_TASK)
    tasks = read_tasks(name) if name.strip() else None
    if tasks is None or len(tasks) != 1:
        raise ConfigError(
            f"dataset: expected {_TASK}NAME with a task of `diffulex bench tasks`,"
            f" got {settings.name!r}"
        )
    (task,) = tasks
    items = task.items(None if settings.path is None else str(settings.path))
    if not items:
        raise ConfigError(f"dataset: expected items of {settings.name}, got none")
    random.Random(f"bench serve/{settings.seed}").shuffle(items)
    return [
        BenchRequest(
            *_asked(task, task.prompt(item), api, tokenizer),
            settings.output_len,
            tuple(task.until[:MAX_STOPS]),
        )
        for item in items[: settings.num_prompts]
    ]


def _asked(
    task: Task, text: str, api: Api, tokenizer: Tokenizer | None
) -> tuple[str | None, list[dict[str, Any]] | None]:
    """The prompt of an item, or its messages; ConfigError where it would have two templates, or none
    although it needs one."""
    messages = [{"role": "user", "content": text}]
    if api == "chat":
        marker = template_marker(text)
        if marker is not None:
            raise ConfigError(
                f"dataset: expected --api completions for {_TASK}{task.name}, whose prompts are"
                f" written with a template ({marker}), got chat"
            )
        return None, messages
    if not task.is_chat:
        return text, None
    if tokenizer is None:
        raise ConfigError(
            f"dataset: expected --api chat, or --tokenizer, for {_TASK}{task.name}, whose prompts"
            f" need the model's template, got {api}"
        )
    return str(tokenizer.render_chat(messages)), None


def _random(settings: DatasetSettings, tokenizer: Tokenizer | None) -> list[BenchRequest]:
    ids = drawable_ids(settings, tokenizer)
    rng = random.Random(f"bench serve/{settings.seed}")

    requests = []
    for _ in range(settings.num_prompts):
        length = varied_length(rng, settings.input_len, settings.range_ratio)
        prompt = rng.choices(ids, k=length)
        output_len = varied_length(rng, settings.output_len, settings.range_ratio)
        requests.append(BenchRequest(prompt, None, output_len))
    return requests


def varied_length(rng: random.Random, center: int, share: float) -> int:
    """A length between ``center * (1 - share)`` and ``center * (1 + share)``."""
    spread = int(center * share)
    return max(1, rng.randint(center - spread, center + spread))


def drawable_ids(settings: DatasetSettings, tokenizer: Tokenizer | None) -> list[int]:
    """Ids that prompts are drawn from: a range, or those of the tokenizer's ordinary tokens.

    Raises:
        ConfigError: there is neither, or the range is empty.
    """
    if settings.token_range is not None:
        low, high = settings.token_range
        if not 0 <= low < high:
            raise ConfigError(f"token_range: expected 0 <= low < high, got {low},{high}")
        return list(range(low, high))
    if tokenizer is None:
        raise ConfigError("dataset random: expected --tokenizer or --token-range, got neither")
    # Added tokens are markers of roles, ends and masks; a prompt of text has none of them.
    special = {*tokenizer.backend.all_special_ids, *tokenizer.backend.added_tokens_decoder}
    return sorted(set(tokenizer.backend.get_vocab().values()) - special)


def _jsonl(settings: DatasetSettings) -> list[BenchRequest]:
    path, text = _read_text(settings, "jsonl")
    requests = []
    # Not splitlines: a text may have U+2028, U+0085 and the like in the middle of a line.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            requests.append(_read_line(line, f"{path}:{number}", settings.output_len))
    if not requests:
        raise ConfigError(f"dataset: expected requests in {path}, got an empty file")
    return requests


def _read_line(line: str, where: str, default_len: int) -> BenchRequest:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"dataset: {where}: expected JSON, got {line[:80]!r}") from error
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise ConfigError(
            f"dataset: {where}: expected an object with prompt or messages, got {line[:80]!r}"
        )
    output_len = record.get("max_tokens", default_len)
    if not isinstance(output_len, int) or output_len < 1:
        raise ConfigError(f"dataset: {where}: expected max_tokens >= 1, got {output_len!r}")
    prompt, messages = record.get("prompt"), record.get("messages")
    if messages is None and not _is_prompt(prompt):
        raise ConfigError(f"dataset: {where}: expected a text or token ids, got {prompt!r:.80}")
    if messages is not None and not _is_conversation(messages):
        raise ConfigError(f"dataset: {where}: expected messages with roles, got {messages!r:.80}")
    _check_unicode(json.dumps(messages or prompt, ensure_ascii=False), where)
    return BenchRequest(prompt, messages, output_len)


def _check_unicode(text: str, where: str) -> None:
    """JSON can escape half of a surrogate pair; no request can carry it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ConfigError(
            f"dataset: {where}: expected text, got a lone surrogate {half}"
        ) from error


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and "role" in item for item in value)
    )


def _sharegpt(settings: DatasetSettings, tokenizer: Tokenizer | None) -> list[BenchRequest]:
    path, text = _read_text(settings, "sharegpt")
    try:
        conversations = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"dataset: expected JSON in {path}, got {error}") from error
    if not isinstance(conversations, list):
        raise ConfigError(f"dataset: expected a list of conversations in {path}")
    pairs = []
    for number, item in enumerate(conversations, start=1):
        pair = _first_turns(item)
        if pair is not None:
            _check_unicode(" ".join(pair), f"{path}: conversation {number}")
            pairs.append(pair)
    if not pairs:
        raise ConfigError(f"dataset: expected conversations of two turns in {path}, got none")
    random.Random(f"bench serve/{settings.seed}").shuffle(pairs)
    requests = []
    for question, answer in pairs[: settings.num_prompts]:
        # The reference answer says how long an answer is, if there is something to count with.
        output_len = settings.output_len
        if tokenizer is not None:
            output_len = max(1, len(tokenizer.encode(answer)))
        requests.append(BenchRequest(question, None, output_len))
    return requests


def _first_turns(item: Any) -> tuple[str, str] | None:
    turns = item.get("conversations", ()) if isinstance(item, Mapping) else ()
    values = [turn.get("value") for turn in turns if isinstance(turn, Mapping)][:_NUM_TURNS]
    texts = [value for value in values if isinstance(value, str) and value]
    return (texts[0], texts[1]) if len(texts) == _NUM_TURNS else None


def _read_text(settings: DatasetSettings, name: str) -> tuple[Path, str]:
    if settings.path is None:
        raise ConfigError(f"dataset {name}: expected --dataset-path FILE, got none")
    try:
        return settings.path, settings.path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"dataset: cannot read {settings.path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"dataset: expected UTF-8 in {settings.path}, got {error}") from error
