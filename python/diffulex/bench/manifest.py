# SPDX-License-Identifier: Apache-2.0
"""``run.json``: what was run, with what, on what, and how it ended."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffulex
from diffulex.bench.config import BenchmarkConfig
from diffulex.bench.datasets import sha256
from diffulex.bench.scoring.verifier import math_backend

if TYPE_CHECKING:
    from diffulex import Diffulex

__all__ = ["command_line", "engine_facts", "machine_facts", "new_manifest", "utc_now"]

_SECRET_FLAGS = ("--api-key", "--hf-token", "--token")
_GPU_FACTS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "power.limit")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer_config.json")


def utc_now() -> str:
    """Date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_line(arguments: Sequence[str]) -> list[str]:
    """The words of a command without its secrets."""
    shown: list[str] = []
    for word in arguments:
        flag, has_value, _ = word.partition("=")
        if flag in _SECRET_FLAGS and has_value:
            shown.append(f"{flag}=***")
        else:
            shown.append("***" if shown and shown[-1] in _SECRET_FLAGS else word)
    return shown


def _output_of(*command: str, folder: Path | None = None) -> str | None:
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _commit() -> str | None:
    """The commit of a checkout; None for an installed package."""
    return _output_of("git", "rev-parse", "HEAD", folder=Path(__file__).parent)


def _gpus() -> list[dict[str, str]]:
    query = ",".join(_GPU_FACTS)
    text = _output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    lines = [] if text is None else text.splitlines()
    return [
        dict(zip(_GPU_FACTS, (cell.strip() for cell in line.split(",")), strict=False))
        for line in lines
    ]


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine_facts() -> dict[str, Any]:
    """Versions, processors and graphics cards."""
    import torch  # noqa: PLC0415 (slow to import)

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "os": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def new_manifest(config: BenchmarkConfig) -> dict[str, Any]:
    """The manifest at the start of a run; the rest is filled in as it becomes known."""
    import diffulex_ext  # noqa: PLC0415 (slow to import)

    return {
        "command": command_line(sys.argv),
        "config": config.to_dict(),
        "origins": dict(config.origins),
        "version": diffulex.__version__,
        "commit": _commit(),
        "build": dict(diffulex_ext.build_info()),
        "machine": machine_facts(),
        "math_backend": math_backend(),
        "seed": config.eval.seed,
        "started": utc_now(),
        "ended": None,
        "status": "running",
        "tasks": {},
        "segments": [],
    }


def _hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    return {name: sha256(folder / name) for name in names if (folder / name).is_file()}


def engine_facts(engine: Diffulex) -> dict[str, Any]:
    """What the loaded engine adds: model files, memory plan, graphs."""
    config = engine.config
    folder = config.model.model_dir
    indices = sorted(path.name for path in folder.glob("*.index.json"))
    return {
        "model_files": _hashes(folder, ("config.json", "generation_config.json", *indices)),
        "tokenizer_files": _hashes(folder, _TOKENIZER_FILES),
        "family": config.model.model_name,
        "device": config.model.device,
        "dtype": config.model.dtype,
        "strategy": config.decoding.decoding_strategy,
        "block_size": config.decoding.block_size,
        "buffer_size": config.decoding.buffer_size,
        "mask_token_id": config.model.mask_token_id,
        "tp": config.parallel.tensor_parallel_size,
        "dp": config.parallel.data_parallel_size,
        "memory_plan": {
            "num_pages": config.cache.num_pages,
            "page_size": config.cache.page_size,
            "pages_per_request": config.pages_per_request,
            "max_num_reqs": config.scheduler.max_num_reqs,
        },
        "warm_up_s": engine.warm_up_s,
        **_start_facts(engine),
    }


def _start_facts(engine: Diffulex) -> dict[str, Any]:
    """Kernels, graphs and memory; nothing of several replicas, which are in other processes."""
    if engine.config.parallel.data_parallel_size > 1:
        return {}
    prepared = engine.prepared
    return {
        "memory": engine.memory_report().as_dict(),
        "kernels": [choice._asdict() for choice in prepared.kernels],
        "graph_buckets": list(prepared.graph_buckets),
        "no_graphs": prepared.no_graphs,
        "capture_s": prepared.capture_s,
    }
