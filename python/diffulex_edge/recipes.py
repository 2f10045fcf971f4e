# SPDX-License-Identifier: Apache-2.0
"""Quantisation recipes: what each is called, which backend takes it, and how weights become it.

A recipe is `LAYERS[-gN][,head=HEAD][,emb=BITS][,hqq]`, for example ``8da4w-g32,head=8da8w,emb=8``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.quiet import quiet
from diffulex_edge.errors import require

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from diffulex_edge.model import EdgeDecoder

__all__ = [
    "GROUP_SIZES",
    "RECIPES",
    "Recipe",
    "check_calibration",
    "parse_recipe",
    "quantise",
    "split_recipes",
    "with_searched_scales",
]

GROUP_SIZES = (32, 64, 128, 256)
#: Layer recipe -> what it does to weights and activations.
RECIPES = {
    "none": "float32",
    "fp16": "float16, statistics of norms in float32",
    "8da8w": "int8 weights per output channel, int8 activations per token",
    "8da4w": "int4 weights in groups, int8 activations per token",
    "pt2e_dyn8": "int8 weights per output channel, int8 activations per call, by PT2E",
    "static_int8": "the same with scales of the activations from calibration, experimental",
    "8w": "int8 weights per output channel, float activations",
    "4w": "int4 weights in groups, float activations",
}
#: Other accepted names, among them those of upstream.
_ALIASES = {
    "fp32": "none",
    "float32": "none",
    "int8": "8da8w",
    "dynamic_int8": "8da8w",
    "weight_only_int8": "8da8w",
    "float16": "fp16",
    "int4": "8da4w-g32,head=8da8w,emb=8",
    "8da4w": "8da4w-g32,head=8da8w,emb=8",
}
_GROUPED = ("8da4w", "4w")
#: Recipes of the whole program: they have no suffixes.
_WHOLE = ("fp16", "pt2e_dyn8", "static_int8")
_PT2E = ("pt2e_dyn8", "static_int8")
#: Suffix of recipes whose scales are searched for (HQQ).
_SEARCHED = "hqq"
_DEFAULT_GROUP = 32
#: Bytes of a scale.
_SCALE = 4
#: Largest differences that the self-check allows, as shares of the largest logit: float32, float16 and
#: quantised; and the least share of rows with the same best id of a quantised program.
_TOLERANCE, _TOLERANCE_HALF, _TOLERANCE_QUANTISED = 1e-4, 2e-2, 0.1
_AGREEMENT_QUANTISED = 0.9


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipes of the layers' projections, of the head and of the embedding."""

    layers: str = "none"
    group_size: int = _DEFAULT_GROUP
    head: str = "none"
    #: Bits of the embedding table: 32 (float, as the layers), 8 or 4.
    embedding_bits: int = 32
    #: Scales of the products' weights are those with the least error, not those of the largest weight.
    is_searched: bool = False

    @property
    def is_quantised(self) -> bool:
        """Whether any weight is not float32."""
        return (self.layers, self.head, self.embedding_bits) != ("none", "none", 32)

    @property
    def is_half(self) -> bool:
        """Whether the program computes and keeps its cache in float16."""
        return self.layers == "fp16"

    @property
    def is_pt2e(self) -> bool:
        """Whether the exported graph is quantised instead of the weights."""
        return self.layers in _PT2E

    @property
    def is_calibrated(self) -> bool:
        """Whether it takes scales from text."""
        return self.layers == "static_int8"

    @property
    def float_bytes(self) -> int:
        """Bytes of a number that is not quantised."""
        return 2 if self.is_half else 4

    @property
    def tolerance(self) -> float:
        """Difference from its own model, as a share of the largest logit, that the self-check allows."""
        if self.is_half:
            return _TOLERANCE_HALF
        return _TOLERANCE_QUANTISED if self.is_quantised else _TOLERANCE

    @property
    def least_agreement(self) -> float:
        """Least share of rows with the best id of its own model."""
        return _AGREEMENT_QUANTISED if self.is_quantised and not self.is_half else 0.0

    @property
    def kinds(self) -> tuple[str, str]:
        """Recipes of layers and head."""
        return self.layers, self.head

    def __str__(self) -> str:
        if not self.is_quantised:
            return "none"
        group = f"-g{self.group_size}" if self.layers in _GROUPED else ""
        head = "" if self.head == self.layers else f",head={self.head}"
        embedding = "" if self.embedding_bits == 32 else f",emb={self.embedding_bits}"
        searched = f",{_SEARCHED}" if self.is_searched else ""
        return f"{self.layers}{group}{head}{embedding}{searched}"

    def weight_bytes(self, kind: str, rows: int, columns: int) -> float:
        """Bytes of a matrix [rows, columns] under the recipe `kind`."""
        if kind in ("none", "fp16"):
            return float(self.float_bytes * rows * columns)
        if kind in _GROUPED and columns % self.group_size == 0:
            return rows * columns * (0.5 + 2.0 / self.group_size)
        return rows * (columns + _SCALE)

    def embedding_bytes(self, rows: int, columns: int) -> float:
        """Bytes of the embedding table."""
        if self.embedding_bits == 32:
            return float(self.float_bytes * rows * columns)
        if self.embedding_bits == 8:
            return rows * (columns + _SCALE)
        return rows * columns * (0.5 + _SCALE / _DEFAULT_GROUP)


def parse_recipe(text: str) -> Recipe:
    """The recipe that a `--quant` text names.

    Raises:
        ConfigError: unknown recipe, group size or suffix.
    """
    text = _ALIASES.get(text.strip().lower(), text.strip().lower())
    first, *suffixes = text.split(",")
    layers, _, group = first.partition("-g")
    if layers not in RECIPES:
        names = ", ".join(sorted({*RECIPES, *_ALIASES}))
        raise ConfigError(f"quant: expected one of {names}, got {text!r}")
    size = _DEFAULT_GROUP
    if group:
        size = int(group) if group.isdecimal() else 0
        if layers not in _GROUPED or size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(
                f"quant: expected a group size of {sizes} with {' or '.join(_GROUPED)},"
                f" got {first!r}"
            )
    head, bits, is_searched = ("8da8w" if layers == "8da4w" else layers), 32, False
    if suffixes and layers in _WHOLE:
        raise ConfigError(f"quant: expected {layers} alone, got {text!r}")
    for suffix in suffixes:
        key, _, value = suffix.partition("=")
        if key == "head" and value in RECIPES and value not in (*_GROUPED, *_WHOLE):
            head = value
        elif key == "emb" and value in ("8", "4"):
            bits = int(value)
        elif suffix == _SEARCHED and layers != "none":
            is_searched = True
        else:
            raise ConfigError(
                f"quant: expected head=none, head=8da8w, emb=8, emb=4 or {_SEARCHED} after a recipe"
                f" of weights, got {suffix!r}"
            )
    return Recipe(layers, size, head, bits, is_searched)


def with_searched_scales(text: str) -> str:
    """The recipe of a text with scales that are searched for."""
    return str(parse_recipe(f"{parse_recipe(text)},{_SEARCHED}"))


def check_calibration(recipe: Recipe, path: Path | None) -> None:
    """Raises ConfigError unless text is given exactly where a recipe takes scales from it."""
    if recipe.is_calibrated and path is None:
        raise ConfigError(f"calibration: expected a file of problems with {recipe}, got none")
    if path is not None and not recipe.is_calibrated:
        raise ConfigError(f"calibration: expected the recipe static_int8, got {recipe}")


def split_recipes(text: str) -> list[str]:
    """Recipes of a list: a comma before ``head=``, ``emb=`` or ``hqq`` belongs to the recipe."""
    recipes: list[str] = []
    for part in text.split(","):
        if recipes and part.strip().startswith(("head=", "emb=", _SEARCHED)):
            recipes[-1] += f",{part.strip()}"
        else:
            recipes.append(part.strip())
    return recipes


def quantise(decoder: EdgeDecoder, recipe: Recipe) -> list[str]:
    """Quantises the weights in place and returns notices about what another recipe was taken for.

    Norms, biases, rotary tables and the constants of the export form stay float32. Recipes of PT2E change
    the exported graph instead; see `diffulex_edge.pt2e`.
    """
    if recipe.is_half:
        decoder.to_half()
    if recipe.layers in _WHOLE or not recipe.is_quantised:
        return []
    with quiet():
        torch = require("torch")
        torchao = require("torchao.quantization")
        api = require("torchao.quantization.quant_api")

    algorithms = api.IntxChooseQParamsAlgorithm
    scales = {
        "intx_choose_qparams_algorithm": algorithms.HQQ_SCALE_ONLY
        if recipe.is_searched
        else algorithms.AFFINE
    }

    def linear_config(kind: str, group: int) -> Any:
        is_grouped = kind in _GROUPED and group > 0
        dtype = torch.int4 if is_grouped else torch.int8
        shape = torchao.PerGroup(group) if is_grouped else torchao.PerAxis(0)
        if kind in ("8w", "4w"):
            return api.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=shape, **scales)
        return api.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=dtype, weight_granularity=shape, **scales
        )

    notices: list[str] = []
    linears = dict(decoder.layers.named_modules())
    plan: dict[int, Any] = {}
    for name, module in linears.items():
        if not isinstance(module, torch.nn.Linear) or recipe.layers == "none":
            continue
        group = recipe.group_size
        if recipe.layers in _GROUPED and module.in_features % group:
            notices.append(
                f"layers.{name}: int8, since {module.in_features} columns are no multiple of {group}"
            )
            group = 0
        plan[id(module)] = linear_config(recipe.layers, group)
    if recipe.head != "none":
        plan[id(decoder.head)] = linear_config(recipe.head, 0)
    if recipe.embedding_bits != 32:
        is_byte = recipe.embedding_bits == 8
        plan[id(decoder.embedding)] = api.IntxWeightOnlyConfig(
            weight_dtype=torch.int8 if is_byte else torch.int4,
            granularity=torchao.PerAxis(0) if is_byte else torchao.PerGroup(_DEFAULT_GROUP),
        )
    with quiet():
        for config, members in _grouped(plan):
            torchao.quantize_(decoder, config, _is_in(members))
    return notices


def _grouped(plan: dict[int, Any]) -> list[tuple[Any, set[int]]]:
    """One entry per distinct configuration: conversions run once for all modules of one."""
    groups: dict[str, tuple[Any, set[int]]] = {}
    for module, config in plan.items():
        groups.setdefault(repr(config), (config, set()))[1].add(module)
    return list(groups.values())


def _is_in(members: set[int]) -> Callable[[nn.Module, str], bool]:
    return lambda module, _: id(module) in members
