#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Answers every question of a file, many at once, and writes one JSON object per answer.

    python examples/python/batch.py questions.txt answers.jsonl
    python examples/python/batch.py questions.txt answers.jsonl --model examples/zoo/dmax_llada2

A question per line. Over a server the same is `diffulex run-batch`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from diffulex import Diffulex


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    questions = options.questions.read_text(encoding="utf-8").splitlines()
    with Diffulex(options.model) as engine:
        outputs = engine.generate(questions, use_chat_template=True, summary=False)
    with options.answers.open("w", encoding="utf-8") as file:
        for question, output in zip(questions, outputs, strict=True):
            row = {"question": question, "answer": output.text, "forwards": output.metrics.nfe}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{len(outputs)} answers, {outputs.tpf:.2f} tokens per forward")


if __name__ == "__main__":
    main()
