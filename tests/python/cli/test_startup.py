# SPDX-License-Identifier: Apache-2.0
"""What a command imports: start-up is mostly imports, so the heavy ones are counted by name."""

from __future__ import annotations

import json
import os
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


@pytest.mark.skipif(
    not (demo_dir() / "model.safetensors").is_file(), reason="the bundled model is not in this tree"
)
def test_an_answer_of_the_bundled_model_needs_no_heavy_package():
    modules = loaded_by("generate", "--max-tokens", "8", "Ben has 8 coins.")
    assert "torch" in modules
    assert {name for name in HEAVY if name in modules} == set()


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["help", "eval"]])
def test_help_needs_neither_torch_nor_numpy(arguments):
    modules = loaded_by(*arguments)
    assert {"torch", "numpy", "tokenizers", *HEAVY} & modules == set()
