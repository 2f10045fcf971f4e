# SPDX-License-Identifier: Apache-2.0
"""Judge a demo checkpoint on its held-out problems with the reference decoder.

PYTHONPATH=python python examples/train_demo/evaluate.py DIRECTORY --count 100
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from dataset import END_OF_TEXT, TURN_END, render_prompt, token_id
from diffulex.bench import problem_file, word_problems
from model import SDARForCausalLM
from reference_decoder import Completion, DecodingConfig, decode


@dataclass(frozen=True)
class Setting:
    """One row of the report."""

    buffer_size: int
    accept_threshold: float
    add_block_threshold: float


#: The two settings that the model has to satisfy, then a sweep that shows the trade-off.
REQUIRED = (Setting(1, 0.95, 0.1), Setting(4, 0.95, 0.1))
SWEEP = (
    Setting(2, 0.95, 0.1),
    Setting(4, 0.95, 0.5),
    Setting(4, 0.95, 1.0),
    *(Setting(num, accept, 0.1) for accept in (0.99, 0.9, 0.8, 0.6, 0.4) for num in (1, 4)),
)


def evaluate(
    model: SDARForCausalLM,
    tokenizer: Tokenizer,
    problems: list[word_problems.Problem],
    setting: Setting,
    device: torch.device,
) -> dict[str, Any]:
    """Decode all problems at one setting; accuracy (total and by level), TPF, NFE, wrong answers."""
    config = DecodingConfig(
        block_size=model.config.block_size,
        mask_token_id=model.config.mask_token_id,
        stop_ids=(token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)),
        buffer_size=setting.buffer_size,
        accept_threshold=setting.accept_threshold,
        add_block_threshold=setting.add_block_threshold,
        max_model_len=model.config.max_position_embeddings,
    )
    prompts = [
        tokenizer.encode(render_prompt(problem.question), add_special_tokens=False).ids
        for problem in problems
    ]
    started = time.perf_counter()
    completions: list[Completion] = decode(
        model, prompts, config, device=device, num_candidates=tokenizer.get_vocab_size()
    )
    seconds = time.perf_counter() - started
    return {**asdict(setting), **score(tokenizer, problems, completions), "seconds": seconds}


def score(
    tokenizer: Tokenizer,
    problems: list[word_problems.Problem],
    completions: list[Completion],
) -> dict[str, Any]:
    """Accuracy (total and by level), TPF, NFE and the wrong answers."""
    total, correct = Counter[int](), Counter[int]()
    wrong = []
    for problem, completion in zip(problems, completions, strict=True):
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        total[problem.level] += 1
        if word_problems.is_correct(problem, text):
            correct[problem.level] += 1
        else:
            wrong.append({"question": problem.question, "expected": problem.solution, "got": text})
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    num_forwards = sum(completion.nfe for completion in completions)
    return {
        "count": len(problems),
        "accuracy": sum(correct.values()) / len(problems),
        "accuracy_by_level": {level: correct[level] / total[level] for level in sorted(total)},
        "tpf": num_tokens / num_forwards,
        "mean_nfe": num_forwards / len(problems),
        "mean_tokens": num_tokens / len(problems),
        "wrong": wrong,
    }


def format_row(report: dict[str, Any]) -> str:
    """One line of the printed table."""
    name = (
        f"N={report['buffer_size']} accept={report['accept_threshold']:.2f} "
        f"add={report['add_block_threshold']:.2f}"
    )
    return format_scores(name, report)


def format_scores(name: str, report: dict[str, Any]) -> str:
    """The results of one setting in one line."""
    by_level = " ".join(
        f"L{level} {100 * share:5.1f}" for level, share in report["accuracy_by_level"].items()
    )
    return (
        f"{name}: exact {100 * report['accuracy']:5.1f} %  "
        f"TPF {report['tpf']:.2f}  NFE {report['mean_nfe']:.1f}  "
        f"tokens {report['mean_tokens']:.1f}  [{by_level}]  {report['seconds']:.1f} s"
    )


def evaluate_directory(
    directory: Path,
    count: int,
    device: torch.device,
    settings: tuple[Setting, ...],
    dtype: torch.dtype = torch.float32,
) -> list[dict[str, Any]]:
    """Load a checkpoint directory, run every setting on the first ``count`` problems, print rows."""
    model = SDARForCausalLM.load(directory).to(device=device, dtype=dtype).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    problems = problem_file.load_problems(directory / "heldout.jsonl")[:count]
    reports = []
    for setting in settings:
        reports.append(evaluate(model, tokenizer, problems, setting, device))
        print(format_row(reports[-1]), flush=True)
    return reports


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="checkpoint directory with heldout.jsonl")
    parser.add_argument("--count", type=int, default=100, help="number of held-out problems")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sweep", action="store_true", help="also the settings of the sweep")
    parser.add_argument("--json", type=Path, help="write the report, wrong answers included")
    arguments = parser.parse_args()
    settings = REQUIRED + (SWEEP if arguments.sweep else ())
    reports = evaluate_directory(
        arguments.directory,
        arguments.count,
        torch.device(arguments.device),
        settings,
        getattr(torch, arguments.dtype),
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
