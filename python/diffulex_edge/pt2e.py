# SPDX-License-Identifier: Apache-2.0
"""Recipes that change the exported graph, and the text that one of them is calibrated on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.errors import ConfigError
from diffulex.quiet import quiet
from diffulex_edge.errors import require
from diffulex_edge.lowering import capture, example_inputs
from diffulex_edge.model import EdgeProgram
from diffulex_edge.recipes import quantise
from diffulex_edge.self_check import Call, eager_caller, run_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from diffulex.families.spec import ModelSpec
    from diffulex_edge.lowering import ProgramShape
    from diffulex_edge.model import EdgeDecoder
    from diffulex_edge.recipes import Recipe

__all__ = ["calibration_calls", "quantised_program"]

_NUM_CALIBRATED = 16


def quantised_program(
    decoder: EdgeDecoder, recipe: Recipe, shape: ProgramShape, calls: Sequence[Call]
) -> tuple[nn.Module, list[str]]:
    """The program of a decoder under a recipe, which changes the decoder, and notices.

    Args:
        calls: what a recipe of PT2E observes the activations in.
    """
    notices = quantise(decoder, recipe)
    program = EdgeProgram(decoder)
    return (_converted(program, recipe, shape, calls) if recipe.is_pt2e else program), notices


def _converted(
    program: EdgeProgram, recipe: Recipe, shape: ProgramShape, calls: Sequence[Call]
) -> nn.Module:
    """The graph of a program with the products of its layers and head in int8."""
    with quiet():
        torch = require("torch")
        api = require("torchao.quantization.pt2e.quantize_pt2e")
        xnnpack = require("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
        config = xnnpack.get_symmetric_quantization_config(
            is_per_channel=True, is_dynamic=not recipe.is_calibrated
        )
        # By module: the products that stand for a mean and a rotation belong to none.
        quantizer = xnnpack.XNNPACKQuantizer().set_module_type(torch.nn.Linear, config)
        graph = capture(program, example_inputs(shape), shape).module()
        prepared = api.prepare_pt2e(graph, quantizer)
        run_trace(eager_caller(prepared), calls)
        converted: nn.Module = api.convert_pt2e(prepared)
    return converted


def calibration_calls(
    path: Path, model_dir: Path, spec: ModelSpec, shape: ProgramShape
) -> list[Call]:
    """Calls over prompts of a file and a block of masks after each, as decoding begins.

    Args:
        path: JSON lines with ``question``; the first 16 are used.

    Raises:
        ConfigError: the file has no problems, or the model no mask.
    """
    import torch  # noqa: PLC0415

    from diffulex.bench.evaluate import read_problems  # noqa: PLC0415
    from diffulex.checkpoint.tokenizer import Tokenizer  # noqa: PLC0415

    if spec.mask_token_id is None:
        raise ConfigError("calibration: expected a model with a mask token, got none")
    tokenizer, block = Tokenizer.from_dir(model_dir), min(spec.block_size or 8, shape.max_rows)
    calls = []
    for problem in read_problems(str(path))[:_NUM_CALIBRATED]:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": problem.question}])
        ids = [*ids[: max(0, shape.max_rows - 2 * block)], *[spec.mask_token_id] * block]
        count = len(ids)
        rows = torch.arange(count - min(count, shape.max_logits), count)
        positions = torch.arange(count)
        ends = ((positions // block + 1) * block).clamp(max=count)
        calls.append(Call(torch.tensor(ids), positions, ends, rows))
    return calls
