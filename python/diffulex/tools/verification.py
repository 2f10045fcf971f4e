# SPDX-License-Identifier: Apache-2.0
"""`diffulex verify`: a checkpoint against transformers, its own files, and recorded answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diffulex.config.flags import (
    add_engine_flags,
    check_single_model,
    engine_kwargs,
)
from diffulex.interruption import ending_at_once
from diffulex.tools.request_flags import add_words
from diffulex.verify.names import RULES

if TYPE_CHECKING:
    import argparse

    from diffulex.config.flags import Parser

__all__ = ["add_verify_flags", "run_verify"]


def add_verify_flags(parser: Parser) -> None:
    """Which rules, and which answers they are compared with."""
    add_words(parser, "MODEL", "as --model")
    parser.add_argument(
        "--only",
        action="append",
        choices=RULES,
        metavar="RULE",
        help=f"test this rule; may be given more than once: {', '.join(RULES)} [all]",
    )
    parser.add_argument(
        "--fixture",
        metavar="FILE",
        help="recorded answers to compare with [diffulex_verify.safetensors of the model]",
    )
    parser.add_argument(
        "--record", metavar="FILE", help="write the answers of this run, as a fixture"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)


def run_verify(options: argparse.Namespace) -> int:
    """Prints a line per rule; 0 if all hold."""
    with ending_at_once():
        from diffulex.verify.run import verify  # noqa: PLC0415 (slow to import)

    check_single_model(options)
    settings = engine_kwargs(options)
    report = verify(
        settings.pop("model", "demo"),
        rules=options.only or RULES,
        fixture=None if options.fixture is None else Path(options.fixture),
        record_to=None if options.record is None else Path(options.record),
        show=None if options.json else lambda line: print(line, flush=True),
        **settings,
    )
    if options.json:
        print(report.to_json())
    else:
        failed = report.failed()
        print(f"failed: {', '.join(failed)}" if failed else "every rule holds")
    return 0 if report.is_passed else 1
