# SPDX-License-Identifier: Apache-2.0
"""Teach the demo model new words by reinforcement: GRPO with the engine as sampler, on a CPU.

    PYTHONPATH=python python examples/rl/grpo.py --table build/rl.md

Each round draws several answers to each of a few problems, rewards those whose last number is right,
and moves the model towards the answers that did better than the others of their problem. The engine
gets the new weights after each round, in place.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# Before installed packages: one of them is called `evaluate` as well.
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "train_demo"))

import torch
import torch.nn.functional as F
from torch import Tensor

import diffulex
from dataset import render_prompt
from diffulex import Diffulex, SamplingParams
from diffulex.bench.word_problems import Problem, is_correct
from model import SDARForCausalLM
from multitf import MultiTFSpec, make_batch
from shifted_problems import draw_problems

DEMO = Path(diffulex.__file__).parent / "assets" / "demo"
MAX_TOKENS = 32


@dataclass(frozen=True)
class Answer:
    """A drawn answer: the tokens of prompt and answer, and what it is worth within its group."""

    token_ids: list[int]
    prompt_len: int
    advantage: float


def sampling(temperature: float, seed: int) -> SamplingParams:
    """Parameters of answers, which end with their turn."""
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed)


def accuracy(engine: Diffulex, problems: list[Problem]) -> float:
    """Share of problems whose greedy answer ends with the right number."""
    prompts = [render_prompt(problem.question) for problem in problems]
    outputs = engine.generate(prompts, sampling(0.0, 0), summary=False)
    pairs = zip(problems, outputs, strict=True)
    return sum(is_correct(problem, output.text) for problem, output in pairs) / len(problems)


def draw_answers(
    engine: Diffulex, problems: list[Problem], group: int, temperature: float, seed: int
) -> tuple[list[Answer], float]:
    """`group` answers to each problem, those without an advantage left out, and the mean reward."""
    prompts = [render_prompt(problem.question) for problem in problems]
    outputs = engine.generate(prompts, sampling(temperature, seed), summary=False, n=group)
    answers, total = [], 0.0
    for index, problem in enumerate(problems):
        drawn = outputs[index * group : (index + 1) * group]
        rewards = [float(is_correct(problem, output.text)) for output in drawn]
        mean = sum(rewards) / group
        total += mean
        deviation = (mean * (1 - mean)) ** 0.5
        if deviation == 0:
            continue  # all are as good: nothing to learn
        answers += [
            Answer(
                [*output.prompt_token_ids, *output.token_ids],
                len(output.prompt_token_ids),
                (reward - mean) / deviation,
            )
            for output, reward in zip(drawn, rewards, strict=True)
            # Answers drawn at a high temperature are wrong in many ways, and improbable anyway: to push
            # them further away ruins the model without telling it what is right.
            if reward > mean
        ]
    return answers, total / len(problems)


def policy_loss(
    model: SDARForCausalLM, answers: list[Answer], end_of_turn: int, filler: int
) -> Tensor:
    """Minus the advantage times the estimated log-likelihood of each answer, averaged.

    The likelihood of an answer is estimated as in the training of the model: some of its positions are
    masked, under the visibility of a decoder with several blocks in flight, and the log-probabilities
    of what stood there are averaged.
    """
    size = model.config.block_size
    sequences = [[*answer.token_ids, end_of_turn] for answer in answers]
    prompt_lens = torch.tensor([answer.prompt_len for answer in answers])
    used = torch.tensor([len(ids) for ids in sequences])
    length = -(-int(used.max()) // size) * size
    tokens = torch.tensor([ids + [filler] * (length - len(ids)) for ids in sequences])
    noisy_len = length - int(prompt_lens.min()) // size * size
    spec = MultiTFSpec(size, noisy_len, model.config.mask_token_id, filler, num_filler_blocks=0)
    batch = make_batch(tokens, prompt_lens, used, spec)
    logits = model(batch.tokens, batch.positions, batch.mask, num_logit_rows=noisy_len)
    logprobs = -F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
    weights = batch.is_target.float()
    likelihood = (logprobs * weights).sum(1) / weights.sum(1).clamp(min=1.0)
    advantages = torch.tensor([answer.advantage for answer in answers])
    return -(advantages * likelihood).mean()


def train_round(
    model: SDARForCausalLM,
    optimizer: torch.optim.Optimizer,
    answers: list[Answer],
    special: tuple[int, int],
    batch: int,
) -> None:
    """One step of the optimiser for each `batch` of the answers, in random order."""
    order = torch.randperm(len(answers)).tolist()
    for start in range(0, len(order), batch):
        loss = policy_loss(model, [answers[i] for i in order[start : start + batch]], *special)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def run(options: argparse.Namespace) -> list[tuple[int, float, float, float]]:
    """Trains; rows of round, mean reward of the drawn answers, held-out accuracy, seconds so far."""
    torch.manual_seed(options.seed)
    model = SDARForCausalLM.load(DEMO).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    heldout = draw_problems("heldout", options.eval)
    known = {problem.question for problem in heldout}
    rows: list[tuple[int, float, float, float]] = []
    with Diffulex("demo", device="cpu", dtype="float32", max_num_reqs=64, num_pages=512) as engine:
        end_of_turn, filler = (
            engine.tokenizer.encode(text, add_special_tokens=False)[0]
            for text in ("<|im_end|>", "<|endoftext|>")
        )
        started = time.perf_counter()
        for number in range(options.rounds + 1):
            problems = draw_problems(f"{options.seed}/{number}", options.problems)
            problems = [problem for problem in problems if problem.question not in known]
            answers, reward = draw_answers(
                engine, problems, options.group, options.temperature, number
            )
            is_judged = number % options.eval_every == 0 or number == options.rounds
            if is_judged:
                row = (number, reward, accuracy(engine, heldout), time.perf_counter() - started)
                rows.append(row)
                print("round {}  reward {:.3f}  held out {:.3f}  {:.0f} s".format(*row), flush=True)
            if number < options.rounds and answers:
                train_round(model, optimizer, answers, (end_of_turn, filler), options.batch)
                engine.update_weights(model.state_dict())
    return rows


def table(rows: list[tuple[int, float, float, float]]) -> str:
    """The rows in markdown."""
    lines = ["| round | reward of drawn answers | held-out accuracy |", "| --- | --- | --- |"]
    lines += [
        f"| {n} | {100 * reward:.1f} % | {100 * score:.1f} % |" for n, reward, score, _ in rows
    ]
    return "\n".join(lines) + "\n"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line; the defaults are those of docs/rl.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--problems", type=int, default=24, help="problems of a round")
    parser.add_argument("--group", type=int, default=8, help="answers to each problem")
    # The model is sure of itself: at 1 nearly all answers to a problem are the same.
    parser.add_argument("--temperature", type=float, default=2.0, help="of drawn answers")
    parser.add_argument("--eval", type=int, default=100, help="held-out problems")
    parser.add_argument("--eval-every", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--batch", type=int, default=16, help="answers of a step of the optimiser")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", type=Path, help="write the curve as a table in markdown")
    return parser.parse_args(arguments)


def main() -> None:
    """Command line."""
    options = parse_arguments()
    rows = run(options)
    if options.table is not None:
        options.table.parent.mkdir(parents=True, exist_ok=True)
        options.table.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
