# SPDX-License-Identifier: Apache-2.0
"""The flags of the commands of ``diffulex edge``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diffulex.checkpoint.resolve import DEMO
from diffulex.config.flags import (
    add_engine_flags,
    integer,
    integers,
    number,
    positive_integer,
    some,
)
from diffulex.config.table import CONFIG_TABLE
from diffulex_edge.recipes import split_recipes

if TYPE_CHECKING:
    import argparse

    from diffulex.config.flags import Parser

__all__ = [
    "DECODING_KEYS", "add_bench_flags", "add_estimate_flags", "add_eval_flags", "add_export_flags",
    "add_verify_flags", "path_of",
]  # fmt: skip

_DEFAULT_BACKEND = "xnnpack"
#: Keys of strategies that no program has.
_FOREIGN = ("diffusion_gemma_", "dmax_", "penalty_", "token_merge_")
#: Engine keys that `eval` takes: how every row decodes.
DECODING_KEYS = {
    name: key
    for name, key in CONFIG_TABLE.items()
    if key.section == "decoding" and not name.startswith(_FOREIGN)
}


def add_eval_flags(parser: Parser) -> None:
    """What `eval` compares, and how everything decodes."""
    parser.add_argument("bundles", metavar="BUNDLE", nargs="*")
    parser.add_argument(
        "--model", help=f"the first row, by the engine [{DEMO} where no bundle is given]"
    )
    parser.add_argument(
        "--quant",
        type=split_recipes,
        metavar="RECIPE[,RECIPE]",
        help="exports of the model to evaluate [none,8da8w,8da4w where no bundle is given]",
    )
    parser.add_argument(
        "--data", metavar="FILE", help="JSON lines with question and answer [held-out set]"
    )
    parser.add_argument("--limit", type=positive_integer, help="only the first problems")
    parser.add_argument("--temperature", type=number, default=0.0, help="0 is greedy [0]")
    parser.add_argument("--top-p", type=number, help="share of the probability drawn from [all]")
    parser.add_argument("--seed", type=integer, help="of every request")
    parser.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write a report, .json, .md or .svg; may be given more than once",
    )
    parser.shorten_help((*vars(parser.parse_args([])), "output", "buffer_size"))
    add_engine_flags(parser, table=DECODING_KEYS)


def add_estimate_flags(parser: argparse.ArgumentParser) -> None:
    """What `estimate` counts."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default=DEMO, help=f"checkpoint with its configuration [{DEMO}]")
    source.add_argument("--preset", help="shape of a published model instead, such as llada-8b")
    parser.add_argument("--quant", default="8da4w", metavar="RECIPE", help="see export [8da4w]")
    parser.add_argument(
        "--max-model-len", type=positive_integer, help="tokens of prompt and answer [at most 2048]"
    )
    parser.add_argument("--budget", metavar="SIZE", help="also the longest length that fits: 2GB")


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    """What `export` writes, and how."""
    parser.add_argument("--model", default=DEMO, help=f"what to export [{DEMO}]")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="the new bundle")
    parser.add_argument(
        "--backend",
        default=_DEFAULT_BACKEND,
        help=f"see `diffulex edge backends` [{_DEFAULT_BACKEND}]",
    )
    parser.add_argument(
        "--quant",
        default="none",
        metavar="RECIPE",
        help="none, fp16, 8da8w (int8), 8da4w (int4), others [none]",
    )
    parser.add_argument(
        "--hqq", action="store_true", help="search for the scales of the weights: RECIPE,hqq"
    )
    parser.add_argument(
        "--max-model-len",
        type=positive_integer,
        help="tokens of prompt and answer [the model's positions, at most 2048]",
    )
    parser.add_argument(
        "--max-rows",
        type=positive_integer,
        default=256,
        help="rows of one call; a prompt that sees all of itself must fit [256]",
    )
    parser.add_argument(
        "--max-logits", type=positive_integer, default=64, help="logits rows of one call [64]"
    )
    _add_model_flags(parser)
    parser.add_argument(
        "--tolerance",
        type=number,
        help="error that the self-check allows, as a share of the largest logit [by recipe]",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a bundle that is there already"
    )
    parser.add_argument("--compute-unit", help="coreml: all, cpu_only, cpu_and_gpu, cpu_and_ne")
    parser.add_argument("--soc", help="qnn: the chip, for example SM8650")


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lora", metavar="DIR", help="merge this adapter into the weights")
    parser.add_argument("--model-name", help="registered family [found from the checkpoint]")
    parser.add_argument("--mask-token-id", type=integer, help="mask id [the checkpoint's]")
    parser.add_argument(
        "--calibration", metavar="FILE", help="static_int8: JSON lines with question and answer"
    )


def path_of(text: str | None) -> Path | None:
    """The path of an optional flag, with the home directory in place of ``~``."""
    return None if text is None else Path(text).expanduser()


def add_verify_flags(parser: argparse.ArgumentParser) -> None:
    """What `verify` compares, and how closely."""
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("--reference", required=True, help="the checkpoint that was exported")
    parser.add_argument("--inputs", type=positive_integer, default=4, help="random inputs [4]")
    parser.add_argument(
        "--tolerance",
        type=number,
        help="error that is allowed, as a share of the largest logit [1e-4; by recipe]",
    )
    _add_model_flags(parser)


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """What `bench` times."""
    parser.add_argument("bundles", metavar="BUNDLE", nargs="+")
    parser.add_argument(
        "--threads", type=some(integers), default=(1,), metavar="N[,N]", help="of the pool [1]"
    )
    parser.add_argument("--rows", type=positive_integer, default=8, help="rows of a call [8]")
    parser.add_argument("--repeat", type=positive_integer, default=20, help="calls [20]")
