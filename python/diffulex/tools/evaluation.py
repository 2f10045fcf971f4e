# SPDX-License-Identifier: Apache-2.0
"""`diffulex eval`: accuracy and speed of one model, or of every model of a zoo."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from diffulex.config.flags import (
    Parser,
    check_single_model,
    engine_kwargs,
    integers,
    numbers,
    positive_integer,
    some,
)
from diffulex.errors import ConfigError
from diffulex.tools.request_flags import (
    add_engine_and_sampling_flags,
    add_words,
    sampling_params,
)

__all__ = ["add_eval_flags", "evaluate"]

#: Where a checkout has its models, one per decoding strategy.
_ZOO_DIR = "examples/zoo"
#: Keys of the table that `eval` takes as lists.
_SWEPT = ("buffer_size", "accept_threshold")


def add_eval_flags(evaluate: Parser) -> None:
    """What is asked, where reports go, and how answers are decoded."""
    add_words(evaluate, "MODEL", "as --model")
    evaluate.add_argument(
        "--data",
        metavar="FILE",
        help="JSON lines with question and answer, the format of GSM8K [held-out set]",
    )
    evaluate.add_argument("--limit", type=positive_integer, help="only the first problems")
    evaluate.add_argument(
        "--batch", type=positive_integer, default=32, help="problems decoded together [32]"
    )
    evaluate.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write a report, .json or .md; may be given more than once",
    )
    evaluate.add_argument(
        "--zoo",
        nargs="?",
        const=_ZOO_DIR,
        metavar="DIR",
        help=f"every model of a zoo, each under its own strategy [{_ZOO_DIR}]",
    )
    evaluate.add_argument(
        "--output-dir", metavar="DIR", help="with --zoo: write zoo_results.{json,md,svg} there"
    )
    evaluate.add_argument(
        "--buffer-size", type=some(integers), metavar="N[,N]", help="one run per value"
    )
    evaluate.add_argument(
        "--accept-threshold", type=some(numbers), metavar="T[,T]", help="one run per value"
    )
    add_engine_and_sampling_flags(evaluate, without=(*_SWEPT, "max_num_reqs"))


def evaluate(options: argparse.Namespace) -> int:
    """Asks every problem, prints the table and writes the reports; the exit code."""
    from diffulex.bench.evaluate import Setting, run_evaluation  # noqa: PLC0415 (slow to import)

    check_single_model(options)
    kwargs = {**engine_kwargs(options, without=_SWEPT), "max_num_reqs": options.batch}
    if options.zoo is not None:
        return _eval_zoo(options, kwargs)
    if options.output_dir is not None:
        raise ConfigError("--output-dir: expected --zoo with it, got none; use --output")
    run_evaluation(
        kwargs,
        settings=[
            Setting(buffer_size, threshold)
            for buffer_size in options.buffer_size or (None,)
            for threshold in options.accept_threshold or (None,)
        ],
        sampling_params=sampling_params(options),
        data=options.data,
        limit=options.limit,
        outputs=options.output,
        show=lambda report: print(report.to_text(), flush=True),
        command="diffulex " + " ".join(sys.argv[1:]),
    )
    return 0


def _eval_zoo(options: argparse.Namespace, kwargs: dict[str, Any]) -> int:
    from diffulex.bench.zoo import run_zoo  # noqa: PLC0415 (slow to import)

    given = [
        "--" + name.replace("_", "-")
        for name in ("buffer_size", "accept_threshold", "data", "output")
        if getattr(options, name)
    ]
    if kwargs.pop("model", None) is not None:
        given.append("--model")
    if given:
        raise ConfigError(f"--zoo: expected the settings of its zoo.json, got {', '.join(given)}")
    run_zoo(
        Path(options.zoo),
        output_dir=None if options.output_dir is None else Path(options.output_dir),
        engine_kwargs=kwargs,
        sampling_params=sampling_params(options),
        limit=options.limit,
        show=lambda report: print(report.to_text(), flush=True),
        command="diffulex " + " ".join(sys.argv[1:]),
    )
    return 0
