# SPDX-License-Identifier: Apache-2.0
"""Numerical equivalence: stock transformers, the decoder in its export form, the program.

Each link is compared by itself. The stock decoder is the template of the family, with the
checkpoint's weights under its names and an explicit mask; no code of a checkpoint is run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diffulex.checkpoint.auto_model import detect
from diffulex.checkpoint.resolve import resolve_model
from diffulex.errors import ConfigError
from diffulex.families.spec.names import LLAMA_NAMES
from diffulex.quiet import quiet
from diffulex_edge.backends import backend_of
from diffulex_edge.bundle import read_bundle
from diffulex_edge.errors import ProgramError, require
from diffulex_edge.exporter import avoided_ids, load_decoder
from diffulex_edge.lowering import ProgramShape
from diffulex_edge.model import EdgeDecoder
from diffulex_edge.program import PteProgram, check_program
from diffulex_edge.pt2e import calibration_calls, quantised_program
from diffulex_edge.recipes import check_calibration, parse_recipe
from diffulex_edge.self_check import (
    check_agreement,
    check_tolerance,
    compare,
    eager_caller,
    make_trace,
    run_trace,
)
from diffulex_edge.unified import visible_ends_of_mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diffulex.families.spec import ModelSpec
    from diffulex_edge.recipes import Recipe
    from diffulex_edge.self_check import Agreement

__all__ = [
    "EquivalenceReport",
    "InputReport",
    "stock_model",
    "verify_bundle",
    "verify_model",
    "verify_numerical_equivalence",
]

#: Largest difference from transformers, as a share of the largest logit.
_TOLERANCE = 1e-4
#: Ids of a random input.
_INPUT_LENGTH = 48


@dataclass(frozen=True, slots=True)
class InputReport:
    """How far two models are apart on one input."""

    max_abs: float
    mean_abs: float
    relative_rms: float
    argmax: float
    kl: float
    #: Row with the largest difference.
    worst_position: int
    scale: float


@dataclass(frozen=True, slots=True)
class EquivalenceReport:
    """True where every input is within the tolerance."""

    inputs: tuple[InputReport, ...]
    tolerance: float

    def __bool__(self) -> bool:
        return all(item.max_abs <= self.tolerance * item.scale for item in self.inputs)

    def to_json(self) -> dict[str, Any]:
        """All fields in the types of JSON."""
        return {"passed": bool(self), **asdict(self)}

    def __str__(self) -> str:
        worst = max((item.max_abs / item.scale for item in self.inputs), default=0.0)
        least = min((item.argmax for item in self.inputs), default=1.0)
        state = "equal" if self else "DIFFERENT"
        return (
            f"{state}: largest difference {worst:.2g} of the scale (tolerance {self.tolerance:g}),"
            f" equal best ids {least:.1%}, {len(self.inputs)} inputs"
        )


def stock_model(spec: ModelSpec, decoder: EdgeDecoder) -> nn.Module:
    """The transformers decoder that a dense family is built on, with the decoder's weights."""
    with quiet():
        transformers = require("transformers")
    kind = "Qwen3" if spec.qk_norm else "Qwen2" if spec.qkv_bias and not spec.o_bias else "Llama"
    options: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_q_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": False,
        "attention_bias": spec.qkv_bias,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{kind}Config")(**options)
    with quiet(), torch.device("meta"):
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    model = model.to_empty(device="cpu").eval()
    table = model.state_dict()
    for name, tensor in _template_weights(spec, decoder).items():
        rows = min(table[name].size(0), tensor.size(0))
        table[name].copy_(tensor[:rows])
    inner: Any = model
    rotary = inner.model.rotary_emb
    rotary.__init__(config=config)  # its table is no weight: the empty one has no values
    return model


def _template_weights(spec: ModelSpec, decoder: EdgeDecoder) -> dict[str, Tensor]:
    """The decoder's weights under the names of the template."""
    own, template = spec.names, LLAMA_NAMES
    names = {
        own.embedding: template.embedding,
        own.final_norm: template.final_norm,
        own.head: template.head,
    }
    parts = ("input_norm", "post_norm", "q_norm", "k_norm")
    products = ("q", "k", "v", "o", "gate", "up", "down")
    for layer in range(spec.num_layers):
        prefixes = own.layer.format(layer), template.layer.format(layer)
        for part in parts:
            names[prefixes[0] + getattr(own, part)] = prefixes[1] + getattr(template, part)
        for part in products:
            for ending in (".weight", ".bias"):
                name = prefixes[0] + getattr(own, part) + ending
                names[name] = prefixes[1] + getattr(template, part) + ending
    return {names[name]: tensor for name, tensor in decoder.weight_table().items()}


def verify_numerical_equivalence(
    hf_model_path: Path | str | nn.Module,
    edge_model: EdgeDecoder,
    test_inputs: Sequence[Tensor],
    tolerance: float = 1e-5,
    *,
    attention_mode: str = "block_causal",
    prompt_len: int | None = None,
) -> EquivalenceReport:
    """Compares a decoder with the Hugging Face model, in float32.

    Args:
        hf_model_path: checkpoint directory, or a model of transformers that is built already.
        edge_model: the decoder.
        test_inputs: ids [S] or [1, S] int64.
        tolerance: of the largest difference, as a share of the largest logit (at least 1).
        attention_mode: as `EdgeDecoder.forward`.

    Raises:
        ConfigError: the tolerance is no positive number, or there is no input.
    """
    check_tolerance(tolerance)
    if not test_inputs:
        raise ConfigError("test_inputs: expected one input or more, got none")
    spec = edge_model.spec
    model = hf_model_path
    if not isinstance(model, nn.Module):
        directory = resolve_model(model)
        found = detect(directory, spec.family)[1]
        model = stock_model(
            found, load_decoder(directory, found, edge_model.max_seq_len, backend_of("portable"))
        )
    reports = []
    for item in test_inputs:
        ids = item.view(1, -1)
        count = ids.size(1)
        with torch.inference_mode():
            own = edge_model(ids, attention_mode=attention_mode, prompt_len=prompt_len)[0][0]
            positions = torch.arange(count)
            ends = visible_ends_of_mode(
                attention_mode, positions, count, spec.block_size, prompt_len
            )
            is_hidden = positions[None, :] >= ends[:, None]
            mask = torch.zeros(1, 1, count, count).masked_fill(is_hidden, -1e9)
            other = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]
        reports.append(_report(own.float(), other.float()[:, : own.size(1)]))
    return EquivalenceReport(tuple(reports), tolerance)


def verify_model(
    path: Path | str, tolerance: float = 1e-5, *, num_inputs: int = 4
) -> EquivalenceReport:
    """Compares the decoder of a checkpoint with the Hugging Face model, on random ids.

    Args:
        path: directory or name of a checkpoint of a family that can be exported.
        tolerance: as `verify_numerical_equivalence`.
        num_inputs: inputs of 48 ids, or of the positions of a shorter model.

    Raises:
        ConfigError: another family, the tolerance is no positive number, or there is no input.
        CheckpointError: the checkpoint cannot be read.
    """
    directory = resolve_model(path)
    spec = detect(directory)[1]
    length = min(_INPUT_LENGTH, spec.max_positions)
    decoder = load_decoder(directory, spec, length, backend_of("xnnpack"))
    inputs = _random_inputs(spec, length, num_inputs)
    return verify_numerical_equivalence(stock_model(spec, decoder), decoder, inputs, tolerance)


def _random_inputs(spec: ModelSpec, length: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, spec.vocab_size, (length,), generator=generator) for _ in range(count)]


def _report(found: Tensor, reference: Tensor) -> InputReport:
    difference = (found - reference).abs()
    logs = found.log_softmax(-1), reference.log_softmax(-1)
    square = float(reference.square().mean())
    return InputReport(
        max_abs=float(difference.max()),
        mean_abs=float(difference.mean()),
        relative_rms=float((difference.square().mean() / max(square, 1e-30)).sqrt()),
        argmax=float((found.argmax(-1) == reference.argmax(-1)).float().mean()),
        kl=float((logs[1].exp() * (logs[1] - logs[0])).sum(-1).mean()),
        worst_position=int(difference.amax(-1).argmax()),
        scale=max(1.0, float(reference.abs().max())),
    )


@dataclass(frozen=True, slots=True)
class BundleReport:
    """A bundle against the checkpoint it came from."""

    #: Stock transformers and the decoder.
    decoder: EquivalenceReport
    #: The decoder and the program.
    program: Agreement
    recipe: Recipe
    #: Of the program; None: that of the self-check.
    tolerance: float | None = None

    @property
    def passed(self) -> bool:
        """Whether both links hold."""
        try:
            self.check()
        except ProgramError:
            return False
        return True

    def check(self) -> None:
        """Raises ProgramError that names the first link that does not hold."""
        if not self.decoder:
            raise ProgramError(
                f"verify: transformers and decoder: expected equal logits, got {self.decoder}"
            )
        check_agreement(
            self.program,
            self.recipe,
            tolerance=self.tolerance,
            where="verify: decoder and program",
        )


def verify_bundle(
    bundle_path: Path | str,
    reference: Path | str,
    *,
    num_inputs: int = 4,
    tolerance: float | None = None,
    lora: Path | None = None,
    model_name: str | None = None,
    mask_token_id: int | None = None,
    calibration: Path | None = None,
) -> BundleReport:
    """Compares a bundle with a checkpoint, link by link.

    Args:
        tolerance: share of the largest logit, of both links; None: 1e-4, and that of the self-check
            for the program.
        lora, model_name, mask_token_id, calibration: what was given to the export.

    Raises:
        ConfigError: the tolerance is no positive number, or the calibration does not fit the recipe.
        ProgramError: the checkpoint is of another model, or the program is damaged or fails.
    """
    check_tolerance(tolerance)
    bundle = read_bundle(resolve_model(bundle_path))
    directory = resolve_model(reference)
    spec = detect(directory, model_name, mask_token_id=mask_token_id)[1]
    check_program(bundle)
    program = PteProgram(bundle.program_path)
    constants = program.constants
    expected = (spec.family, spec.vocab_size, spec.num_layers)
    found = (
        constants["dlx_model_type"],
        constants["get_vocab_size"],
        constants["dlx_num_layers"],
    )
    if found != expected:
        raise ProgramError(
            f"verify: expected a reference of family, vocabulary and layers {found}, got {expected}"
        )
    decoder = load_decoder(directory, spec, bundle.cache_rows, backend_of("xnnpack"), lora)
    inputs = _random_inputs(spec, min(_INPUT_LENGTH, bundle.max_model_len), num_inputs)
    link = verify_numerical_equivalence(
        stock_model(spec, decoder), decoder, inputs, _TOLERANCE if tolerance is None else tolerance
    )
    recipe = parse_recipe(bundle.quant)
    check_calibration(recipe, calibration)
    shape = ProgramShape(bundle.max_rows, bundle.max_logits, bundle.cache_rows)
    calls = make_trace(shape, spec.block_size or 32, spec.vocab_size, avoided_ids(spec))
    seen = calls
    if calibration is not None:
        seen = calibration_calls(calibration, directory, spec, shape)
    own = run_trace(eager_caller(quantised_program(decoder, recipe, shape, seen)[0]), calls)
    outputs = run_trace(lambda call: program(*call), calls)
    return BundleReport(link, compare(outputs, own), recipe, tolerance)
