# SPDX-License-Identifier: Apache-2.0
"""Logging of the package.

Importing changes no global state: module loggers have no handlers and propagate, the package
logger holds a NullHandler. Applications call `configure` once.
"""

from __future__ import annotations

import json as _json
import logging
import logging.handlers
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from diffulex.env import get_choice, get_flag, get_text
from diffulex.errors import ConfigError

__all__ = [
    "LogSettings",
    "LoggerMixin",
    "configure",
    "format_duration",
    "get_logger",
    "is_json_line",
    "lead_ranks",
    "log_prompt",
    "log_settings",
    "logged_to",
    "name_process",
    "part_named",
    "prompt_to_log",
    "setup_logger",
    "success",
    "warn_once",
]

_ROOT = "diffulex"
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.DEBUG: "\x1b[2m"}
_FILE_BYTES = 64 << 20
_FILE_COUNT = 3
PROMPT_CHARS = 200
# What is no `extra`; uvicorn repeats its messages with terminal codes.
_RECORD_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"}

logging.getLogger(_ROOT).addHandler(logging.NullHandler())

_warned: set[tuple[str, str]] = set()


class _Process:
    """Which of several processes this one is."""

    name = ""
    rank = 0
    #: Groups of ranks of which this process is the first.
    num_groups = 0


#: What the running task looks after; it stands for the name of the process.
_part: ContextVar[str] = ContextVar("diffulex_log_part", default="")


def get_logger(name: str = _ROOT) -> logging.Logger:
    """Logger of a module; it has no handlers."""
    return logging.getLogger(name)


class LoggerMixin:
    """Gives a class the logger of its module."""

    @property
    def logger(self) -> logging.Logger:
        """The logger of the module of the class."""
        return get_logger(type(self).__module__)


def name_process(name: str, rank: int = 0) -> None:
    """Names this process in every line that it logs; to be called before `configure`.

    Args:
        name: such as ``replica 1``; empty: none.
        rank: among processes that do the same work; others than the first log warnings and errors
            alone, unless DIFFULEX_LOG_ALL_RANKS is set.
    """
    _Process.name, _Process.rank = name, rank


def lead_ranks(num_groups: int) -> None:
    """Counts groups of ranks of which this process is the first (a negative number: was); its text
    lines say so while there are any. Those of the other ranks are named by whoever passes them on."""
    _Process.num_groups += num_groups


@contextmanager
def part_named(name: str) -> Iterator[None]:
    """Names a part of this process in every line that the block, or tasks it starts, log."""
    token = _part.set(name)
    try:
        yield
    finally:
        _part.reset(token)


def _place() -> str:
    return _part.get() or _Process.name


class _TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO    engine message`, `engine[replica 1]` in a named process and
    `engine[rank 0]` in the first one of several ranks; colour never enters the record."""

    def __init__(self, color: bool) -> None:
        super().__init__()
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        component = record.name.removeprefix(_ROOT + ".")
        places = [_place(), "rank 0" if _Process.num_groups else ""]
        if any(places):
            component = f"{component}[{', '.join(filter(None, places))}]"
        head = f"{stamp}.{int(record.msecs):03d} {record.levelname:<7} {component}"
        color = _COLORS.get(record.levelno, "") if self._color else ""
        if color:
            head = f"{color}{head}\x1b[0m"
        text = f"{head} {record.getMessage()}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return text


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; `extra` fields become keys."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "ts": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "rank": _Process.rank,
            "process": _place(),
            "pid": record.process,
            "msg": record.getMessage(),
        }
        entry.update({k: v for k, v in vars(record).items() if k not in _RECORD_FIELDS})
        if record.exc_info:
            entry["exc"] = self.formatException(record.exc_info)
        return _json.dumps(entry, default=str)


def is_json_line(text: str) -> bool:
    """Whether a line is one of this log in JSON."""
    return text.startswith('{"ts": ') and text.endswith("}")


class _OwnedHandler:
    """The handlers `configure` installed, so that a second call replaces them."""

    handlers: tuple[logging.Handler, ...] = ()
    settings: LogSettings | None = None


class LogSettings(NamedTuple):
    """How this process logs, for its children: level and whether in JSON."""

    level: str
    json: bool


def log_settings() -> LogSettings | None:
    """What `configure` chose; None where it was not called."""
    return _OwnedHandler.settings


def configure(
    level: str | None = None,
    file: str | None = None,
    json: bool | None = None,
    color: Literal["auto", "always", "never"] = "auto",
) -> None:
    """Installs one stderr handler (and a rotating file) on the package logger.

    For applications only. None takes the value of DIFFULEX_LOG_LEVEL, DIFFULEX_LOG_FILE and
    DIFFULEX_LOG_FORMAT; an empty `file` is none. A second call replaces the handlers of the first.

    Raises:
        ConfigError: unknown level or colour mode.
    """
    name = (level if level is not None else get_choice("DIFFULEX_LOG_LEVEL")).lower()
    if name not in _LEVELS:
        raise ConfigError(f"log level: expected one of {', '.join(_LEVELS)}, got {level!r}")
    if color not in ("auto", "always", "never"):
        raise ConfigError(f"log color: expected auto, always or never, got {color!r}")
    path = file if file is not None else get_text("DIFFULEX_LOG_FILE")
    as_json = json if json is not None else get_choice("DIFFULEX_LOG_FORMAT") == "json"
    has_color = color == "always" or (
        color == "auto" and sys.stderr.isatty() and not get_text("NO_COLOR")
    )
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(_JsonFormatter() if as_json else _TextFormatter(has_color))
    handlers: list[logging.Handler] = [console]
    if path:
        rotating = logging.handlers.RotatingFileHandler(
            path, maxBytes=_FILE_BYTES, backupCount=_FILE_COUNT, encoding="utf-8"
        )
        rotating.setFormatter(_JsonFormatter() if as_json else _TextFormatter(False))
        handlers.append(rotating)
    logger = logging.getLogger(_ROOT)
    for old in _OwnedHandler.handlers:
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        logger.addHandler(handler)
    _OwnedHandler.handlers = tuple(handlers)
    _OwnedHandler.settings = LogSettings(name, as_json)
    is_quiet = _Process.rank > 0 and not get_flag("DIFFULEX_LOG_ALL_RANKS")
    logger.setLevel(max(_LEVELS[name], logging.WARNING) if is_quiet else _LEVELS[name])


@contextmanager
def logged_to(path: str | None) -> Iterator[None]:
    """Adds a file to what the package logs in the block, after what it holds; None adds nothing."""
    if path is None:
        yield
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_TextFormatter(False))
    logger = logging.getLogger(_ROOT)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def setup_logger(
    name: str = _ROOT,
    level: int | str = logging.INFO,
    log_file: str | None = None,
    use_rich: bool = True,
) -> logging.Logger:
    """`configure` under its documented older name; returns the logger `name`.

    `use_rich` False turns colour off.
    """
    text = logging.getLevelName(level) if isinstance(level, int) else level
    configure(str(text).lower(), file=log_file, color="auto" if use_rich else "never")
    return get_logger(name)


def success(logger: logging.Logger, message: str, *args: object) -> None:
    """Logs the good end of something long, at INFO with `event=success`."""
    logger.info(message, *args, extra={"event": "success"})


def warn_once(logger: logging.Logger, key: str, message: str, *args: object) -> None:
    """Logs a warning the first time `key` is used with this logger in this process."""
    if (logger.name, key) in _warned:
        return
    _warned.add((logger.name, key))
    logger.warning(message, *args)


def log_prompt(logger: logging.Logger, what: str, prompt: Callable[[], object]) -> None:
    """Logs the start of a prompt at DEBUG, where DIFFULEX_LOG_PROMPTS is set; else never makes it."""
    text = prompt_to_log(logger, prompt)
    if text is not None:
        logger.debug("%s prompt=%r", what, text)


def prompt_to_log(logger: logging.Logger, prompt: Callable[[], object]) -> str | None:
    """What `log_prompt` logs, for who must not fail where it is logged; None: nothing."""
    if not (logger.isEnabledFor(logging.DEBUG) and get_flag("DIFFULEX_LOG_PROMPTS")):
        return None
    return str(prompt())[:PROMPT_CHARS]


def format_duration(seconds: float | None) -> str:
    """`1h02m03s`, `2m03s`, `3s`, or `?` where unknown."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return "?"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02d}m{secs:02d}s"
    return f"{minutes}m{secs:02d}s" if minutes else f"{secs}s"
