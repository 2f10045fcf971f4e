# SPDX-License-Identifier: Apache-2.0
"""Judge a checkpoint of the zoo on the held-out problems with its own reference decoder.

PYTHONPATH=python python examples/train_zoo/judge.py examples/zoo/d2f_llada --count 100
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before installed packages: one of them is called `evaluate` as well.
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "train_demo"))

import torch
from tokenizers import Tokenizer

import dataset
from diffulex.bench import word_problems
from evaluate import format_scores, score
from objective import Objective, TokenIds
from objective_d2f import D2F, D2FOnGrid
from objective_d2f_dream import D2FDream
from objective_diffusion_gemma import DiffusionGemma
from objective_dmax import DMax
from objective_edit import Edit
from objective_fast_dllm_v2 import FastDLLMv2

if TYPE_CHECKING:
    pass

OBJECTIVES: dict[str, type[Objective]] = {
    objective.name: objective
    for objective in (D2F, D2FOnGrid, D2FDream, FastDLLMv2, Edit, DMax, DiffusionGemma)
}
MAX_LEVEL = 3
VALIDATION_COUNT = 500


def heldout_problems(count: int = word_problems.HELDOUT_COUNT) -> list[word_problems.Problem]:
    """The held-out problems of levels 1 to 3: the demo's generator, which cycles six levels."""
    cycles = math.ceil(count / MAX_LEVEL)
    drawn = word_problems.heldout_problems(cycles * word_problems.MAX_LEVEL)
    return [problem for problem in drawn if problem.level <= MAX_LEVEL][:count]


def validation_problems(count: int = VALIDATION_COUNT) -> list[word_problems.Problem]:
    """Problems on which settings are chosen: another seed of the generator, none of them held out."""
    excluded = {problem.question for problem in heldout_problems()}
    cycles = math.ceil(2 * count / MAX_LEVEL)
    seed = word_problems.HELDOUT_SEED + 1
    drawn = word_problems.heldout_problems(cycles * word_problems.MAX_LEVEL, seed)
    fit = (p for p in drawn if p.level <= MAX_LEVEL and p.question not in excluded)
    return list(itertools.islice(fit, count))


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def judge(
    objective: Objective,
    tokenizer: Tokenizer,
    device: torch.device,
    count: int,
    num_settings: int | None = None,
) -> list[dict[str, Any]]:
    """Run every setting on the first ``count`` held-out problems; prints one line each."""
    problems = heldout_problems()[:count]
    prompts = [
        tokenizer.encode(dataset.render_prompt(p.question), add_special_tokens=False).ids
        for p in problems
    ]
    objective.model.to(device).eval()
    reports = []
    for setting in objective.settings(device)[:num_settings]:
        started = time.perf_counter()
        scores = score(tokenizer, problems, setting.decode(prompts))
        report = {"setting": setting.name, **setting.parameters, **scores}
        report["seconds"] = time.perf_counter() - started
        print(format_scores(f"[{objective.name}] {setting.name}", report), flush=True)
        reports.append(report)
    return reports


def round_weights(model: torch.nn.Module) -> None:
    """Judge what was saved: bf16 weights, computed with in fp32."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(tensor.bfloat16())


def objective_of(directory: Path) -> Objective:
    """The objective whose shipped checkpoint has this strategy, with the directory's weights."""
    generation = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    wanted = generation["diffulex"]["decoding_strategy"]
    if generation["diffulex"].get("sampling_mode") == "edit" and wanted == "multi_bd":
        wanted = "edit"
    if generation["diffulex"].get("d2f_block_grid"):
        wanted = "d2f_grid"
    if json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"] == "Dream":
        wanted = "d2f_dream"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    objective = OBJECTIVES[wanted](TokenIds.of(tokenizer))
    objective.load(directory)
    return objective


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="checkpoint directory")
    parser.add_argument("--count", type=int, default=100, help="number of held-out problems")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", type=int, help="only so many settings, the default one first")
    parser.add_argument("--json", type=Path, help="write the report, wrong answers included")
    arguments = parser.parse_args()
    objective = objective_of(arguments.directory)
    tokenizer = Tokenizer.from_file(str(arguments.directory / "tokenizer.json"))
    device = torch.device(arguments.device)
    reports = judge(objective, tokenizer, device, arguments.count, arguments.settings)
    if arguments.json is not None:
        write_json(arguments.json, reports)


if __name__ == "__main__":
    main()
