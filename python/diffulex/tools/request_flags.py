# SPDX-License-Identifier: Apache-2.0
"""Flags that say how a request is decoded, and the words of a command line that name the model."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffulex
from diffulex.checkpoint.resolve import DEMO, resolve_model
from diffulex.config.flags import (
    Parser,
    add_config_flag,
    add_engine_flags,
    engine_kwargs,
    integer,
    integers,
    positive_integer,
    seconds,
)
from diffulex.config.sampling_params import TRAJECTORY_LEVELS
from diffulex.interruption import import_at_once

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex import Diffulex, SamplingParams

__all__ = [
    "FRAME_DELAY",
    "add_chat_flags",
    "add_engine_and_sampling_flags",
    "add_generate_flags",
    "add_words",
    "is_model",
    "open_engine",
    "sampling_params",
]

#: Seconds between redrawn frames on a terminal.
FRAME_DELAY = 0.2
_DEFAULT_MAX_TOKENS = 512
#: What most runs need, in the help of one screen.
_COMMON = (
    *(
        "words",
        "model",
        "prompt",
        "prompts_file",
        "raw",
        "system",
        "template",
        "config",
        "n",
        "json",
    ),
    *("logprobs", "show_denoising", "max_tokens", "stop", "temperature", "top_p", "top_k", "seed"),
    *("device", "dtype", "decoding_strategy", "block_size", "buffer_size", "accept_threshold"),
    *("data", "limit", "batch", "output", "zoo"),
)


def add_generate_flags(parser: Parser) -> None:
    """The flags of `generate`."""
    add_words(parser, "[MODEL] PROMPT", "PROMPT `-`, or none: standard input")
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt, as an option")
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="a prompt per line, or per object of a .jsonl; - is standard input",
    )
    parser.add_argument(
        "--n", type=positive_integer, metavar="N", default=1, help="answers per prompt [1]"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per answer and line"
    )
    parser.add_argument(
        "--logprobs", type=integer, metavar="N", help="log-probabilities, and of N likeliest tokens"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="add a line per answer to FILE: in which order it was written, for diffulex trace",
    )
    parser.add_argument(
        "--trace-level",
        choices=TRAJECTORY_LEVELS[1:],
        help="steps and their blocks alone, or every change of a position too [full]",
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help="the answer with gaps: <mask> is a token to fill in, <mask:8> are eight",
    )
    _add_output_flags(parser)
    add_engine_and_sampling_flags(parser)


def add_chat_flags(parser: Parser) -> None:
    """The flags of `chat`."""
    add_words(parser, "MODEL", "as --model")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    _add_output_flags(parser)
    add_engine_and_sampling_flags(parser)


def add_words(parser: Parser, metavar: str, text: str) -> None:
    """The words of a command, its config file and its short help."""
    parser.add_argument("words", nargs="*", metavar=metavar, help=text)
    add_config_flag(parser)
    parser.shorten_help(_COMMON)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    """How answers are shown."""
    parser.add_argument(
        "--show-denoising", action="store_true", help="redraw the blocks being denoised"
    )
    parser.add_argument(
        "--frame-delay",
        type=seconds,
        metavar="SECONDS",
        help=f"pause after a redrawn frame, at most 10 [{FRAME_DELAY} in a terminal]",
    )


def add_engine_and_sampling_flags(
    parser: argparse.ArgumentParser, without: Collection[str] = ()
) -> None:
    """The parameters of a request, then the keys of the engine."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=positive_integer,
        metavar="N",
        default=_DEFAULT_MAX_TOKENS,
        help=f"generated tokens at most [{_DEFAULT_MAX_TOKENS}, or what fits]",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text that ends the answer; may be given more than once",
    )
    group.add_argument(
        "--max-nfe", type=positive_integer, metavar="N", help="forwards of a request [no limit]"
    )
    group.add_argument(
        "--max-repetition-run",
        type=positive_integer,
        metavar="N",
        help="equal tokens that end the answer",
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at stop ids")
    group.add_argument(
        "--min-tokens",
        type=integer,
        metavar="N",
        default=0,
        help="tokens before the answer may end [0]",
    )
    group.add_argument(
        "--stop-token-ids", type=integers, default=(), metavar="ID[,ID]", help="further stop ids"
    )
    add_engine_flags(parser, without=without, sampling_group=group)


def sampling_params(options: argparse.Namespace, **changes: Any) -> SamplingParams:
    """The parameters that the flags give, with `changes`."""
    given: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "max_nfe": options.max_nfe,
        "max_repetition_run": options.max_repetition_run,
        "ignore_eos": options.ignore_eos,
        "stop_token_ids": options.stop_token_ids,
        "stop": options.stop,
        "min_tokens": options.min_tokens,
        "template_token_ids": getattr(options, "template_ids", ()),
    }
    if getattr(options, "trace", None) is not None:
        given["return_trajectory"] = options.trace_level or "full"
    return diffulex.SamplingParams(**{**given, **changes})


def is_model(word: str) -> bool:
    """Whether a word names a model that lies on this machine."""
    try:
        return word == DEMO or (Path(word).expanduser() / "config.json").is_file()
    except (OSError, RuntimeError, ValueError):  # too long for a path, no home, a zero byte
        return False


def _import_engine() -> None:
    """Imports what engines need, with the garbage collector off.

    Nothing that imports make is garbage, and looking for it takes a quarter of their time. What is there
    afterwards stays until the program ends, so that the collector never looks at it again.
    """
    if "torch" in sys.modules:
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import_at_once("diffulex.engine.engine")
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def open_engine(options: argparse.Namespace, **defaults: Any) -> Diffulex:
    """The engine of the flags; `defaults` hold where no flag was given.

    A terminal is told what takes so long, and loses the line once the engine is there.
    """
    kwargs = {"show_progress": True, **defaults, **engine_kwargs(options)}
    name = kwargs.get("model", DEMO)
    # Before anything slow is imported: a misspelt name should be answered at once.
    resolve_model(name, kwargs.get("revision"))
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        print(f"loading {name} ...", end="", file=sys.stderr, flush=True)
    try:
        _import_engine()
        return diffulex.Diffulex(**kwargs)
    finally:
        if is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
