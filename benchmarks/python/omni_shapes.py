# SPDX-License-Identifier: Apache-2.0
"""A video pipeline of a published shape without weights, and what diffusers alone takes for it.

    python benchmarks/python/omni_shapes.py --out build/wan_1_3b --time --steps 8

writes a directory for `--load-format dummy` (Wan 2.1 T2V 1.3B: transformer and VAE as published; the text
encoder has one layer of the published width; with `--tiny` everything is narrow, which only shows the
way). `--time` loads it, as the engine does, and calls the
pipeline of diffusers itself; the engine's figures for the same request come from

    diffulex omni bench --model build/wan_1_3b --load-format dummy --vary ulysses_degree=2
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
import time
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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a request with the pipeline of diffusers alone, on one device."""
    import torch  # noqa: PLC0415

    from diffulex.omni.config import OmniDiffusionConfig  # noqa: PLC0415
    from diffulex.omni.loader import load_pipeline  # noqa: PLC0415

    config = OmniDiffusionConfig.from_kwargs(
        model=str(options.out), load_format="dummy", device=options.device
    )
    pipeline = load_pipeline(config).pipeline
    is_cuda = options.device != "cpu"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(options.repeat + 1):
        start = time.perf_counter()
        for number in range(options.n):
            pipeline(
                prompt=options.prompt,
                negative_prompt="",
                height=options.height,
                width=options.width,
                num_frames=options.num_frames,
                num_inference_steps=options.steps,
                generator=torch.Generator().manual_seed(number),
            )
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "setting": "diffusers alone",
        "request_s": statistics.median(seconds[1:]),
        "first_s": seconds[0],
        "peak_MiB": torch.cuda.max_memory_allocated() / 2**20 if is_cuda else None,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return value


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line with the options of a request and of its model."""
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", default="a red circle left of a blue square")
    parser.add_argument("--tiny", action="store_true", help="narrow: only shows the way")
    parser.add_argument("--height", type=_count, default=480)
    parser.add_argument("--width", type=_count, default=832)
    parser.add_argument("--num-frames", type=_count, default=33)
    parser.add_argument("--steps", type=_count, default=8)
    parser.add_argument("--repeat", type=_count, default=1)
    options = parser.parse_args()
    if options.height % 16 or options.width % 16 or (options.num_frames - 1) % 4:
        parser.error(
            "expected height and width in multiples of 16, frames in multiples of 4 plus 1"
        )
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time", action="store_true", help="call the pipeline of diffusers itself")
    parser.add_argument("-n", type=_count, default=1, help="videos of a request")
    options = parse(parser)
    build(options.out, options.tiny)
    if options.time:
        print(json.dumps(measure(options)), flush=True)


if __name__ == "__main__":
    main()
