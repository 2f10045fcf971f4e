# SPDX-License-Identifier: Apache-2.0
"""Train one model of the zoo and judge it with its own reference decoder.

    PYTHONPATH=python python examples/train_zoo/train.py --objective d2f --out build/d2f_llada \\
        --device cuda --compile --eval 1000

writes a complete checkpoint directory (config, weights in bf16, tokenizer, chat template, generation
config), the losses and the evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before installed packages: one of them is called `evaluate` as well.
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "train_demo"))

import torch

import dataset
from diffulex.bench import word_problems
from judge import OBJECTIVES, heldout_problems, judge, round_weights, write_json
from objective import Objective, TokenIds
from training_loop import LoopOptions, run_steps

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LEVEL_WEIGHTS = (0.4, 0.8, 1.8, 0.0, 0.0, 0.0)
MAX_MODEL_LEN = 512


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line; the defaults are those of the published checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--objective", choices=sorted(OBJECTIVES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="end training by then")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eval", type=int, default=0, help="held-out problems to judge at the end")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--init", type=Path, help="second stage: checkpoint (or its parent)")
    parser.add_argument("--layers", type=int, help="fewer layers than the published shape")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-losses", type=Path, help="write the loss curve here as well")
    return parser.parse_args(arguments)


def smoothed(losses: list[float], num_points: int = 200) -> dict[str, Any]:
    """A short curve: means over equal stretches of steps."""
    stretch = max(1, math.ceil(len(losses) / num_points))
    points = [losses[start : start + stretch] for start in range(0, len(losses), stretch)]
    means = [round(sum(part) / len(part), 5) for part in points]
    return {"steps": len(losses), "steps_per_point": stretch, "loss": means}


def save_checkpoint(objective: Objective, tokenizer: Tokenizer, directory: Path) -> None:
    """Model, tokenizer and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    objective.save(directory)
    dataset.save_tokenizer(tokenizer, directory, MAX_MODEL_LEN)
    ids = objective.ids
    fields = {
        "eos_token_id": list(ids.stop_ids),
        "pad_token_id": ids.end_of_text,
        "do_sample": False,
        "max_new_tokens": 96,
        **objective.engine_defaults(),
    }
    text = json.dumps(fields, indent=2) + "\n"
    (directory / "generation_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Draw the data, train, save, judge."""
    arguments = parse_arguments()
    started = time.perf_counter()
    tokenizer = dataset.build_tokenizer()
    torch.manual_seed(arguments.seed)
    objective = OBJECTIVES[arguments.objective](TokenIds.of(tokenizer), arguments.layers)
    objective.model.initialise(arguments.seed)
    heldout = heldout_problems()
    sequence_spec = dataset.SequenceSpec(
        seed=arguments.seed,
        length=objective.length,
        block_size=objective.block_size,
        max_noisy_len=objective.max_noisy_len,
        tokenizer_json=tokenizer.to_str(),
        excluded=frozenset(word_problems.question_hash(p.question) for p in heldout),
        level_weights=LEVEL_WEIGHTS,
    )
    pool = dataset.start_workers(arguments.workers)
    batches = dataset.iterate_batches(pool, sequence_spec, arguments.batch, arguments.steps)
    num_parameters = sum(parameter.numel() for parameter in objective.model.parameters())
    label = f"[{objective.name}] "
    print(f"{label}{num_parameters} parameters, device {arguments.device}", flush=True)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        # The explicit mask needs the memory-efficient kernel; pin it instead of leaving a choice.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_flash_sdp(False)
    objective.model.to(device).train()
    if arguments.init is not None:
        is_checkpoint = (arguments.init / "config.json").exists()
        objective.load(arguments.init if is_checkpoint else arguments.init / objective.directory)
        objective.is_second_stage = True
    if arguments.compile:
        objective.compile()
    losses = run_steps(
        objective.model,
        batches,
        objective.compute_loss,
        LoopOptions(
            steps=arguments.steps,
            peak_lr=objective.peak_lr if arguments.lr is None else arguments.lr,
            warmup=arguments.warmup,
            log_every=arguments.log_every,
            label=label,
            max_seconds=arguments.max_seconds,
        ),
        objective.after_step,
    )
    pool.terminate()
    save_checkpoint(objective, tokenizer, arguments.out)
    write_json(arguments.out / "losses.json", smoothed(losses))
    print(f"{label}saved after {time.perf_counter() - started:.1f} s", flush=True)
    if arguments.eval:
        torch.set_float32_matmul_precision("highest")
        round_weights(objective.model)
        reports = judge(objective, tokenizer, device, arguments.eval)
        for report in reports:
            report["wrong"] = report["wrong"][:20]
        write_json(arguments.out / "evaluation.json", reports)


if __name__ == "__main__":
    main()
