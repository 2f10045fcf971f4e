# SPDX-License-Identifier: Apache-2.0
"""The documented runtime classes: views of an engine's blocks, samplers for reading, an engine.

`InferenceEngine` and `GenerationConfig` are older names of `DiffusionEngine` and
`DiffusionGenerationConfig`.
"""

from diffulex_edge.runtime.blocks import BlockStatus, DiffusionBlock, DiffusionBlockManager
from diffulex_edge.runtime.engine import (
    DiffusionEngine,
    DiffusionGenerationConfig,
    GenerationResult,
    ModuleProgram,
)
from diffulex_edge.runtime.samplers import (
    SAMPLER_REGISTRY,
    DreamSampler,
    FastDLLMV2Sampler,
    FastdLLMV2Sampler,
    LLaDASampler,
    NoShiftLogitsSampler,
    SampleOutput,
    SDARSampler,
    ShiftLogitsSampler,
    get_sampler_class,
    sample_tokens,
    top_k_logits,
    top_p_logits,
)

InferenceEngine = DiffusionEngine
GenerationConfig = DiffusionGenerationConfig

__all__ = [
    "SAMPLER_REGISTRY",
    "BlockStatus",
    "DiffusionBlock",
    "DiffusionBlockManager",
    "DiffusionEngine",
    "DiffusionGenerationConfig",
    "DreamSampler",
    "FastDLLMV2Sampler",
    "FastdLLMV2Sampler",
    "GenerationConfig",
    "GenerationResult",
    "InferenceEngine",
    "LLaDASampler",
    "ModuleProgram",
    "NoShiftLogitsSampler",
    "SDARSampler",
    "SampleOutput",
    "ShiftLogitsSampler",
    "get_sampler_class",
    "sample_tokens",
    "top_k_logits",
    "top_p_logits",
]
