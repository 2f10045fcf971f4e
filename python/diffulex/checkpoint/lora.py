# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in the peft layout: reading, matching to a model, merging, attaching.

An adapter replaces W by W + scale B A. Everything that would make the result another than the one
its author trained is an error: a feature that is not implemented, a tensor without a place, a place
without its tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import regex
import torch

from diffulex.checkpoint.loader import check_finite
from diffulex.checkpoint.tensor_files import listed, other_weights, read_header
from diffulex.checkpoint.tensor_reader import TENSOR_DTYPES, TensorReader
from diffulex.errors import CheckpointError
from diffulex.families.spec.reader import read_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.checkpoint.projection import Projection
    from diffulex.checkpoint.tensor_files import StoredTensor

__all__ = ["LoraAdapter", "LoraFactors", "MergePlan", "attach", "read_adapter"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?(\.weight)?")
_ALL_LINEAR = "all-linear"
#: Features that change the result; each value is accepted only if it is false, empty or absent.
_UNSUPPORTED = (
    "use_dora",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
    "alora_invocation_tokens",
)
#: Seconds that a pattern of an adapter may take for one name; patterns can be exponential.
_PATTERN_SECONDS = 1.0
_LARGEST_SCALE = torch.finfo(torch.float32).max
#: Ways to start the training; after the others the product belongs to altered base weights.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The two factors of one projection, in their stored dtype."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """Factors by module name in the base checkpoint."""

    directory: Path
    #: lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.
    scale: float
    factors: Mapping[str, LoraFactors]
    target_modules: str | tuple[str, ...]

    def targets(self, module: str) -> bool:
        """Whether the adapter was trained on this module of the base model.

        A list names the last components of module names; a text is a pattern for whole names.
        """
        if isinstance(self.target_modules, str):
            if self.target_modules == _ALL_LINEAR:
                return True
            return self._matches(self.target_modules, module)
        return any(module == name or module.endswith(f".{name}") for name in self.target_modules)

    @staticmethod
    def _matches(pattern: str, module: str) -> bool:
        try:
            return regex.fullmatch(pattern, module, timeout=_PATTERN_SECONDS) is not None
        except TimeoutError as error:
            raise CheckpointError(
                f"{CONFIG_FILE}: target_modules: expected a pattern that is matched within"
                f" {_PATTERN_SECONDS:g} s, got {pattern!r}"
            ) from error

    def check(self, projections: Mapping[str, Projection]) -> None:
        """Compares the adapter with a model, which may be on the meta device.

        Raises:
            CheckpointError: the adapter has a module that the model lacks or that it does not
                target, a targeted projection has no factors, or a shape differs.
        """
        where = f"adapter: {self.directory}"
        unknown = [module for module in self.factors if module not in projections]
        if unknown:
            raise CheckpointError(
                f"{where}: expected projections of the base model, got {listed(unknown)}"
            )
        other = [module for module in self.factors if not self.targets(module)]
        if other:
            raise CheckpointError(
                f"{where}: expected modules of target_modules {self.target_modules!r}, "
                f"got {listed(other)}"
            )
        missing = [
            module
            for module in projections
            # The projections of a fused tensor are targeted through whichever name is stored.
            if self.targets(module)
            and module not in self.factors
            and not self._covers(projections[module], projections)
        ]
        if missing:
            raise CheckpointError(f"{where}: missing factors of {listed(missing)}")
        for module, pair in self.factors.items():
            found = (pair.b.size(0), pair.a.size(1))
            if found != projections[module].shape:
                raise CheckpointError(
                    f"{where}: {module}: expected a product of shape "
                    f"{list(projections[module].shape)}, got {list(found)}"
                )

    def _covers(self, projection: Projection, projections: Mapping[str, Projection]) -> bool:
        return any(
            projections[module].tensor == projection.tensor
            and projections[module].rows.start <= projection.rows.start
            and projection.rows.stop <= projections[module].rows.stop
            for module in self.factors
        )


class MergePlan:
    """Which products go to which rows of which stored tensors."""

    def __init__(self, adapter: LoraAdapter, projections: Mapping[str, Projection]) -> None:
        adapter.check(projections)
        self._scale = adapter.scale
        self._parts: dict[str, list[tuple[slice, LoraFactors]]] = defaultdict(list)
        for module, pair in adapter.factors.items():
            projection = projections[module]
            self._parts[projection.tensor].append((projection.tensor_rows, pair))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the stored tensors that gain something."""
        return tuple(self._parts)

    def apply(self, tensor: str, rows: slice, values: torch.Tensor) -> torch.Tensor:
        """Rows `rows` of a stored tensor with their products added, in float32 if there are any."""
        parts = self._parts.get(tensor)
        if parts is None:
            return values
        merged = values.to(torch.float32, copy=True)
        for part, pair in parts:
            start, stop = max(part.start, rows.start), min(part.stop, rows.stop)
            if start >= stop:
                continue
            b = pair.b[start - part.start : stop - part.start].float()
            product = torch.mm(b, pair.a.float())
            merged[start - rows.start : stop - rows.start].add_(product, alpha=self._scale)
        return merged


def attach(adapter: LoraAdapter, projections: Mapping[str, Projection]) -> None:
    """Adds the products to the outputs of the projections; the weights stay the base model's.

    Raises:
        CheckpointError: the adapter does not fit the model; see `LoraAdapter.check`.
    """
    adapter.check(projections)
    for module, pair in adapter.factors.items():
        projections[module].add_update(pair.a, pair.b, adapter.scale)


def read_adapter(directory: Path) -> LoraAdapter:
    """Reads ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        CheckpointError: a file is missing or damaged, a feature is not implemented, or a tensor is
            no factor, has no partner or another shape than its rank says.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            got = other_weights(directory, "adapter_") if name == WEIGHTS_FILE else ""
            raise CheckpointError(
                f"adapter: {directory}: expected a file {name}, got {got or 'none'}"
            )
    config = read_json_object(directory / CONFIG_FILE)
    rank, scale, targets = _read_config(config)
    pairs: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, stored in read_header(directory / WEIGHTS_FILE).items():
        match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise CheckpointError(
                f"adapter: {directory}: expected factors .lora_A.weight and .lora_B.weight, "
                f"got {name}"
            )
        sides = pairs[match["module"]]
        if match["side"] in sides:
            raise CheckpointError(f"adapter: {directory}: {name}: expected one factor, got two")
        sides[match["side"]] = _read_factor(name, stored, rank, match["side"])
    single = [module for module, sides in pairs.items() if len(sides) != 2]
    if single:
        raise CheckpointError(
            f"adapter: {directory}: expected lora_A and lora_B of each module, "
            f"got one of them for {listed(single)}"
        )
    if not pairs:
        raise CheckpointError(f"adapter: {directory}: expected factors, got an empty file")
    factors = {module: LoraFactors(sides["A"], sides["B"]) for module, sides in pairs.items()}
    return LoraAdapter(directory, scale, factors, targets)


def _read_factor(name: str, stored: StoredTensor, rank: int, side: str) -> torch.Tensor:
    if stored.dtype not in TENSOR_DTYPES:
        raise CheckpointError(
            f"adapter: {name}: expected one of {', '.join(TENSOR_DTYPES)}, got {stored.dtype}"
        )
    is_rank_first = side == "A"
    if len(stored.shape) != 2 or stored.shape[0 if is_rank_first else 1] != rank:
        expected = f"[{rank}, in]" if is_rank_first else f"[out, {rank}]"
        raise CheckpointError(
            f"adapter: {name}: expected shape {expected}, got {list(stored.shape)}"
        )
    factor = torch.cat([values.clone() for _, values in TensorReader("cpu").pieces(stored)])
    check_finite(factor, name, stored)
    return factor


def _read_config(config: Mapping[str, Any]) -> tuple[int, float, str | tuple[str, ...]]:
    def fail(key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{CONFIG_FILE}: {key}: expected {expected}, got {config.get(key)!r}"
        )

    if str(config.get("peft_type")).upper() != "LORA":
        raise fail("peft_type", "'LORA'")
    if config.get("bias", "none") != "none":
        raise fail("bias", "'none' (trained biases are not supported)")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise fail(key, "nothing (not supported)")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise fail("init_lora_weights", "a start that leaves the base weights as they are")
    if config.get("layers_to_transform") is not None:
        raise fail("layers_to_transform", "null (not supported)")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise fail("r", "an integer of at least 1")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
        raise fail("lora_alpha", "a number")
    # Written so that NaN, which json accepts, fails as well.
    if not abs(alpha) <= _LARGEST_SCALE:
        raise fail("lora_alpha", "a number that float32 holds")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets:
        try:
            regex.compile(targets)
        except regex.error as error:
            raise fail("target_modules", f"a pattern ({error})") from error
        return rank, scale, targets
    is_list = isinstance(targets, list) and bool(targets)
    if not is_list or not all(isinstance(name, str) and name for name in targets or ()):
        raise fail("target_modules", "names of modules or a pattern")
    return rank, scale, tuple(targets or ())
