# SPDX-License-Identifier: Apache-2.0
#
# Sources of diffulex_core (exported as diffulex::core): the standard library only, no CUDA, no torch.
# Paths are relative to the repository root, one per line, sorted.

set(DIFFULEX_CORE_SOURCES
    csrc/core/arena.cpp
    csrc/core/block_buffer.cpp
    csrc/core/decode_batch.cpp
    csrc/core/engine_core.cpp
    csrc/core/kv_cache_manager.cpp
    csrc/core/options.cpp
    csrc/core/page_pool.cpp
    csrc/core/prefix_cache.cpp
    csrc/core/request.cpp
    csrc/core/sampler_output.cpp
    csrc/core/scheduler.cpp
    csrc/core/scheduler_admission.cpp
    csrc/core/scheduler_completion.cpp
    csrc/core/scheduler_run_ahead.cpp
    csrc/core/step_plan.cpp
    csrc/core/strategy/d2f.cpp
    csrc/core/strategy/diffusion_gemma.cpp
    csrc/core/strategy/dmax.cpp
    csrc/core/strategy/fast_dllm_v2.cpp
    csrc/core/strategy/logits_rows.cpp
    csrc/core/strategy/merge_descriptors.cpp
    csrc/core/strategy/multi_bd.cpp
    csrc/core/strategy/registry.cpp
    csrc/core/strategy/strategy_base.cpp
    csrc/core/thread_pool.cpp
)
