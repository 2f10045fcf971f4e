# SPDX-License-Identifier: Apache-2.0
"""Trajectories as JSON lines, one request a line; a name that ends in .zst is compressed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from diffulex.errors import ConfigError
from diffulex.trace.trajectory import Change, TraceBlock, TraceStep, Trajectory

if TYPE_CHECKING:
    from diffulex.checkpoint.tokenizer import Tokenizer

__all__ = ["TraceFile", "read_traces", "trace_record", "trajectory_of", "write_traces"]

FORMAT, VERSION = "diffulex-trajectory", 1
_LEVELS = ("blocks", "full")
_DIGITS = 6
#: In a stream of a server: before each object, and at the beginning of a line without one.
_EVENT, _COMMENT = "data: ", (":", "event: ")
#: Any of them is in every response and every event.
_ANSWER_KEYS = {"object", "event", "type", "trajectory"}
_KINDS: dict[str, type] = {
    "level": str,
    "req_id": int,
    "prompt_len": int,
    "mask_token_id": int,
    "block_size": int,
    "token_ids": list,
    "text": str,
    "completion_reason": str,
    "metrics": dict,
    "texts": dict,
    "specials": list,
    "tokens": list,
    "steps": list,
}


class _Output(Protocol):
    """A finished request, as far as its line goes."""

    @property
    def req_id(self) -> int: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def text(self) -> str: ...
    @property
    def completion_reason(self) -> str: ...
    @property
    def metrics(self) -> Any: ...
    @property
    def trajectory(self) -> Trajectory | None: ...


def trace_record(
    output: _Output,
    tokenizer: Tokenizer | None = None,
    *,
    question: str = "",
    model: str = "",
) -> dict[str, Any]:
    """The line of one finished request.

    Args:
        output: with a trajectory.
        tokenizer: gives the texts of tokens, so that the file can be read without it.
        question: shown above its replay.
        model: shown below it.

    Raises:
        ValueError: it has no trajectory.
    """
    trajectory = output.trajectory
    if trajectory is None:
        raise ValueError("trace: expected a request with a trajectory, got one without")
    used = set(output.token_ids)
    used.update(change.new for step in trajectory.steps for change in step.changes)
    used.discard(trajectory.mask_token_id)
    texts, specials = ({}, []) if tokenizer is None else _texts(tokenizer, sorted(used))
    metrics = output.metrics
    return {
        "format": FORMAT,
        "version": VERSION,
        "level": trajectory.level,
        "req_id": output.req_id,
        "model": model,
        "question": question,
        "prompt_len": trajectory.prompt_len,
        "mask_token_id": trajectory.mask_token_id,
        "block_size": trajectory.block_size,
        "token_ids": list(output.token_ids),
        "text": output.text,
        "completion_reason": output.completion_reason,
        "metrics": {
            "nfe": metrics.nfe,
            "completion_tokens": metrics.completion_tokens,
            "ttft_s": metrics.ttft_s,
            "decode_tps": metrics.decode_tps,
        },
        "texts": texts,
        "specials": specials,
        "tokens": [
            [t.position, t.step, _rounded(t.confidence), t.token, t.edits]
            for t in trajectory.tokens
        ],
        "steps": [_step_map(step) for step in trajectory.steps],
    }


def _texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[dict[str, str], list[int]]:
    """The text of each id, and the ids that stand for no text of an answer."""
    texts = {i: tokenizer.decode([i], skip_special_tokens=False) for i in token_ids}
    specials = [
        i for i in texts if texts[i] and not tokenizer.decode([i], skip_special_tokens=True)
    ]
    return {str(token): text for token, text in texts.items()}, specials


def _step_map(step: TraceStep) -> dict[str, Any]:
    values: dict[str, Any] = {
        "step": step.step,
        "seconds": round(step.seconds, _DIGITS),
        "prefill": step.is_prefill,
        "new_tokens": step.new_tokens,
        "settled": step.settled,
        "blocks": [list(block) for block in step.blocks],
    }
    if step.changes:
        values["changes"] = [[*change[:3], _rounded(change[3])] for change in step.changes]
    return values


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def trajectory_of(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a line.

    Raises:
        ValueError: it is none.
    """
    if record.get("format") != FORMAT or record.get("version") != VERSION:
        raise ValueError(f"expected {FORMAT} version {VERSION}, got something else")
    for name, kind in _KINDS.items():
        if not isinstance(record.get(name), kind):
            raise ValueError(f"{name}: expected {kind.__name__}, got {record.get(name)!r}")
    if record["level"] not in _LEVELS:
        raise ValueError(f"level: expected {' or '.join(_LEVELS)}, got {record['level']!r}")
    try:
        steps = tuple(_step(item, record) for item in record["steps"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"steps: expected steps with blocks and changes, got {error}") from error
    return Trajectory(
        record["level"],
        record["prompt_len"],
        record["mask_token_id"],
        record["block_size"],
        tuple(record["token_ids"]),
        steps,
    )


def _step(item: Mapping[str, Any], record: Mapping[str, Any]) -> TraceStep:
    changes = tuple(Change(*change) for change in item.get("changes", ()))
    for change in changes:
        if change.position < record["prompt_len"]:
            raise ValueError(
                f"steps: expected positions from {record['prompt_len']} on, got {change.position}"
            )
    return TraceStep(
        item["step"],
        item["seconds"],
        item["prefill"],
        item["new_tokens"],
        item["settled"],
        tuple(TraceBlock(*block) for block in item["blocks"]),
        changes,
    )


def _zstandard() -> Any:
    try:
        import zstandard  # noqa: PLC0415 (an optional dependency)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "trace: expected the package zstandard for a .zst file (pip install zstandard), got none"
        ) from error
    return zstandard


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix != ".zst":
        return path.open(mode, encoding="utf-8")
    return cast("IO[str]", _zstandard().open(path, f"{mode}t", encoding="utf-8"))


class TraceFile:
    """Takes lines as requests end. Lines follow those that an uncompressed file has already.

    Raises:
        ConfigError: a compressed file without the package for it, or a file that cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        try:
            self._file = _open(path, "w" if path.suffix == ".zst" else "a")
        except OSError as error:
            raise ConfigError(f"trace: cannot write {path}: {error.strerror}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds the line of one request."""
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_traces(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Adds lines to a file; ConfigError as for `TraceFile`."""
    with TraceFile(path) as file:
        for record in records:
            file.append(record)


def read_traces(path: str | Path) -> Iterator[tuple[dict[str, Any], Trajectory]]:
    """Every line of a file with its trajectory; a last line that was cut off is left out.

    The file may also be what a server sent: responses, or the events of a stream.

    Raises:
        ConfigError: the file cannot be read, or a line is no trajectory.
    """
    path = Path(path)
    try:
        with _open(path, "r") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(_EVENT).strip()
                if number == 1 and text == "{":  # an object over several lines
                    text += file.read()
                elif not text or text == "[DONE]" or text.startswith(_COMMENT):
                    continue
                elif not line.endswith("\n") and not _is_object(text):
                    return
                yield from _parsed(path, number, text)
    except OSError as error:
        raise ConfigError(f"trace: cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected JSON lines in UTF-8, got {error.reason}") from error


def _is_object(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _parsed(path: Path, number: int, text: str) -> list[tuple[dict[str, Any], Trajectory]]:
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, got {type(found).__name__}")
        return [(record, trajectory_of(record)) for record in _records(found)]
    except ValueError as error:
        raise ConfigError(f"{path}:{number}: {error}") from error


def _records(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a line: the line itself, or what a response or an event of a stream carries."""
    if "format" in found or not _ANSWER_KEYS & found.keys():
        return [found]
    parts = [found, *_maps([found.get("response")]), *_maps(found.get("choices"))]
    parts += _maps([part.get("diffulex") for part in parts])
    model = found.get("model") or ""
    return [{**record, "model": model} for record in _maps([p.get("trajectory") for p in parts])]


def _maps(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
