# SPDX-License-Identifier: Apache-2.0
"""Images and videos from diffusion transformers, over the pipelines of diffusers.

Importing this package loads neither torch nor diffusers; the names below are imported when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffulex.omni.async_omni_diffusion import AsyncOmniDiffusion, Progress
    from diffulex.omni.attention.selector import AutoAttentionBackend
    from diffulex.omni.cache.selector import AutoCacheBackend, get_cache_backend
    from diffulex.omni.config import OmniDiffusionConfig
    from diffulex.omni.config_table import DiffusionCacheConfig, DiffusionParallelConfig
    from diffulex.omni.diffusion_engine import DiffusionEngine
    from diffulex.omni.errors import (
        ModelLoadError,
        OmniError,
        QueueFull,
        RequestAborted,
        RequestError,
        RequestTimeout,
        UnsupportedFeatureError,
        UnsupportedModelError,
        WorkerDeadError,
        WorkerError,
    )
    from diffulex.omni.message_queue import MessageQueue
    from diffulex.omni.omni_diffusion import OmniDiffusion
    from diffulex.omni.outputs import OmniRequestOutput
    from diffulex.omni.registry import (
        AutoOmniPipeline,
        CfgBranches,
        ImageInput,
        PipelineSpec,
        TeaCacheSpec,
        register_pipeline,
    )
    from diffulex.omni.request import OmniDiffusionRequest
    from diffulex.omni.scheduler import Scheduler
    from diffulex.omni.worker import StepEvent

    Omni = OmniDiffusion
    EngineDeadError = WorkerDeadError

__all__ = [
    "AsyncOmniDiffusion",
    "AutoAttentionBackend",
    "AutoCacheBackend",
    "AutoOmniPipeline",
    "CfgBranches",
    "DiffusionCacheConfig",
    "DiffusionEngine",
    "DiffusionParallelConfig",
    "EngineDeadError",
    "ImageInput",
    "MessageQueue",
    "ModelLoadError",
    "Omni",
    "OmniDiffusion",
    "OmniDiffusionConfig",
    "OmniDiffusionRequest",
    "OmniError",
    "OmniRequestOutput",
    "PipelineSpec",
    "Progress",
    "QueueFull",
    "RequestAborted",
    "RequestError",
    "RequestTimeout",
    "Scheduler",
    "StepEvent",
    "TeaCacheSpec",
    "UnsupportedFeatureError",
    "UnsupportedModelError",
    "WorkerDeadError",
    "WorkerError",
    "get_cache_backend",
    "register_pipeline",
]

_MODULES = {
    "attention.selector": ("AutoAttentionBackend",),
    "async_omni_diffusion": ("AsyncOmniDiffusion", "Progress"),
    "config": ("OmniDiffusionConfig",),
    "config_table": ("DiffusionCacheConfig", "DiffusionParallelConfig"),
    "diffusion_engine": ("DiffusionEngine",),
    "errors": (
        "EngineDeadError",
        "ModelLoadError",
        "OmniError",
        "QueueFull",
        "RequestAborted",
        "RequestError",
        "RequestTimeout",
        "UnsupportedFeatureError",
        "UnsupportedModelError",
        "WorkerDeadError",
        "WorkerError",
    ),
    "message_queue": ("MessageQueue",),
    "omni_diffusion": ("Omni", "OmniDiffusion"),
    "outputs": ("OmniRequestOutput",),
    "cache.selector": ("AutoCacheBackend", "get_cache_backend"),
    "registry": (
        "AutoOmniPipeline",
        "CfgBranches",
        "ImageInput",
        "PipelineSpec",
        "TeaCacheSpec",
        "register_pipeline",
    ),
    "request": ("OmniDiffusionRequest",),
    "scheduler": ("Scheduler",),
    "worker": ("StepEvent",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
