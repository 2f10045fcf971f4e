# SPDX-License-Identifier: Apache-2.0
"""Answers of exported bundles by the C++ program: how many are exact, and how many are those of the first.

    python benchmarks/python/bench_edge_answers.py X-none X-8da8w X-8da4w --data FILE --output FILE

One request after the other, greedy, on one thread, with the settings that stand in each bundle. It counts what
`diffulex edge eval` counts, in less of the processor's time, where the program answers as the engine does over
the same bundle (bench_edge_runner.py).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.bench.evaluate import read_problems, wilson_interval
from diffulex.bench.word_problems import is_correct
from diffulex.checkpoint.tokenizer import Tokenizer
from diffulex_edge.bundle import read_bundle

if TYPE_CHECKING:
    from diffulex.bench.word_problems import Problem


def processor() -> str:
    """Name of the processor, as Linux gives it, or the machine's kind."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def answers_of(runner: str, bundle: Path, problems: list[Problem]) -> list[dict[str, Any]]:
    """What the program says of every problem, in their order."""
    tokenizer = Tokenizer.from_dir(bundle)
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    prompts = [" ".join(map(str, tokenizer.apply_chat_template(chat))) for chat in chats]
    command = [runner, str(bundle), "--ids", "-", "--json", "--threads", "1"]
    result = subprocess.run(
        command, input="\n".join(prompts), stdout=subprocess.PIPE, text=True, check=False
    )
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    if result.returncode or len(answers) != len(problems):
        raise SystemExit(
            f"{runner}: expected {len(problems)} answers of {bundle}, got {len(answers)}"
            f" and exit status {result.returncode}"
        )
    return answers


def report(runner: str, bundles: list[Path], problems: list[Problem]) -> list[dict[str, Any]]:
    """One row a bundle; the first is what the others are compared with."""
    rows: list[dict[str, Any]] = []
    first: list[list[int]] = []
    for path in bundles:
        facts, tokenizer = read_bundle(path), Tokenizer.from_dir(path)
        answers = [answer["token_ids"] for answer in answers_of(runner, path, problems)]
        first = first or answers
        exact = sum(
            is_correct(problem, tokenizer.decode(ids))
            for problem, ids in zip(problems, answers, strict=True)
        )
        rows.append(
            {
                "bundle": path.name,
                "family": facts.facts.get("model_type"),
                "quant": facts.quant,
                "file_bytes": facts.program_bytes,
                "problems": len(problems),
                "exact": exact,
                "wilson_95": list(wilson_interval(exact, len(problems))),
                "same_answers": sum(a == b for a, b in zip(answers, first, strict=True)),
                "completion_tokens": sum(map(len, answers)),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Prints a row a bundle, and appends them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--runner", default="diffulex-edge-run")
    parser.add_argument("--data", help="JSON lines with question and answer [held-out set]")
    parser.add_argument("--limit", type=int, help="only the first problems")
    parser.add_argument("--output", type=Path, help="JSON list to append to")
    options = parser.parse_args()
    problems = read_problems(options.data)[: options.limit]
    rows = report(options.runner, options.bundles, problems)
    if options.output is not None:
        is_new = not options.output.is_file()
        found = [] if is_new else json.loads(options.output.read_text(encoding="utf-8"))
        names = " ".join(path.name for path in options.bundles)
        data = "" if options.data is None else f" --data {options.data}"
        environment = {
            "command": f"python benchmarks/python/bench_edge_answers.py {names}{data}",
            "date": datetime.now(UTC).date().isoformat(),
            "processor": processor(),
        }
        content = [*found, {"environment": environment, "rows": rows}]
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
