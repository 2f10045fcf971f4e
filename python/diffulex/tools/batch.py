# SPDX-License-Identifier: Apache-2.0
"""`diffulex batch`: a file of prompts in, a folder of answers out, on as many replicas as are asked for.

Lines are requests of the OpenAI batch format, or what is short for one: `{"prompt": …}` and
`{"messages": …}` with sampling fields beside. All of them go through the application of the server, as
those of `run-batch` do. Answers are written when they are there, so that an interrupted run is resumed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TextIO

from diffulex.config.flags import (
    Parser,
    UsageError,
    add_config_flag,
    add_engine_flags,
    check_single_model,
    positive_integer,
)
from diffulex.config.table import CONFIG_TABLE
from diffulex.errors import ConfigError
from diffulex.server.args import INTERNAL_ENGINE_KEYS, ServerArgs
from diffulex.server.requirements import check_packages
from diffulex.tools.run_batch import BatchLine, answer_lines, parse_line, read_lines

__all__ = ["add_folder_batch_flags", "answered_ids", "read_prompt", "run_folder_batch"]

#: Lines whose answers are in one file.
_SHARD_LINES = 10_000
_STOP_S = 10.0
_OK = 200
#: The first status code that is not the request's own fault.
_SERVER_FAILED = 500
_COMMON = (
    *("words", "input", "output", "executor", "resume", "config", "device", "dtype", "revision"),
    *("data_parallel_size", "tensor_parallel_size", "max_num_reqs", "ray_address"),
)
#: What `--executor` says of the key of the engine.
_EXECUTORS = {"local": "mp", "ray": "ray"}
_PROMPTS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


def add_folder_batch_flags(parser: Parser) -> None:
    """Files, model and engine."""
    parser.add_argument("words", nargs="*", metavar="MODEL", help="as --model")
    add_config_flag(parser)
    parser.shorten_help((*_COMMON, "model"))
    parser.add_argument("-i", "--input", metavar="FILE", help="prompts, one per line; - stdin")
    parser.add_argument("-o", "--output", metavar="DIR", help="folder of the answers")
    parser.add_argument(
        "--executor", choices=tuple(_EXECUTORS), default="local",
        help="where the replicas are: on this host, or in a Ray cluster [local]",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true", help="keep the answers that are there, and add the others"
    )
    parser.add_argument(
        "--shard-lines", type=positive_integer, default=_SHARD_LINES, metavar="N",
        help=f"lines whose answers are in one file [{_SHARD_LINES}]",
    )  # fmt: skip
    add_engine_flags(parser, without=(*INTERNAL_ENGINE_KEYS[1:], "distributed_executor"))


def run_folder_batch(options: argparse.Namespace) -> int:
    """Answers every line of the input file; 0 if all of them were answered, else 1.

    What an earlier run left as refused counts as it did then.

    Raises:
        ConfigError: the input is no file of requests, or the output is no folder for their answers.
    """
    check_packages()
    check_single_model(options)
    for name in ("input", "output"):
        if getattr(options, name) is None:
            raise UsageError(f"command line: expected --{name}, got none")
    lines = read_lines(options.input, "--input", read_prompt)
    folder = _folder(Path(options.output), is_resumed=options.resume)
    done = answered_ids(folder)
    left = [line for line in lines if line.custom_id not in done]
    num_refused = sum(done.get(line.custom_id, _OK) != _OK for line in lines)
    given = {name: value for name, value in vars(options).items() if name in CONFIG_TABLE}
    executor = _EXECUTORS[options.executor]
    # A line may be many requests of the engine; what is in flight is bounded by lines.
    args = ServerArgs(**given, distributed_executor=executor, max_queue_size=0)
    args.check()
    num_failed = 0
    if left:
        with _shards(folder, options.shard_lines) as output:
            num_failed = _answer(args, left, output)
    kept = f", {len(lines) - len(left)} kept" if options.resume else ""
    if num_refused:
        kept += f" of which {num_refused} failed"
    print(f"[{len(left) - num_failed} answered, {num_failed} failed{kept}]", file=sys.stderr)
    return 1 if num_failed or num_refused else 0


def read_prompt(content: str, where: str, number: int) -> BatchLine:
    """The request of a line.

    Args:
        content: of the line.
        where: it stands, for errors.
        number: of the line, which names a prompt that has no `custom_id`.

    Raises:
        ConfigError: the line is none.
    """
    try:
        item = json.loads(content)
    except ValueError:
        item = None
    if not isinstance(item, dict) or "body" in item or "url" in item:
        return parse_line(content, where, number)
    given = [name for name in _PROMPTS if name in item]
    if len(given) != 1:
        raise ConfigError(
            f"{where}: expected prompt or messages, got {', '.join(item) or 'neither'}"
        )
    custom_id = item.pop("custom_id", f"line-{number}")
    request = {"custom_id": custom_id, "url": _PROMPTS[given[0]], "body": item}
    return parse_line(json.dumps(request), where, number)


def _folder(path: Path, *, is_resumed: bool) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        has_answers = next(path.glob("answers-*.jsonl"), None) is not None
    except OSError as error:
        raise ConfigError(f"--output: cannot write {path}: {error.strerror}") from error
    if has_answers and not is_resumed:
        raise ConfigError(f"--output: expected a folder without answers (or --resume), got {path}")
    return path


def answered_ids(folder: Path) -> dict[str, int]:
    """Ids of the requests whose answers are in a folder, with their status codes.

    Lines that were cut off, or say that the server failed, are taken out: they are to be asked again.

    Raises:
        ConfigError: a file is none of answers.
    """
    found: dict[str, int] = {}
    for path in sorted(folder.glob("answers-*.jsonl")):
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with path.open("r+b") as file:
                file.truncate(whole)
        lines = content[:whole].splitlines(keepends=True)
        kept: list[bytes] = []
        for number, text in enumerate(lines, 1):
            custom_id, status = _outcome(text, f"{path}: line {number}")
            if status < _SERVER_FAILED:
                found[custom_id] = status
                kept.append(text)
        if len(kept) < len(lines):
            # No answer is lost if this is interrupted.
            new = path.with_suffix(".tmp")
            new.write_bytes(b"".join(kept))
            new.replace(path)
    return found


def _outcome(text: bytes, where: str) -> tuple[str, int]:
    """Id and status code of an answer."""
    try:
        item = json.loads(text)
        return str(item["custom_id"]), int(item["response"]["status_code"])
    except (ValueError, KeyError, TypeError) as error:
        shown = text[:80].decode(errors="replace")
        raise ConfigError(f"{where}: expected an answer, got {shown!r}") from error


class _Shards:
    """Writes lines into files of so many; part of `TextIO`."""

    def __init__(self, folder: Path, num_lines: int) -> None:
        names = [path.stem.rpartition("-")[2] for path in folder.glob("answers-*.jsonl")]
        self._next = 1 + max((int(name) for name in names if name.isdigit()), default=-1)
        self._folder = folder
        self._num_lines = num_lines
        self._count = 0
        self._file: TextIO | None = None

    def write(self, text: str) -> None:
        """Adds a line."""
        if self._file is None or self._count == self._num_lines:
            self.close()
            path = self._folder / f"answers-{self._next:05d}.jsonl"
            self._file = path.open("x", encoding="utf-8")
            self._next, self._count = self._next + 1, 0
        self._file.write(text)
        self._count += 1

    def flush(self) -> None:
        """Nothing of it is lost when this process is."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Closes the last file."""
        if self._file is not None:
            self._file.close()


@contextmanager
def _shards(folder: Path, num_lines: int) -> Iterator[_Shards]:
    shards = _Shards(folder, num_lines)
    try:
        yield shards
    finally:
        shards.close()


def _answer(args: ServerArgs, lines: Sequence[BatchLine], output: _Shards) -> int:
    """The number of failures."""
    from diffulex.server.http.api_server import create_app  # noqa: PLC0415 (optional packages)
    from diffulex.server.launch import in_process_frontend  # noqa: PLC0415
    from diffulex.server.replicas.settings import has_replicas  # noqa: PLC0415

    options: dict[str, Any] = {"disable_metrics": True, "accept_any_model": True}
    with ExitStack() as stack:
        if not has_replicas(args):
            app = create_app(in_process_frontend(args), **options)
        else:
            frontend, group = _replicas(args, stack)
            app = create_app(frontend, **options)
            app.router.lifespan_context = _watched(app.router.lifespan_context, group)
        return asyncio.run(answer_lines(app, lines, output))


def _replicas(args: ServerArgs, stack: ExitStack) -> tuple[Any, Any]:
    """The frontend of replicas that serve, and what restarts those that are lost."""
    from diffulex.server.launch import (  # noqa: PLC0415 (optional packages)
        ipc_directory,
        load_tokenizer,
        remove_ipc_directory,
        replica_frontend,
        worker_settings,
    )
    from diffulex.server.replicas import launch as replicas  # noqa: PLC0415

    tokenizer, settings = load_tokenizer(args), worker_settings(args)
    directory = ipc_directory()
    stack.callback(remove_ipc_directory, directory)
    cluster = replicas.joined_cluster(settings)
    frontend = replica_frontend(args, tokenizer, directory, cluster, stack)

    def on_ready(info: Mapping[str, Any]) -> None:
        if info.get("mask_token_id") is not None:
            tokenizer.protect_mask(info["mask_token_id"])

    def on_fatal(reason: str) -> None:
        print(f"diffulex batch: {reason}", file=sys.stderr, flush=True)

    group = replicas.make_replica_group(
        *(args, frontend, settings, None, directory, on_ready, on_fatal, cluster)
    )
    stack.callback(group.stop_backends, _STOP_S)
    group.start_backends()
    group.wait_ready()
    return frontend, group


def _watched(lifespan: Any, group: Any) -> Any:
    """The life of an application, during which lost replicas are started again."""

    @asynccontextmanager
    async def watched(app: Any) -> Any:
        async with lifespan(app) as state:
            group.watch()
            try:
                yield state
            finally:
                await group.stop()

    return watched
