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
#: Stock architectures that a family shares its layout with.
_TEMPLATES = {
    "llama": "stable_diffcoder",
    "qwen2": "dream",
    "qwen3": "sdar",
    "qwen3moe": "sdar_moe",
}
#: Least similarity of a class name that is taken for a variant of a known one.
_SIMILAR = 0.85
#: Part of a tensor name -> family that names its tensors so; the first hit wins.
_LAYOUT_MARKS = (
    (".attention.query_key_value.", "llada2"),
    (".transformer.blocks.", "llada"),
    (".layer_scalar", "diffusion_gemma"),
    (".mlp.experts.", "sdar_moe"),
    (".self_attn.q_norm.", "sdar"),
    (".self_attn.q_proj.bias", "dream"),
    (".self_attn.q_proj.weight", "stable_diffcoder"),
)
_EXPERT_KEYS = ("expert_intermediate_size", "num_experts", "n_routed_experts", "num_local_experts")
_DIFFCODER_MARKS = ("stable_diffcoder", "seed_diffcoder", "stablediffcoder", "seeddiffcoder")


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
    if model_type == "llama":
        return "stable_diffcoder" if _is_diffcoder(config) else None
    if model_type == "llada":
        return _llada_family(config)
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
    for mark, family in _LAYOUT_MARKS:
        if any(mark in f".{name}" for name in names):
            return family
    return None


def _similar_name(name: str) -> str | None:
    stem = _stem(name)
    if stem in _TEMPLATES:
        return _TEMPLATES[stem]
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


def _is_diffcoder(config: Mapping[str, Any]) -> bool:
    auto_map = config.get("auto_map")
    values = list(auto_map.values()) if isinstance(auto_map, dict) else []
    names = config.get("architectures")
    texts = [*(names if isinstance(names, list) else []), *values]
    return any(mark in str(text).lower() for text in texts for mark in _DIFFCODER_MARKS)


def _llada_family(config: Mapping[str, Any]) -> str:
    if any(config.get(key) for key in _EXPERT_KEYS):
        raise CheckpointError(
            "config.json: model_type 'llada': expected the dense LLaDA layout, "
            "got a mixture of experts (LLaDA-MoE), which is not supported"
        )
    return "llada"
