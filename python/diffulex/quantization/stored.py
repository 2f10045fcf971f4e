# SPDX-License-Identifier: Apache-2.0
"""In which low precision a checkpoint is stored, from its configuration files. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from diffulex.errors import CheckpointError
from diffulex.families.spec.reader import read_optional_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "EXPERTS",
    "LINEAR",
    "QUANTIZATION_FILE",
    "StoredQuantization",
    "StoredRule",
    "read_stored",
]

#: Targets of rules that are no names: every linear layer, and the routed experts.
LINEAR, EXPERTS = "Linear", "re:.*\\.experts(\\.|$).*"
BLOCK = [128, 128]
_KEYS = ("quantization_config", "compression_config")
#: A file that says it in place of config.json.
QUANTIZATION_FILE = "hf_quant_config.json"
_EXPERT_KEYS = ("use_fp8_experts", "llada_fp8_experts")
_SCALE, _SCALE_INV = "weight_scale", "weight_scale_inv"


@dataclass(frozen=True, slots=True)
class StoredRule:
    """How matrices are stored.

    Attributes:
        scheme: one of `diffulex.quantization.scheme.SCHEMES`.
        layout: `weight` (codes in the place of values), `packed`, `gptq` or `awq`.
        scales: names of the tensor of scales, of which a module has one.
        group: columns that share a scale of int4; 0: all of a row.
        has_zeros: int4 has zero points.
        zero_offset: what is added to a stored zero point.
        targets: `LINEAR`, names of modules, or regular expressions behind `re:`.
        is_strict: a matrix that it speaks of is in low precision, or the checkpoint is damaged.
    """

    scheme: str
    layout: str = "weight"
    scales: tuple[str, ...] = (_SCALE,)
    group: int = 0
    has_zeros: bool = False
    zero_offset: int = 0
    targets: tuple[str, ...] = (LINEAR,)
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """What a checkpoint says about its weights.

    Attributes:
        where: file and key that say it.
        rules: of which the first is the common one.
        ignore: modules in their dtype.
        activations: how the checkpoint means activations to be scaled.
    """

    where: str
    rules: tuple[StoredRule, ...]
    ignore: tuple[str, ...] = ()
    activations: str = "dynamic"

    @property
    def scheme(self) -> str:
        """The scheme of most matrices."""
        return self.rules[0].scheme

    @property
    def has_experts_alone(self) -> bool:
        """Whether no other matrices than those of routed experts are in low precision."""
        return all(rule.targets == (EXPERTS,) for rule in self.rules)

    def rule_of(self, module: str) -> StoredRule | None:
        """How a module of this name in the checkpoint is stored; None: in its dtype."""
        if any(_matches(pattern, module) for pattern in self.ignore):
            return None
        for rule in self.rules:
            if any(target != LINEAR and _matches(target, module) for target in rule.targets):
                return rule
        return next((rule for rule in self.rules if LINEAR in rule.targets), None)


def read_stored(
    model_dir: Path, config: Mapping[str, Any] | None = None
) -> StoredQuantization | None:
    """How the weights of a directory are stored; None: not in low precision.

    `config` is the content of its ``config.json``, which is read without it.

    Raises:
        CheckpointError: a method or a form that is not read, or two files that contradict each other.
    """
    if config is None:
        config = read_optional_json(model_dir / "config.json")
    found: list[StoredQuantization] = []
    nested = config.get("text_config")
    for prefix, values in (("", config), ("text_config.", nested)):
        if not isinstance(values, Mapping):
            continue
        found += [
            _parse(_Values(f"config.json: {prefix}{key}", values[key]))
            for key in _KEYS
            if values.get(key)
        ]
    # Without an algorithm it is the KV cache alone that the file speaks of.
    outer = read_optional_json(model_dir / QUANTIZATION_FILE)
    inner = outer.get("quantization")
    if inner and not (isinstance(inner, Mapping) and not inner.get("quant_algo")):
        found.append(_modelopt(_Values(f"{QUANTIZATION_FILE}: quantization", inner)))
    for prefix, values in (("", config), ("text_config.", nested)):
        for key in _EXPERT_KEYS:
            value = values.get(key) if isinstance(values, Mapping) else None
            if value and not (isinstance(value, Mapping) and value.get("enabled", True) is False):
                found.append(_experts(f"config.json: {prefix}{key}", value))
    for other in found[1:]:
        where = f"as in {found[0].where}"
        if other.rules != found[0].rules:
            raise CheckpointError(
                f"{other.where}: expected {found[0].scheme} {where}, got {other.scheme} in another form"
            )
        if kept := sorted(set(other.ignore) ^ set(found[0].ignore)):
            raise CheckpointError(
                f"{other.where}: expected modules to be left out {where}, got a difference in {kept[0]}"
            )
    return found[0] if found else None


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern names a module, or something above it or at its end."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}." or fnmatch(module, pattern)


class _Values:
    """An object of a configuration file; what is wrong with it is told in one line."""

    def __init__(self, where: str, content: Any) -> None:
        self.where = where
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{where}: expected an object, got {_short(content)}")
        self._content: Mapping[str, Any] = content

    def get(self, key: str, default: Any = None) -> Any:
        value = self._content.get(key)
        return default if value is None else value

    def below(self, key: str) -> _Values:
        return _Values(f"{self.where}.{key}", self._content.get(key))

    def fail(self, key: str, expected: str) -> CheckpointError:
        got = _short(self._content.get(key))
        return CheckpointError(f"{self.where}.{key}: expected {expected}, got {got}")

    def one_of(self, key: str, legal: tuple[Any, ...], default: Any = None) -> Any:
        """A value that has to be one of `legal`, of their type too."""
        value = self.get(key, default)
        if not any(type(value) is type(item) and value == item for item in legal):
            names = ", ".join(str(item) for item in legal)
            raise self.fail(key, f"one of {names}" if len(legal) > 1 else names)
        return value

    def names(self, *keys: str) -> tuple[str, ...]:
        """Names of modules, or patterns of them, from all keys."""
        found: list[str] = []
        for key in keys:
            value = self.get(key, [])
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.fail(key, "a list of names")
            for name in value:
                self._check_pattern(key, name)
            found += value
        return tuple(dict.fromkeys(found))

    def _check_pattern(self, key: str, name: str) -> None:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise CheckpointError(
                f"{self.where}.{key}: expected regular expressions, got {name!r}: {error}"
            ) from error

    def items(self) -> list[str]:
        return list(self._content)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _parse(values: _Values) -> StoredQuantization:
    method = values.get("quant_method")
    if method is None and values.get("quant_algo"):
        method = "modelopt"
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise values.fail("quant_method", f"one of {', '.join(_METHODS)}")
    return reader(values)


def _compressed_tensors(values: _Values) -> StoredQuantization:
    values.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    sparsity = values.get("sparsity_config", {})
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format") != "dense"):
        raise values.fail("sparsity_config", "none, or the format dense")
    own_format = values.one_of("format", (*_FORMATS, "mixed-precision"), "mixed-precision")
    groups = values.below("config_groups")
    rules: list[StoredRule] = []
    activations: list[str] = []
    for name in groups.items():
        if isinstance(groups.get(name), list):
            if name not in _PRESETS:
                names = ", ".join(_PRESETS)
                raise groups.fail(name, f"an object, or one of the schemes {names}")
            rules.append(_PRESETS[name](groups.names(name)))
            activations.append("none" if "A16" in name else "token")
            continue
        group = groups.below(name)
        rules.append(_group_rule(group, own_format))
        inputs = group.get("input_activations")
        said = inputs.get("strategy", "tensor") if isinstance(inputs, Mapping) else "none"
        is_group = said == "group" and inputs.get("group_size") == BLOCK[0]
        activations.append("dynamic" if is_group else str(said))
    if not rules:
        raise values.fail("config_groups", "at least one group")
    forms: dict[str, StoredRule] = {}
    for rule in rules:
        for target in rule.targets:
            form = replace(rule, targets=(target,))
            if forms.setdefault(target, form) != form:
                raise CheckpointError(f"{groups.where}: expected one form of {target}, got two")
    rules.sort(key=lambda rule: LINEAR not in rule.targets)
    ignore = values.names("ignore")
    return StoredQuantization(values.where, tuple(rules), ignore, activations[0])


def _group_rule(group: _Values, own_format: str) -> StoredRule:
    if group.get("output_activations"):
        raise group.fail("output_activations", "null")
    stored_format = group.one_of("format", tuple(_FORMATS), own_format)
    targets = group.names("targets")
    if not targets:
        raise group.fail("targets", "at least one target")
    weights = group.below("weights")
    if weights.get("dynamic", False) is not False:
        raise weights.fail("dynamic", "false")
    kind, bits, strategies = _FORMATS[stored_format]
    weights.one_of("type", (kind,), kind)
    weights.one_of("num_bits", (bits,))
    size = weights.get("group_size")
    if stored_format == "int-quantized" and (size not in (None, -1) or isinstance(size, bool)):
        raise CheckpointError(
            f"quantization: int8: expected group size 0 in {weights.where.removeprefix('config.json: ')},"
            f" got {_short(size)}"
        )
    strategy = weights.one_of("strategy", strategies, "group" if size else "tensor")
    if strategy == "block" and weights.get("block_structure") not in (BLOCK, "128x128"):
        raise weights.fail("block_structure", str(BLOCK))
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool) or not (symmetric or stored_format == "pack-quantized"):
        raise weights.fail("symmetric", "true")
    if stored_format != "pack-quantized":
        schemes = {"float": "fp8_block" if strategy == "block" else "fp8", "int": "int8"}
        return StoredRule(schemes[kind], targets=targets, is_strict=True)
    actorder = weights.get("actorder")
    if actorder not in (None, False, "weight", "static"):
        raise weights.fail("actorder", "null, weight or static")
    columns = _group_size(weights, "group_size") if strategy == "group" else 0
    return _packed(columns, symmetric, targets)


def _packed(group: int, symmetric: bool, targets: tuple[str, ...]) -> StoredRule:
    return StoredRule(
        "int4", "packed", (_SCALE,), group, not symmetric, targets=targets, is_strict=True
    )


def _group_size(values: _Values, key: str) -> int:
    size = values.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or size % 8:
        raise values.fail(key, "a multiple of 8")
    return size


def _fp8(values: _Values) -> StoredQuantization:
    values.one_of("fmt", ("e4m3", "e4m3fn", "float8_e4m3fn"), "e4m3")
    values.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block = values.get("weight_block_size")
    if block not in (None, BLOCK):
        raise values.fail("weight_block_size", f"{BLOCK} or null")
    scales = (_SCALE_INV,) if block else (_SCALE, _SCALE_INV)
    rule = StoredRule("fp8_block" if block else "fp8", scales=scales)
    ignore = values.names("modules_to_not_convert", "ignored_layers")
    return StoredQuantization(values.where, (rule,), ignore, values.get("activation_scheme", ""))


def _modelopt(values: _Values) -> StoredQuantization:
    if isinstance(values.get("quantization"), Mapping):
        values = values.below("quantization")
    values.one_of("quant_algo", ("FP8",))
    ignore = values.names("exclude_modules", "ignore")
    return StoredQuantization(values.where, (StoredRule("fp8"),), ignore, "static")


def _experts(where: str, value: Any) -> StoredQuantization:
    if value is not True:
        values = _Values(where, value)
        values.one_of("enabled", (True,), True)
        values.one_of("format", ("e4m3fn", "e4m3"), "e4m3fn")
        values.one_of("weight_granularity", ("per_expert_2d_block",), "per_expert_2d_block")
        if values.get("weight_block_size", BLOCK) != BLOCK:
            raise values.fail("weight_block_size", str(BLOCK))
        method = values.get("activation_method", "dynamic")
        if not isinstance(method, str) or not method.startswith("dynamic"):
            raise values.fail("activation_method", "a dynamic one")
    rule = StoredRule("fp8_block", scales=(_SCALE_INV, _SCALE), targets=(EXPERTS,), is_strict=True)
    return StoredQuantization(where, (rule,), ("shared_experts",))


def _gptq(values: _Values) -> StoredQuantization:
    values.one_of("bits", (4,))
    group = values.one_of("group_size", (32, 64, 128, -1), 128)
    stored_format = values.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    values.one_of("lm_head", (False,), False)
    values.one_of("is_marlin_format", (False,), False)
    for key in ("sym", "desc_act"):
        values.one_of(key, (True, False), False)
    if values.get("dynamic"):
        raise values.fail("dynamic", "none")
    offset = 1 if stored_format == "gptq" else 0
    rule = StoredRule("int4", "gptq", ("scales",), max(group, 0), True, offset)
    return StoredQuantization(values.where, (rule,), values.names("modules_to_not_convert"), "")


def _awq(values: _Values) -> StoredQuantization:
    values.one_of("bits", (4,))
    values.one_of("zero_point", (True,), True)
    if str(values.get("version", "gemm")).lower() != "gemm":
        raise values.fail("version", "gemm")
    group = _group_size(values, "group_size")
    rule = StoredRule("int4", "awq", ("scales",), group, True)
    return StoredQuantization(values.where, (rule,), values.names("modules_to_not_convert"), "")


_METHODS: Mapping[str, Callable[[_Values], StoredQuantization]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
}
#: Formats of compressed-tensors: kind and size of a number, and who may share a scale.
_FORMATS = {
    "float-quantized": ("float", 8, ("tensor", "channel", "block")),
    "naive-quantized": ("float", 8, ("tensor", "channel", "block")),
    "int-quantized": ("int", 8, ("tensor", "channel")),
    "pack-quantized": ("int", 4, ("group", "channel")),
}


def _strict(scheme: str) -> Callable[[tuple[str, ...]], StoredRule]:
    return lambda targets: StoredRule(scheme, targets=targets, is_strict=True)


#: Groups of compressed-tensors that are a list of targets under the name of a scheme.
_PRESETS: Mapping[str, Callable[[tuple[str, ...]], StoredRule]] = {
    "FP8": _strict("fp8"),
    "FP8_DYNAMIC": _strict("fp8"),
    "FP8_BLOCK": _strict("fp8_block"),
    "INT8": _strict("int8"),
    "W8A8": _strict("int8"),
    "W4A16": lambda targets: _packed(128, True, targets),
    "W4A16_ASYM": lambda targets: _packed(128, False, targets),
}
