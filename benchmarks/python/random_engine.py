# SPDX-License-Identifier: Apache-2.0
"""Engines over random weights in the shapes of published models."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from published_shapes import SHAPES, Shape

from diffulex import Diffulex
from diffulex.checkpoint.auto_model import random_model
from diffulex.config.config import Config
from diffulex.engine.ranks.executor import make_executor
from diffulex.engine.startup import load_weights
from diffulex.families.listing import kept_modules
from diffulex.families.spec import ModelSpec
from diffulex.quantization.layers import ModelQuantizer
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan

__all__ = [
    "add_model_flags",
    "build_engine",
    "build_model",
    "build_shared_engine",
    "make_quantizer",
    "random_prompts",
    "resolve_config",
    "shape_of",
]


def schemes(text: str) -> list[str]:
    """Names of schemes, comma-separated."""
    names = text.split(",")
    if unknown := [name for name in names if name not in ("none", *SCHEMES)]:
        raise argparse.ArgumentTypeError(f"expected none, {', '.join(SCHEMES)}, got {unknown[0]}")
    return names


def add_model_flags(parser: argparse.ArgumentParser, *, has_schemes: bool = False) -> None:
    """Which random model, where, and as what; `has_schemes`: one after the other."""
    is_cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=tuple(SHAPES), default="sdar-8b")
    parser.add_argument("--tiny", action="store_true", help="the family in a few kilobytes")
    parser.add_argument("--device", default="cuda" if is_cuda else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    if has_schemes:
        parser.add_argument(
            "--quantization", type=schemes, default=["none"], help="none,fp8 [none]"
        )
    else:
        parser.add_argument("--quantization", choices=("none", *SCHEMES), default="none")
    parser.add_argument("--block-size", type=int, default=32)


def shape_of(options: argparse.Namespace) -> Shape:
    """What `add_model_flags` has read."""
    shape = SHAPES[options.shape]
    return shape.tiny() if options.tiny else shape


def build_model(
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    quantization: str = "none",
    **choices: Any,
) -> Any:
    """A model of this shape, its weights drawn where they are and then quantised if wanted; `choices` as for
    `make_quantizer`."""
    quantizer = None if quantization == "none" else make_quantizer(shape, quantization, **choices)
    return random_model(shape.family, shape.facts().spec, dtype, device, seed, quantizer)


def make_quantizer(
    shape: Shape,
    scheme: str,
    *,
    quantize_head: bool = False,
    ignore: tuple[str, ...] | None = None,
) -> ModelQuantizer:
    """What an engine over this shape would have; `ignore` None: the family keeps what it keeps by default."""
    kept = kept_modules(shape.family, scheme) if ignore is None else ignore
    return ModelQuantizer(QuantizationPlan(scheme, ignore=kept, quantize_head=quantize_head))


def resolve_config(shape: Shape, **settings: Any) -> Config:
    """The configuration of an engine over this shape; `settings` as for `Diffulex`."""
    return Config.resolve("random", shape.facts(), settings)


def build_engine(shape: Shape, model: Any, device: str, **settings: Any) -> Diffulex:
    """An engine over `model` that takes token ids; `settings` as for `Diffulex`."""
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    config = resolve_config(shape, device=device, dtype=dtype, **settings)
    return Diffulex.from_components(config, model, None)


def build_shared_engine(shape: Shape, num_ranks: int, device: str, **settings: Any) -> Diffulex:
    """An engine whose random weights several processes share; `settings` as for `Diffulex`."""
    config = resolve_config(
        shape, device=device, tensor_parallel_size=num_ranks, load_format="dummy", **settings
    )
    executor = make_executor(config, shape.family)
    try:
        model = load_weights(config, shape.family, show_progress=False)
        return Diffulex.from_components(config, model, None, executor)
    except BaseException:
        executor.close()
        raise


def random_prompts(spec: ModelSpec, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Prompts of distinct random ids without the mask token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, spec.vocab_size - 1, (count, length), generator=generator)
    mask = -1 if spec.mask_token_id is None else spec.mask_token_id
    return (ids + (ids >= mask)).tolist() if mask >= 0 else ids.tolist()
