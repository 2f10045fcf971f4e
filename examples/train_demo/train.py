# SPDX-License-Identifier: Apache-2.0
"""Train the bundled ``demo`` model: MultiTF block diffusion on synthetic word problems.

    PYTHONPATH=python python examples/train_demo/train.py --out build/demo --device cuda --compile \\
        --eval 1000 --sweep

writes a complete checkpoint directory (config, weights in bf16, tokenizer, chat template, generation
config, held-out problems) and judges it with the reference decoder.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import dataset
from diffulex.bench import problem_file, word_problems
from evaluate import REQUIRED, SWEEP, evaluate_directory
from model import ModelConfig, SDARForCausalLM
from multitf import MultiTFSpec, make_batch
from training_loop import LoopOptions, run_steps, weighted_cross_entropy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

#: Rows of the clean copy and of the noisy copy; multiples of the block size.
CLEAN_LEN = 168
NOISY_LEN = 88


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line; the defaults are those of the published checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eval", type=int, default=0, help="held-out problems to judge at the end")
    parser.add_argument("--sweep", action="store_true", help="judge at more settings")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument(
        "--max-values",
        type=int,
        nargs=word_problems.MAX_LEVEL,
        default=word_problems.DEFAULT_DIFFICULTY.max_values,
        help="largest number of the problems, by level",
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=640)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args(arguments)


class TrainingLoss(torch.nn.Module):
    """Cross entropy on the masked response positions of the noisy copy, averaged over them."""

    def __init__(self, model: SDARForCausalLM, noisy_len: int) -> None:
        super().__init__()
        self.model = model
        self.noisy_len = noisy_len

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, targets: Tensor, is_target: Tensor
    ) -> Tensor:
        logits = self.model(tokens, positions, mask, num_logit_rows=self.noisy_len)
        return weighted_cross_entropy(logits, targets, is_target)


def train(
    model: SDARForCausalLM,
    batches: Iterator[dataset.Sequences],
    spec: MultiTFSpec,
    arguments: argparse.Namespace,
) -> list[float]:
    """Run all steps and return the loss of each."""
    device = torch.device(arguments.device)
    model.to(device).train()
    loss_module: torch.nn.Module = TrainingLoss(model, spec.noisy_len)
    if arguments.compile:
        loss_module = torch.compile(loss_module)  # type: ignore[assignment]
    torch.manual_seed(arguments.seed)

    def compute_loss(tokens: Tensor, prompt_len: Tensor, used_len: Tensor) -> Tensor:
        batch = make_batch(tokens, prompt_len, used_len, spec)
        loss: Tensor = loss_module(
            batch.tokens, batch.positions, batch.mask, batch.targets, batch.is_target
        )
        return loss

    options = LoopOptions(
        steps=arguments.steps,
        peak_lr=arguments.lr,
        warmup=arguments.warmup,
        log_every=arguments.log_every,
    )
    return run_steps(model, batches, compute_loss, options)


def write_generation_config(directory: Path, tokenizer: Tokenizer, block_size: int) -> None:
    """generation_config.json: stop ids, and the decoding defaults of the model."""
    end_of_text = dataset.token_id(tokenizer, dataset.END_OF_TEXT)
    fields = {
        "eos_token_id": [dataset.token_id(tokenizer, dataset.TURN_END), end_of_text],
        "pad_token_id": end_of_text,
        "do_sample": False,
        "max_new_tokens": 96,
        "diffulex": {
            "decoding_strategy": "multi_bd",
            "block_size": block_size,
            "buffer_size": 4,
            "decoding_thresholds": {
                "add_block_threshold": 0.1,
                "semi_complete_threshold": 0.9,
                "accept_threshold": 0.95,
            },
        },
    }
    text = json.dumps(fields, indent=2) + "\n"
    (directory / "generation_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Draw the data, train, save, judge."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    difficulty = word_problems.Difficulty(max_values=tuple(arguments.max_values))
    tokenizer = dataset.build_tokenizer(difficulty=difficulty)
    heldout = word_problems.heldout_problems(difficulty=difficulty)
    problem_file.save_problems(heldout, arguments.out / "heldout.jsonl")
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        mask_token_id=dataset.token_id(tokenizer, dataset.MASK),
        eos_token_id=dataset.token_id(tokenizer, dataset.END_OF_TEXT),
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
    )
    dataset.save_tokenizer(tokenizer, arguments.out, config.max_position_embeddings)
    write_generation_config(arguments.out, tokenizer, config.block_size)

    sequence_spec = dataset.SequenceSpec(
        seed=arguments.seed,
        length=CLEAN_LEN,
        block_size=config.block_size,
        max_noisy_len=NOISY_LEN,
        tokenizer_json=tokenizer.to_str(),
        excluded=frozenset(word_problems.question_hash(p.question) for p in heldout),
        difficulty=difficulty,
    )
    pool = dataset.start_workers(arguments.workers)
    batches = dataset.iterate_batches(pool, sequence_spec, arguments.batch, arguments.steps)

    model = SDARForCausalLM(config)
    model.initialise(arguments.seed)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters} parameters, device {arguments.device}", flush=True)
    if arguments.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
        # The explicit mask needs the memory-efficient kernel; pin it instead of leaving a choice.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_flash_sdp(False)
    spec = MultiTFSpec(
        block_size=config.block_size,
        noisy_len=NOISY_LEN,
        mask_token_id=config.mask_token_id,
        filler_token_id=config.eos_token_id,
    )
    losses = train(model, batches, spec, arguments)
    pool.terminate()
    model.save(arguments.out)
    print(f"saved {arguments.out} after {time.perf_counter() - started:.1f} s", flush=True)
    (arguments.out / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    if arguments.eval:
        torch.set_float32_matmul_precision("highest")
        settings = REQUIRED + (SWEEP if arguments.sweep else ())
        reports = evaluate_directory(
            arguments.out, arguments.eval, torch.device(arguments.device), settings
        )
        text = json.dumps(reports, indent=1) + "\n"
        (arguments.out / "evaluation.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
