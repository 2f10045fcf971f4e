# SPDX-License-Identifier: Apache-2.0
"""`diffulex run-batch`: a file of OpenAI requests in, a file of answers out.

Every line goes through the application of the server, without a socket, so that it means what it means
over HTTP: the same fields, limits and errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

from diffulex.config.flags import (
    Parser,
    UsageError,
    add_config_flag,
    add_engine_flags,
    check_single_model,
)
from diffulex.config.table import CONFIG_TABLE
from diffulex.errors import ConfigError
from diffulex.server.args import INTERNAL_ENGINE_KEYS, ServerArgs
from diffulex.server.requirements import check_packages

__all__ = [
    "BatchLine",
    "add_batch_flags",
    "answer_lines",
    "parse_line",
    "read_lines",
    "run_batch",
]

_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
#: Lines in the hands of the engine; the others wait in the file.
_IN_FLIGHT = 256
_OK = 200
_COMMON = (
    *("words", "input_file", "output_file", "config", "device", "dtype", "revision"),
    *("decoding_strategy", "block_size", "buffer_size", "accept_threshold", "max_num_reqs"),
)


class BatchLine(NamedTuple):
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


class LineOutput(Protocol):
    """What answers are written to."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> None: ...


def add_batch_flags(parser: Parser) -> None:
    """Files, model and engine."""
    parser.add_argument("words", nargs="*", metavar="MODEL", help="as --model")
    add_config_flag(parser)
    parser.shorten_help((*_COMMON, "model"))
    parser.add_argument(
        "-i", "--input-file", metavar="FILE", help="requests, one per line; - stdin"
    )
    parser.add_argument(
        "-o", "--output-file", default="-", metavar="FILE", help="answers [standard output]"
    )
    add_engine_flags(parser, without=INTERNAL_ENGINE_KEYS[1:])


def run_batch(options: argparse.Namespace) -> int:
    """Answers every line of the input file; 0 if all of them were answered, else 1.

    Raises:
        ConfigError: the input is no file of requests, or the output cannot be written.
    """
    check_packages()
    check_single_model(options)
    if options.input_file is None:
        raise UsageError("command line: expected --input-file, got none")
    lines = read_lines(options.input_file, "--input-file", parse_line)
    given = {name: value for name, value in vars(options).items() if name in CONFIG_TABLE}
    # A line may be many requests of the engine; `_IN_FLIGHT` bounds the lines.
    args = ServerArgs(**given, max_queue_size=0)
    args.check()
    with _opened(options.output_file) as output:
        num_failed = asyncio.run(_run(args, lines, output))
    print(f"[{len(lines) - num_failed} answered, {num_failed} failed]", file=sys.stderr)
    return 1 if num_failed else 0


def read_lines(
    name: str, flag: str, parse: Callable[[str, str, int], BatchLine]
) -> list[BatchLine]:
    """The requests of a file, all of which are looked at before anything is loaded.

    Args:
        name: of the file; `-`: standard input.
        flag: that gave it.
        parse: reads a line, given its content, where it stands and its number.

    Raises:
        ConfigError: the file cannot be read, or a line is no request.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise ConfigError(f"{flag}: cannot read {name}: {reason}") from error
    lines: list[BatchLine] = []
    seen: set[str] = set()
    for number, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        line = parse(content, f"{name}: line {number}", number)
        if line.custom_id in seen:
            raise ConfigError(
                f"{name}: line {number}: expected another custom_id, got {line.custom_id!r} again"
            )
        seen.add(line.custom_id)
        lines.append(line)
    if not lines:
        raise ConfigError(f"{flag}: expected a request in {name}, got none")
    return lines


def parse_line(content: str, where: str, number: int) -> BatchLine:
    """The request of a line; ConfigError for none."""
    del number  # a line has its own name
    try:
        item = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"{where}: expected a JSON object, got {content[:80]!r}") from error
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {content[:80]!r}")
    custom_id, url, body = item.get("custom_id"), item.get("url"), item.get("body")
    if not isinstance(custom_id, str):
        raise ConfigError(f"{where}: expected a text as custom_id, got {custom_id!r}")
    if item.get("method", "POST") != "POST":
        raise ConfigError(f"{where}: expected the method POST, got {item['method']!r}")
    if url not in _URLS:
        raise ConfigError(f"{where}: expected a url of {', '.join(_URLS)}, got {url!r}")
    if not isinstance(body, dict):
        raise ConfigError(f"{where}: expected an object as body, got {body!r}")
    if body.get("stream"):
        raise ConfigError(
            f"{where}: expected a request without stream, got stream={body['stream']!r}"
        )
    return BatchLine(custom_id, url, body)


@contextmanager
def _opened(name: str) -> Iterator[TextIO]:
    if name == "-":
        yield sys.stdout
        return
    try:
        file = Path(name).open("w", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"--output-file: cannot write {name}: {error.strerror}") from error
    with file:
        yield file


async def _run(args: ServerArgs, lines: Sequence[BatchLine], output: TextIO) -> int:
    from diffulex.server.http.api_server import create_app  # noqa: PLC0415 (optional packages)
    from diffulex.server.launch import in_process_frontend  # noqa: PLC0415

    app = create_app(in_process_frontend(args), disable_metrics=True, accept_any_model=True)
    return await answer_lines(app, lines, output)


async def answer_lines(app: Any, lines: Sequence[BatchLine], output: LineOutput) -> int:
    """Answers the lines and writes each answer when it is there; the number of failures.

    Args:
        app: an application of `create_app`; it is started and stopped here.
        lines: requests.
        output: receives one JSON object per line, in the order in which they were answered.
    """
    free = asyncio.Semaphore(_IN_FLIGHT)

    async def answer(number: int, line: BatchLine) -> bool:
        async with free:
            status, body = await _post(app, line.url, line.body)
        request_id = body.get("id") if isinstance(body, dict) else None
        record = {
            "id": f"batch_req_{number}",
            "custom_id": line.custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None,
        }
        output.write(json.dumps(record) + "\n")
        output.flush()
        return status == _OK

    async with app.router.lifespan_context(app):
        done = await asyncio.gather(*(answer(number, line) for number, line in enumerate(lines, 1)))
    return done.count(False)


async def _post(app: Any, path: str, body: Any) -> tuple[int, Any]:
    """Status and body of the application's answer to a request."""
    content = json.dumps(body).encode()
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 0),
    }
    unread = [{"type": "http.request", "body": content, "more_body": False}]
    status, pieces = 0, []
    is_over = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await is_over.wait()  # this client stays until the answer is complete
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    finally:
        is_over.set()
    return status, json.loads(b"".join(pieces))
