# SPDX-License-Identifier: Apache-2.0
"""Stock decoders of transformers that compute what each family computes, given the mask.

They read config.json and the tensors by themselves: nothing of this engine's description of a model is
used. No code of a checkpoint runs. The tests of the families compare with the same models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open

from diffulex.checkpoint.tensor_files import INDEX_FILE, SINGLE_FILE, read_index
from diffulex.verify.report import RuleError

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.verify.trajectory import Forward, Trajectory

__all__ = [
    "Reference",
    "block_mask",
    "build_model",
    "has_reference",
    "is_canvas",
    "is_shifted",
    "load_reference",
    "prompt_mask",
    "sees_prompt",
]

Tensors = dict[str, torch.Tensor]

_LLAMA_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"),
    *("rope_parameters", "attention_bias", "tie_word_embeddings", "max_position_embeddings"),
)
_MOE_KEYS = (
    *_LLAMA_KEYS,
    *("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob"),
)
_SDAR_MOE_KEYS = (*_MOE_KEYS, "num_experts", "decoder_sparse_step", "mlp_only_layers")
_GLM_KEYS = (*_MOE_KEYS, "n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace")
#: Parts of LLaDA2 names and what the GLM-4-MoE template calls them.
_GLM_NAMES = (
    ("word_embeddings", "embed_tokens"),
    ("attention.dense.", "self_attn.o_proj."),
    ("attention.query_layernorm.", "self_attn.q_norm."),
    ("attention.key_layernorm.", "self_attn.k_norm."),
    ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
)
#: The same of LLaDA and the Llama template, in the order in which they are replaced.
_LLADA_NAMES = (
    ("model.transformer.ff_out.", "lm_head."),
    ("model.transformer.", "model."),
    ("model.wte.", "model.embed_tokens."),
    ("model.ln_f.", "model.norm."),
    ("model.blocks.", "model.layers."),
    (".attn_norm.", ".input_layernorm."),
    (".ff_norm.", ".post_attention_layernorm."),
    (".q_proj.", ".self_attn.q_proj."),
    (".k_proj.", ".self_attn.k_proj."),
    (".v_proj.", ".self_attn.v_proj."),
    (".attn_out.", ".self_attn.o_proj."),
    (".ff_proj.", ".mlp.gate_proj."),
    (".up_proj.", ".mlp.up_proj."),
    (".ff_out.", ".mlp.down_proj."),
)
_IGNORED = ("rotary_emb.inv_freq", "vision", "visual")


def _picked(config: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: config[name] for name in names if config.get(name) is not None}
    # Without this key, or with 0, every head has its keys and values; the classes have another number.
    return {**found, "num_key_value_heads": _num_kv_heads(config)}


def _num_kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    found = _picked(config, _LLAMA_KEYS)
    found.pop("head_dim", None)  # this class derives it, and has biases on q, k and v only
    found.pop("attention_bias", None)
    return {"tie_word_embeddings": False, **found}


def _llada(config: Mapping[str, Any]) -> dict[str, Any]:
    if "d_model" not in config:  # stored as a Llama
        return _named(_LLAMA_KEYS)(config)
    heads = config["n_heads"]
    return {
        "vocab_size": config.get("embedding_size") or config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": config.get("mlp_hidden_size") or 4 * config["d_model"],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("n_kv_heads") or heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": config["rope_theta"],
        "tie_word_embeddings": config.get("weight_tying", True),
    }


def _glm(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    rope["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0)
    found = _picked(config, _GLM_KEYS)
    found.pop("rope_theta", None)
    return {
        **found,
        "head_dim": _head_dim(config),
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": config["num_shared_experts"],
        "rope_parameters": rope,
        "attention_bias": config.get("use_qkv_bias", False),
        "use_qk_norm": config.get("use_qk_norm", True),
        "num_mtp_layers": 0,
    }


def _head_dim(config: Mapping[str, Any]) -> int:
    heads: int = config["num_attention_heads"]
    return int(config.get("head_dim") or config["hidden_size"] // heads)


def _llada_tensors(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    if "d_model" not in config:
        return tensors
    renamed = {}
    for stored, tensor in tensors.items():
        name = stored
        for own, template in _LLADA_NAMES:
            name = name.replace(own, template)
        renamed[name] = tensor
    return renamed


def _glm_tensors(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """With q, k and v apart, and experts stacked."""
    sizes = [config["num_attention_heads"] * _head_dim(config)]
    sizes += 2 * [_num_kv_heads(config) * _head_dim(config)]
    renamed: Tensors = {}
    for stored, tensor in tensors.items():
        if "attention.query_key_value." in stored:
            for part, rows in zip("qkv", torch.split(tensor, sizes), strict=True):
                name = stored.replace("attention.query_key_value.", f"self_attn.{part}_proj.")
                renamed[name] = rows
            continue
        name = stored
        for own, template in _GLM_NAMES:
            name = name.replace(own, template)
        renamed[name] = tensor
    return _stacked_experts(config, renamed)


def _stacked_experts(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Tensors of single experts as the two that transformers holds for a layer."""
    one = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
    stacked = {name: tensor for name, tensor in tensors.items() if one.fullmatch(name) is None}
    layers: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = one.fullmatch(name)
        if match is not None:
            layers.setdefault(match[1], {})[match[3], int(match[2])] = tensor
    for prefix, parts in layers.items():
        rows = {
            part: torch.stack([parts[part, index] for index in range(len(parts) // 3)])
            for part in ("gate", "up", "down")
        }
        stacked[f"{prefix}gate_up_proj"] = torch.cat([rows["gate"], rows["up"]], 1)
        stacked[f"{prefix}down_proj"] = rows["down"]
    return stacked


def _as_stored(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How transformers computes a family.

    Attributes:
        template: start of the names of its classes.
        keywords: of the configuration class, from config.json.
        tensors: the checkpoint's under the names of the class.
        is_shifted: row i predicts token i + 1.
        sees_prompt: rows of the prompt see all of it, and blocks start at its end.
    """

    template: str
    keywords: Callable[[Mapping[str, Any]], dict[str, Any]]
    tensors: Callable[[Mapping[str, Any], Tensors], Tensors] = _as_stored
    is_shifted: bool = False
    sees_prompt: bool = False


def _named(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda config: {
        "tie_word_embeddings": False,
        **_picked(config, names),
        "head_dim": _head_dim(config),
    }


_RECIPES = {
    "dream": _Recipe("Qwen2", _qwen2, is_shifted=True, sees_prompt=True),
    "diffucoder": _Recipe("Qwen2", _qwen2, is_shifted=True, sees_prompt=True),
    "fast_dllm_v2": _Recipe("Qwen2", _qwen2, is_shifted=True),
    "dream_reasoner": _Recipe("Qwen3", _named(_LLAMA_KEYS)),
    "sdar": _Recipe("Qwen3", _named(_LLAMA_KEYS)),
    "stable_diffcoder": _Recipe("Llama", _named(_LLAMA_KEYS)),
    "llada": _Recipe("Llama", _llada, _llada_tensors, sees_prompt=True),
    "sdar_moe": _Recipe("Qwen3Moe", _named(_SDAR_MOE_KEYS), _stacked_experts),
    "llada2": _Recipe("Glm4Moe", _glm, _glm_tensors),
}
_CANVAS = "diffusion_gemma"


def has_reference(family: str) -> bool:
    """Whether transformers can compute the family."""
    return family in _RECIPES or family == _CANVAS


def is_shifted(family: str) -> bool:
    """Whether logits row i of the family predicts token i + 1."""
    return family in _RECIPES and _RECIPES[family].is_shifted


def sees_prompt(family: str) -> bool:
    """Whether rows of the prompt see all of it, and blocks start at its end."""
    return family in _RECIPES and _RECIPES[family].sees_prompt


def is_canvas(family: str) -> bool:
    """Whether the family writes a canvas, which is drawn."""
    return family == _CANVAS


def block_mask(num_tokens: int, block_size: int) -> torch.Tensor:
    """[n, n] bool: row i sees column j when j's block, counted from 0, is not later than i's."""
    block = torch.arange(num_tokens) // block_size
    return block[None, :] <= block[:, None]


def prompt_mask(num_tokens: int, prompt: int, block_size: int) -> torch.Tensor:
    """As `block_mask`, but the prompt is one block that comes first; others start at its end."""
    positions = torch.arange(num_tokens)
    block = torch.where(positions < prompt, 0, 1 + (positions - prompt) // block_size)
    return block[None, :] <= block[:, None]


def build_model(
    family: str, config: Mapping[str, Any], tensors: Tensors, dtype: torch.dtype = torch.float32
) -> Any:
    """The decoder of transformers for a family that fills masks, on the CPU.

    Args:
        config: content of config.json.
        tensors: of the checkpoint, under its names; converted to `dtype`.

    Raises:
        RuleError: it lacks a tensor, or has one too many.
    """
    return _built(_RECIPES[family], config, tensors, dtype)


def _built(recipe: _Recipe, config: Mapping[str, Any], tensors: Tensors, dtype: torch.dtype) -> Any:
    import transformers  # noqa: PLC0415 (slow to import)

    settings = getattr(transformers, f"{recipe.template}Config")(
        **recipe.keywords(config), attn_implementation="sdpa", use_cache=False
    )
    model = getattr(transformers, f"{recipe.template}ForCausalLM")(settings).to(dtype)
    state = {name: tensor.to(dtype) for name, tensor in recipe.tensors(config, tensors).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    allowed = {"lm_head.weight"} if settings.tie_word_embeddings else set()
    # A checkpoint without the vector means zeros.
    allowed |= {name for name in missing if name.endswith("e_score_correction_bias")}
    wrong = sorted({*missing} - allowed) + sorted(unexpected)
    if wrong:
        raise RuleError(
            f"expected the tensors of {type(model).__name__}, got another set: {wrong[0]}"
        )
    model.tie_weights()
    return model.eval()


class Reference(Protocol):
    """A model of transformers."""

    def logits(self, trajectory: Trajectory, forward: Forward, tokens: list[int]) -> torch.Tensor:
        """[rows, V] float32 on the CPU of the rows that a forward asks for, which saw `tokens`."""


def load_reference(
    family: str, directory: Path, dtype: torch.dtype, device: str, block_size: int
) -> Reference:
    """The model of transformers for a checkpoint.

    Raises:
        RuleError: it lacks a tensor, or has one too many.
    """
    if family == _CANVAS:
        return _CanvasReference(directory, dtype, device)
    return _MaskReference(_RECIPES[family], directory, dtype, device, block_size)


class _MaskReference:
    """Computes a whole sequence again under the mask of its blocks; no cache, no batch."""

    def __init__(
        self, recipe: _Recipe, directory: Path, dtype: torch.dtype, device: str, block_size: int
    ) -> None:
        self._recipe, self._block_size, self._device = recipe, block_size, device
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        model = _built(recipe, config, _read(directory, dtype), dtype)
        self._model = model.to(device)

    @torch.inference_mode()
    def logits(self, trajectory: Trajectory, forward: Forward, tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self._device)
        mask = self._mask(len(tokens), len(trajectory.prompt))[None, None].to(self._device)
        # Absolute positions of the rows are where they stand: nothing is left out before them.
        rows = [forward.positions[row] for row in forward.logits_rows]
        output = self._model(input_ids=ids, attention_mask=mask, use_cache=False)
        found: torch.Tensor = output.logits[0]
        return found[rows].float().cpu()

    def _mask(self, num_tokens: int, prompt: int) -> torch.Tensor:
        if self._recipe.sees_prompt:
            return prompt_mask(num_tokens, prompt, self._block_size)
        return block_mask(num_tokens, self._block_size)


class _CanvasReference:
    """DiffusionGemma of transformers; computes the first forward over each canvas."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: str) -> None:
        import transformers  # noqa: PLC0415 (slow to import)

        self._device = device
        model: Any = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
            directory, dtype=dtype, local_files_only=True, attn_implementation="eager"
        )
        self._model = model.eval().to(device)

    @torch.inference_mode()
    def logits(self, trajectory: Trajectory, forward: Forward, tokens: list[int]) -> torch.Tensor:
        from transformers import DynamicCache  # noqa: PLC0415 (slow to import)

        canvas = [forward.positions[row] for row in forward.logits_rows]
        cache = DynamicCache(config=self._model.config.text_config)
        output = self._model(
            input_ids=torch.tensor([tokens[: canvas[0]]], device=self._device),
            past_key_values=cache,
            decoder_input_ids=torch.tensor([tokens[canvas[0] :]], device=self._device),
        )
        found: torch.Tensor = output.logits[0]
        return found.float().cpu()


def _read(directory: Path, dtype: torch.dtype) -> Tensors:
    tensors: Tensors = {}
    index = directory / INDEX_FILE
    files = {directory / SINGLE_FILE}
    if index.is_file():
        files = set(read_index(index).values())
    for path in sorted(files):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                if not any(part in key for part in _IGNORED):
                    tensors[key] = file.get_tensor(key).to(dtype)
    return tensors
