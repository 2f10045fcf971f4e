# SPDX-License-Identifier: Apache-2.0
"""Running the command line and a tiny checkpoint to run it on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.checkpoints import CheckpointBuilder, tiny_config

Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "tiny"
    CheckpointBuilder(tiny_config()).write(directory)
    return directory


@pytest.fixture(scope="session")
def run_cli() -> Run:
    """Runs ``python -m diffulex`` in a process of its own."""

    def run(*arguments: object, stdin: str | bytes | None = None) -> subprocess.CompletedProcess:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUTF8": "1",
        }
        environment.pop("DIFFULEX_LOG_LEVEL", None)
        return subprocess.run(
            [sys.executable, "-m", "diffulex", *map(str, arguments)],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            timeout=180,
            check=False,
            env=environment,
        )

    return run
