# SPDX-License-Identifier: Apache-2.0
"""A video pipeline of a published shape without weights.

    python benchmarks/python/omni_shapes.py --out build/wan_1_3b

writes a directory for `--load-format dummy` (Wan 2.1 T2V 1.3B: transformer and VAE as published; the text
encoder has one layer of the published width; with `--tiny` everything is narrow, which only shows the
way), for

    diffulex omni bench --model build/wan_1_3b --load-format dummy --vary ulysses_degree=2

`omni_parallel.py` writes it by itself, and compares the engine with the pipeline of diffusers alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from diffulex.omni._diffusers_compat import import_diffusers

#: As published for Wan-AI/Wan2.1-T2V-1.3B-Diffusers.
_TRANSFORMER = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 8960,
    "num_layers": 30,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
_TEXT_WIDTH = 4096
_TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "text_dim": 64,
    "ffn_dim": 64,
    "num_layers": 4,
}
_TINY_VAE = {"base_dim": 8}


def _tokenizer() -> Any:
    """One token per printable character."""
    from transformers import T5Tokenizer  # noqa: PLC0415 (slow)

    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    vocab += [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def build(out: Path, is_tiny: bool = False) -> None:
    """Writes `model_index.json`, configurations and the tokenizer."""
    diffusers = import_diffusers()
    from transformers import UMT5Config  # noqa: PLC0415

    transformer, vae = dict(_TRANSFORMER), {}
    if is_tiny:
        transformer, vae = {**transformer, **_TINY}, _TINY_VAE
    width = _TINY["text_dim"] if is_tiny else _TEXT_WIDTH
    tokenizer = _tokenizer()
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    text = UMT5Config(
        d_model=width,
        d_kv=64,
        d_ff=width * 5 // 2,
        num_heads=width // 64,
        num_layers=1,
        vocab_size=len(tokenizer),
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
    )
    for name, config in (
        ("transformer", {"_class_name": "WanTransformer3DModel", **transformer}),
        ("vae", {"_class_name": "AutoencoderKLWan", **vae}),
    ):
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    text.save_pretrained(out / "text_encoder")
    tokenizer.save_pretrained(out / "tokenizer")
    scheduler.save_pretrained(out / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="narrow: only shows the way")
    options = parser.parse_args()
    build(options.out, options.tiny)


if __name__ == "__main__":
    main()
