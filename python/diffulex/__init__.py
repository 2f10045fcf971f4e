# SPDX-License-Identifier: Apache-2.0
"""Diffulex: an inference engine for block-diffusion language models.

Importing this package loads neither torch nor a device; the names below are imported when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffulex.config.config import Config
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.engine.async_llm import AsyncLLM
    from diffulex.engine.denoising import DenoisingPicture, denoising
    from diffulex.engine.engine import LLM, Diffulex, DiffulexEngine
    from diffulex.engine.output import (
        DenoiseSnapshot,
        GenerationOutputs,
        RequestOutput,
        StepOutput,
        StreamEvent,
    )
    from diffulex.errors import (
        CheckpointError,
        ConfigError,
        DiffulexError,
        EngineDeadError,
        OutOfPagesError,
        PromptError,
        SamplingParamsError,
    )

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DenoiseSnapshot",
    "DenoisingPicture",
    "Diffulex",
    "DiffulexEngine",
    "DiffulexError",
    "EngineDeadError",
    "GenerationOutputs",
    "OutOfPagesError",
    "PromptError",
    "RequestOutput",
    "SamplingParams",
    "SamplingParamsError",
    "StepOutput",
    "StreamEvent",
    "__version__",
    "denoising",
]

_MODULES = {
    "AsyncLLM": "diffulex.engine.async_llm",
    "Config": "diffulex.config.config",
    "Diffulex": "diffulex.engine.engine",
    "DiffulexEngine": "diffulex.engine.engine",
    "LLM": "diffulex.engine.engine",
    "SamplingParams": "diffulex.config.sampling_params",
    "__version__": "diffulex_ext",
    "DenoisingPicture": "diffulex.engine.denoising",
    "denoising": "diffulex.engine.denoising",
    **dict.fromkeys(
        ("DenoiseSnapshot", "GenerationOutputs", "RequestOutput", "StepOutput", "StreamEvent"),
        "diffulex.engine.output",
    ),
    **dict.fromkeys(
        (
            "CheckpointError",
            "ConfigError",
            "DiffulexError",
            "EngineDeadError",
            "OutOfPagesError",
            "PromptError",
            "SamplingParamsError",
        ),
        "diffulex.errors",
    ),
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
