# SPDX-License-Identifier: Apache-2.0
"""Which family a checkpoint belongs to, from its configuration and tensor names."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from diffulex.errors import CheckpointError
from diffulex.families.listing import FAMILIES, family_named

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


#: DiffuCoder's files cannot be told from Dream's; either name is accepted for both.
_SAME_FILES = {"diffucoder": "dream"}
#: Endings of class names that say nothing about the architecture.
_CLASS_ENDING = re.compile(r"(ForCausalLM|ForBlockDiffusion|ForDiffusionLM|ModelLM|Model|LM)$")
#: Least similarity of a class name that is taken for a variant of a known one.
_SIMILAR = 0.85


def family_of_name(model_name: str) -> str | None:
    """Family that a `model_name` option stands for, or None when no built-in family has it."""
    family = family_named(model_name)
    return None if family is None else family.name


def first_architecture(config: Mapping[str, Any]) -> str | None:
    """``architectures[0]``, if the configuration has one."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return None


def detect_family(
    config: Mapping[str, Any], tensor_names: Callable[[], Collection[str]]
) -> str | None:
    """Built-in family of a configuration, or None when it is none of them.

    Args:
        config: parsed ``config.json``.
        tensor_names: gives the checkpoint's tensor names; called only where the configuration
            alone is ambiguous.

    Raises:
        CheckpointError: the layout shares a family's `model_type` but is a different model.
    """
    architecture = first_architecture(config)
    model_type = config.get("model_type")
    if model_type == "Dream" or architecture in ("DreamModel", "DreamForCausalLM"):
        return _dream_family(architecture, tensor_names)
    # Models of other kinds share these types; what their families deny belongs to no other.
    asked = [
        item for item in FAMILIES if item.is_own is not None and model_type in item.model_types
    ]
    if asked:
        return next((item.name for item in asked if item.is_own and item.is_own(config)), None)
    for family in FAMILIES:
        if architecture is not None and architecture in family.architectures:
            return family.name
    for family in FAMILIES:
        if model_type in family.model_types:
            return family.name
    return None


def matches(model_name: str, family: str) -> bool:
    """Whether the option `model_name` may be used for a checkpoint of `family`."""
    named = family_of_name(model_name)
    return named == family or (named is not None and _SAME_FILES.get(named) == family)


def nearest_family(
    config: Mapping[str, Any], tensor_names: Callable[[], Collection[str]]
) -> str | None:
    """Family whose layout an unknown checkpoint resembles most, for an error message."""
    names = tensor_names()
    for name in (first_architecture(config), config.get("model_type")):
        family = _similar_name(name) if isinstance(name, str) else None
        if family == "dream" and any(".self_attn.q_norm." in item for item in names):
            return "dream_reasoner"
        if family is not None:
            return family
    layouts = [(item.layout, item.name) for item in FAMILIES if item.layout is not None]
    found = [
        (layout.rank, family)
        for layout, family in layouts
        if any(layout.mark in f".{name}" for name in names)
    ]
    return max(found)[1] if found else None


def _similar_name(name: str) -> str | None:
    stem = _stem(name)
    for family in FAMILIES:
        if stem == family.template:
            return family.name
    known: dict[str, str] = {}
    for family in FAMILIES:
        for architecture in family.architectures:
            known.setdefault(_stem(architecture), family.name)
    # Longest first, so that a longer name is not taken for a variant of a shorter one.
    for other in sorted(known, key=len, reverse=True):
        if stem.startswith(other):
            return known[other]
    close = difflib.get_close_matches(stem, known, n=1, cutoff=_SIMILAR)
    return known[close[0]] if close else None


def _stem(name: str) -> str:
    return re.sub("[^a-z0-9]", "", _CLASS_ENDING.sub("", name).lower())


def _dream_family(architecture: str | None, tensor_names: Callable[[], Collection[str]]) -> str:
    if architecture == "DreamForCausalLM":
        return "dream_reasoner"
    names = tensor_names()
    if any(name.endswith(".self_attn.q_norm.weight") for name in names):
        return "dream_reasoner"
    if names and not any(name.endswith(".self_attn.q_proj.bias") for name in names):
        raise CheckpointError(
            "checkpoint: model_type 'Dream': expected tensors .self_attn.q_proj.bias (dream) or "
            ".self_attn.q_norm.weight (dream_reasoner), got neither"
        )
    return "dream"
