# SPDX-License-Identifier: Apache-2.0
"""An untrained `QwenImagePipeline` of a few million parameters, tokenizer included."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from diffulex.omni.bench.scenes import words

#: The pipeline's own text around a prompt; it drops the first 34 tokens of the encoding.
PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity,"
    " text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_LEN = 34
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Sizes:
    """What decides the number of parameters; the defaults are the shipped model's."""

    layers: int = 5
    heads: int = 4
    head_dim: int = 32
    text_layers: int = 3
    text_dim: int = 128
    latent_channels: int = 16
    vae_width: int = 24


#: Trains in seconds on a CPU, and draws nothing.
TINY = Sizes(layers=1, heads=2, text_layers=1, text_dim=64, latent_channels=4, vae_width=8)


def tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE whose merges give every word of the grammar one token.

    Raises:
        RuntimeError: the pipeline's prefix does not take the number of tokens that it drops.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Qwen2Tokenizer(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = base._tokenizer.normalizer
    bpe.pre_tokenizer = base._tokenizer.pre_tokenizer
    plain = PREFIX
    for token in _SPECIAL:
        plain = plain.replace(token, "")
    corpus = [plain, "assistant"]
    for word in words():
        corpus += [word, " " + word] * 50
    trainer = trainers.BpeTrainer(
        vocab_size=900, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus * 3, trainer)
    trained = json.loads(bpe.to_str())["model"]
    vocab = {**trained["vocab"]}
    for token in _SPECIAL:
        vocab[token] = len(vocab)
    result = Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge) for merge in trained["merges"]])
    result.add_special_tokens({"additional_special_tokens": list(_SPECIAL[1:])})
    length = len(result(PREFIX)["input_ids"])
    if length != PREFIX_LEN:
        raise RuntimeError(f"tokenizer: expected {PREFIX_LEN} tokens of the prefix, got {length}")
    return result


def pipeline(sizes: Sizes, seed: int = 0) -> QwenImagePipeline:
    """The pipeline with random weights, float32, on the CPU; one latent cell is 4 x 4 pixels."""
    torch.manual_seed(seed)
    vocabulary = tokenizer()
    channels = sizes.latent_channels
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * channels,
        out_channels=channels,
        num_layers=sizes.layers,
        attention_head_dim=sizes.head_dim,
        num_attention_heads=sizes.heads,
        joint_attention_dim=sizes.text_dim,
        axes_dims_rope=(sizes.head_dim // 4, sizes.head_dim * 3 // 8, sizes.head_dim * 3 // 8),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=sizes.vae_width,
        z_dim=channels,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
    )
    # The vision tower is part of the class and never runs.
    text_encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "hidden_size": sizes.text_dim,
                "intermediate_size": 2 * sizes.text_dim,
                "num_hidden_layers": sizes.text_layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": _mrope_section(sizes.text_dim // 4),
                    "rope_theta": 1e4,
                },
                "vocab_size": len(vocabulary),
                "tie_word_embeddings": True,
                "max_position_embeddings": 512,
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": sizes.text_dim,
                "fullatt_block_indexes": [0],
            },
            tie_word_embeddings=True,
        )
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    return QwenImagePipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=vocabulary,
        transformer=transformer,
    )


def _mrope_section(head_dim: int) -> list[int]:
    """How many rotary pairs time, height and width have: a quarter and the rest in halves."""
    pairs = head_dim // 2
    time = pairs // 4
    height = (pairs - time) // 2
    return [time, height, pairs - time - height]
