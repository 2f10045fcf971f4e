# SPDX-License-Identifier: Apache-2.0
"""config.json and tensor names of the published formats that the zoo writes and reads."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from transformer import MoEShape, Shape, Transformer

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

#: Parameter name of ``Transformer`` -> checkpoint name, as pattern and replacement.
LLADA_NAMES = (
    (r"embed_tokens\.weight", r"model.transformer.wte.weight"),
    (r"norm\.weight", r"model.transformer.ln_f.weight"),
    (
        r"layers\.(\d+)\.self_attn\.([qkv])_proj\.weight",
        r"model.transformer.blocks.\1.\2_proj.weight",
    ),
    (r"layers\.(\d+)\.self_attn\.o_proj\.weight", r"model.transformer.blocks.\1.attn_out.weight"),
    (r"layers\.(\d+)\.input_layernorm\.weight", r"model.transformer.blocks.\1.attn_norm.weight"),
    (
        r"layers\.(\d+)\.post_attention_layernorm\.weight",
        r"model.transformer.blocks.\1.ff_norm.weight",
    ),
    (r"layers\.(\d+)\.mlp\.gate_proj\.weight", r"model.transformer.blocks.\1.ff_proj.weight"),
    (r"layers\.(\d+)\.mlp\.up_proj\.weight", r"model.transformer.blocks.\1.up_proj.weight"),
    (r"layers\.(\d+)\.mlp\.down_proj\.weight", r"model.transformer.blocks.\1.ff_out.weight"),
)
QWEN_NAMES = ((r"(.*)", r"model.\1"),)
LLADA2_NAMES = (
    (r"embed_tokens\.weight", r"model.word_embeddings.weight"),
    (r"norm\.weight", r"model.norm.weight"),
    (r"layers\.(\d+)\.self_attn\.o_proj\.weight", r"model.layers.\1.attention.dense.weight"),
    (
        r"layers\.(\d+)\.self_attn\.q_norm\.weight",
        r"model.layers.\1.attention.query_layernorm.weight",
    ),
    (
        r"layers\.(\d+)\.self_attn\.k_norm\.weight",
        r"model.layers.\1.attention.key_layernorm.weight",
    ),
    (r"layers\.(\d+)\.mlp\.router\.weight", r"model.layers.\1.mlp.gate.weight"),
    (r"layers\.(\d+)\.mlp\.router\.expert_bias", r"model.layers.\1.mlp.gate.expert_bias"),
    (r"(layers\..*(?:layernorm|_proj)\.weight)", r"model.\1"),
)


def translate(name: str, table: tuple[tuple[str, str], ...]) -> str:
    """Checkpoint name of a parameter; a name that no pattern covers is an error."""
    for pattern, replacement in table:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return match.expand(replacement)
    raise ValueError(f"translate: expected a parameter name of the format, got {name}")


def common_fields(shape: Shape) -> dict[str, Any]:
    """Keys that every config.json of the zoo has."""
    return {
        "bos_token_id": shape.eos_token_id,
        "eos_token_id": shape.eos_token_id,
        "mask_token_id": shape.mask_token_id,
        "pad_token_id": shape.eos_token_id,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def llada_config(shape: Shape) -> dict[str, Any]:
    """LLaDA spells every field out, because its class defaults differ from its releases."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        **common_fields(shape),
        "activation_type": "silu",
        "alibi": False,
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_size": shape.block_size,
        "block_type": "llama",
        "d_model": shape.hidden_size,
        "embedding_dropout": 0.0,
        "embedding_size": shape.vocab_size,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "max_sequence_length": shape.max_position_embeddings,
        "mlp_hidden_size": shape.intermediate_size,
        "mlp_ratio": 4,
        "multi_query_attention": None,
        "n_heads": shape.num_attention_heads,
        "n_kv_heads": shape.num_key_value_heads,
        "n_layers": shape.num_hidden_layers,
        "residual_dropout": 0.0,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": shape.rope_theta,
        "scale_logits": False,
        "weight_tying": True,
    }


def template_fields(shape: Shape) -> dict[str, Any]:
    """Keys shared by the formats that follow the Llama and Qwen names."""
    return {
        **common_fields(shape),
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
    }


def fast_dllm_config(shape: Shape) -> dict[str, Any]:
    """Qwen2 template with the block size ``bd_size``."""
    return {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        **template_fields(shape),
        "bd_size": shape.block_size,
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
        "max_window_layers": shape.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def dream_config(shape: Shape) -> dict[str, Any]:
    """Qwen2 template; the block size is the one that its D2F training used."""
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        **template_fields(shape),
        "block_size": shape.block_size,
        "max_window_layers": shape.num_hidden_layers,
        "sliding_window": None,
        "use_mrope": False,
        "use_sliding_window": False,
    }


def llada2_config(shape: Shape) -> dict[str, Any]:
    """Bailing-MoE v2 template."""
    moe = shape.moe
    if moe is None:
        raise ValueError("llada2_config: expected a shape with experts, got none")
    return {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        **template_fields(shape),
        "block_size": shape.block_size,
        "first_k_dense_replace": moe.first_k_dense,
        "moe_intermediate_size": moe.expert_size,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": moe.shared_size,
        "n_group": moe.num_groups,
        "norm_head": False,
        "norm_topk_prob": True,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "num_shared_experts": 1,
        "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        "rotary_dim": shape.rotary_dim,
        "routed_scaling_factor": moe.scaling,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "topk_group": moe.top_groups,
        "use_bias": False,
        "use_qk_norm": shape.qk_norm,
        "use_qkv_bias": False,
        "use_sliding_window": False,
    }


def read_shape(fields: dict[str, Any]) -> Shape:
    """The shape that a config.json of the zoo describes."""
    ids = {
        "vocab_size": fields["vocab_size"],
        "mask_token_id": fields["mask_token_id"],
        "eos_token_id": fields["eos_token_id"],
        "rms_norm_eps": fields["rms_norm_eps"],
        "rope_theta": fields["rope_theta"],
    }
    if fields["model_type"] == "llada":
        head_dim = fields["d_model"] // fields["n_heads"]
        return Shape(
            **ids,
            block_size=fields["block_size"],
            hidden_size=fields["d_model"],
            intermediate_size=fields["mlp_hidden_size"],
            num_hidden_layers=fields["n_layers"],
            num_attention_heads=fields["n_heads"],
            num_key_value_heads=fields["n_kv_heads"],
            head_dim=head_dim,
            rotary_dim=head_dim,
            max_position_embeddings=fields["max_sequence_length"],
        )
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings",
    )  # fmt: skip
    ids |= {name: fields[name] for name in names}
    if fields["model_type"] in ("Fast_dLLM_Qwen", "Dream"):
        block_size = fields["bd_size" if "bd_size" in fields else "block_size"]
        return Shape(**ids, block_size=block_size, rotary_dim=fields["head_dim"], qkv_bias=True)
    moe = MoEShape(
        num_experts=fields["num_experts"],
        top_k=fields["num_experts_per_tok"],
        expert_size=fields["moe_intermediate_size"],
        shared_size=fields["moe_shared_expert_intermediate_size"],
        num_groups=fields["n_group"],
        top_groups=fields["topk_group"],
        scaling=fields["routed_scaling_factor"],
        first_k_dense=fields["first_k_dense_replace"],
    )
    return Shape(
        **ids,
        block_size=fields["block_size"],
        rotary_dim=fields["rotary_dim"],
        qk_norm=fields["use_qk_norm"],
        moe=moe,
    )


#: By model type: the fields of config.json, and the names of the tensors.
FORMATS = {
    "Dream": (dream_config, QWEN_NAMES),
    "Fast_dLLM_Qwen": (fast_dllm_config, QWEN_NAMES),
    "llada": (llada_config, LLADA_NAMES),
    "llada2_moe": (llada2_config, LLADA2_NAMES),
}
EXPERT_TENSORS = ("gate_proj", "up_proj", "down_proj")


def to_checkpoint(model: Transformer, model_type: str) -> dict[str, Tensor]:
    """Tensors under their published names; LLaDA2 fuses Q, K, V rows and splits the experts."""
    table = FORMATS[model_type][1]
    tensors: dict[str, Tensor] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        if model_type == "llada2_moe":
            layer = re.match(r"layers\.(\d+)\.", name)
            prefix = f"model.layers.{layer[1]}" if layer else ""
            if name.endswith("self_attn.q_proj.weight"):
                rows = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                tensors[f"{prefix}.attention.query_key_value.weight"] = torch.cat(rows)
                continue
            if name.endswith(("self_attn.k_proj.weight", "self_attn.v_proj.weight")):
                continue
            kind = name.rsplit(".", 1)[-1]
            if kind in EXPERT_TENSORS:
                for expert, matrix in enumerate(tensor):
                    tensors[f"{prefix}.mlp.experts.{expert}.{kind}.weight"] = matrix
                continue
        tensors[translate(name, table)] = tensor
    return {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous().clone()
        for name, tensor in tensors.items()
    }


def from_checkpoint(model: Transformer, tensors: dict[str, Tensor], model_type: str) -> None:
    """Fill the model from published names; every tensor must be used."""
    table, shape = FORMATS[model_type][1], model.shape
    left = dict(tensors)
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        if model_type == "llada2_moe":
            layer = re.match(r"layers\.(\d+)\.", name)
            prefix = f"model.layers.{layer[1]}" if layer else ""
            fused = re.search(r"self_attn\.([qkv])_proj\.weight$", name)
            if fused is not None:
                heads = (shape.num_attention_heads, *[shape.num_key_value_heads] * 2)
                rows = tensors[f"{prefix}.attention.query_key_value.weight"].split(
                    [count * shape.head_dim for count in heads]
                )
                left.pop(f"{prefix}.attention.query_key_value.weight", None)
                state[name] = rows["qkv".index(fused[1])]
                continue
            kind = name.rsplit(".", 1)[-1]
            if kind in EXPERT_TENSORS and shape.moe is not None:
                state[name] = torch.stack(
                    [
                        left.pop(f"{prefix}.mlp.experts.{expert}.{kind}.weight")
                        for expert in range(shape.moe.num_experts)
                    ]
                )
                continue
        state[name] = left.pop(translate(name, table))
    if left:
        raise ValueError(f"from_checkpoint: expected no further tensors, got {sorted(left)}")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})


def save_transformer(model: Transformer, model_type: str, directory: Path) -> None:
    """Write config.json and model.safetensors (bf16)."""
    fields = FORMATS[model_type][0](model.shape)
    text = json.dumps(fields, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    tensors = to_checkpoint(model, model_type)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_transformer(directory: Path) -> Transformer:
    """Read a checkpoint of ``save_transformer`` as fp32 weights."""
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model = Transformer(read_shape(fields))
    from_checkpoint(model, load_file(directory / "model.safetensors"), fields["model_type"])
    return model
