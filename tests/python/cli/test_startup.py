# SPDX-License-Identifier: Apache-2.0
"""What a command imports: start-up is mostly imports, so the heavy ones are counted by name and by time."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from diffulex.checkpoint.resolve import demo_dir

#: Packages that take a tenth of a second or more, with what needs them.
HEAVY = {
    "transformers": "tokenizers that are not plain",
    "huggingface_hub": "models of the hub",
    "torch._dynamo": "torch.compile",
    "torch._inductor": "torch.compile",
    "sympy": "torch.compile",
    "fastapi": "serve",
    "matplotlib": "eval --zoo --output-dir",
    "yaml": "--config",
    "diffulex.bench": "eval and bench",
    "diffulex.server": "serve",
    "diffulex.omni": "omni",
}

needs_demo = pytest.mark.skipif(
    not (demo_dir() / "model.safetensors").is_file(), reason="the bundled model is not in this tree"
)


def loaded_by(*arguments: str) -> set[str]:
    """Modules that a command of its own process has loaded when it ends."""
    code = (
        "import json, sys; from diffulex.tools.cli import main; code = main(sys.argv[1:]);"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=180,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stderr.splitlines()[-1]))


@needs_demo
def test_an_answer_of_the_bundled_model_needs_no_heavy_package():
    modules = loaded_by("generate", "--max-tokens", "8", "Ben has 8 coins.")
    assert "torch" in modules
    assert {name for name in HEAVY if name in modules} == set()


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["help", "eval"]])
def test_help_needs_neither_torch_nor_numpy(arguments):
    modules = loaded_by(*arguments)
    assert {"torch", "numpy", "tokenizers", *HEAVY} & modules == set()


def processor_seconds(*command: str) -> float:
    """Of one run, with one thread: threads that wait for work would count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    subprocess.run(command, check=True, capture_output=True, timeout=180, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@needs_demo
@pytest.mark.slow
@pytest.mark.alone
def test_an_answer_takes_little_more_than_torch_takes_to_be_imported():
    """Relative, since hosts differ; the least of three runs, from the start of Python to its end."""
    generate = ("-m", "diffulex", "generate", "--max-tokens", "8", "Ben has 8 coins.")
    pairs = [
        (processor_seconds("-c", "import torch"), processor_seconds(*generate)) for _ in range(3)
    ]
    torch, answer = (min(seconds) for seconds in zip(*pairs, strict=True))
    assert answer < 1.4 * torch, pairs


@needs_demo
@pytest.mark.slow
def test_the_collector_leaves_the_imports_alone_and_works_afterwards():
    code = (
        "import gc, sys; from diffulex.tools.cli import main; code = main(sys.argv[1:]);"
        "assert gc.get_freeze_count() > 50000, gc.get_freeze_count(); assert gc.isenabled();"
        "sys.exit(code)"
    )
    arguments = ("generate", "--max-tokens", "8", "Ben has 8 coins.")
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=180)
