# SPDX-License-Identifier: Apache-2.0
"""``diffulex quantize MODEL OUT``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diffulex.quantization.scheme import GROUP_SIZES, SCHEMES

if TYPE_CHECKING:
    import argparse

__all__ = ["add_quantize_flags"]


def add_quantize_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``diffulex quantize``."""
    parser.add_argument("model", metavar="MODEL", help="demo, a directory or a hub id")
    parser.add_argument("out", metavar="OUT", help="new or empty directory to write")
    parser.add_argument(
        "--quantization", choices=SCHEMES, required=True, help="scheme of the large matrices"
    )
    parser.add_argument(
        "--quantization-group-size",
        type=int,
        choices=GROUP_SIZES,
        default=128,
        help="columns that share a scale of int4 [128]",
    )
    parser.add_argument(
        "--ignore",
        nargs="*",
        action="extend",
        metavar="PATTERN",
        help="module names in the checkpoint that keep their dtype, such as model.layers.0.* [what the"
        " family keeps; none: quantise these too]",
    )
    parser.add_argument(
        "--quantize-head", action="store_true", help="the output head too, unless it is tied"
    )
    parser.add_argument("--model-name", help="model family, where files do not tell it")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.set_defaults(command=quantize)


def quantize(options: argparse.Namespace) -> int:
    """Runs the command; errors are one line."""
    from diffulex.checkpoint.auto_model import detect  # noqa: PLC0415
    from diffulex.checkpoint.resolve import resolve_model  # noqa: PLC0415
    from diffulex.errors import ConfigError  # noqa: PLC0415
    from diffulex.families.listing import kept_modules  # noqa: PLC0415
    from diffulex.quantization.convert import convert  # noqa: PLC0415 (imports torch)
    from diffulex.quantization.scheme import QuantizationPlan  # noqa: PLC0415

    scheme, size = options.quantization, options.quantization_group_size
    if size != GROUP_SIZES[-1] and scheme != "int4":
        raise ConfigError(f"--quantization-group-size: expected int4 with it, got {scheme}")
    model_dir = resolve_model(options.model, options.revision)
    ignore = options.ignore
    if ignore is None:
        ignore = kept_modules(detect(model_dir, options.model_name)[1].family, scheme)
    plan = QuantizationPlan(scheme, size, tuple(ignore), options.quantize_head)
    written = convert(model_dir, Path(options.out), plan, options.model_name)
    print(
        f"{options.out}: {written.num_matrices} matrices in {scheme},"
        f" {written.old_bytes / 1e9:.3g} GB are {written.new_bytes / 1e9:.3g} GB"
    )
    return 0
