# SPDX-License-Identifier: Apache-2.0
"""Exports a model to a program for small devices and asks both the same question.

    pip install '.[edge]'
    python examples/python/edge_program.py            # the bundled model, about a minute
    python examples/python/edge_program.py --model MODEL --quant none "QUESTION"

Prints what the program weighs, how often the self-check found the model's best id, and both answers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from diffulex import Diffulex, SamplingParams
from diffulex_edge import ExportConfig, export_model

QUESTION = "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?"


def answer(model: str, question: str) -> tuple[str, float]:
    """The answer of a checkpoint or of a bundle, and its tokens per forward."""
    with Diffulex(model, device="cpu", max_num_reqs=1) as engine:
        messages = [{"role": "user", "content": question}]
        output = engine.chat(messages, SamplingParams(max_tokens=64), summary=False)
    return output.text.strip(), len(output.token_ids) / max(1, output.metrics.nfe)


def main() -> int:
    """Exports into a directory that is removed afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quant", default="8da4w")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch) / "bundle"
        result = export_model(ExportConfig(options.model, bundle, quant=options.quant))
        print(f"program: {result.file_size_mb:.2f} MB, {result.quant}")
        print(f"equal best ids: {result.agreement.argmax:.1%} on random tokens")
        for name, model in (("model", options.model), ("program", str(bundle))):
            text, speed = answer(model, options.question)
            print(f"{name}: {text!r}, {speed:.1f} tokens a forward")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
