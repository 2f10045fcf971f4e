# SPDX-License-Identifier: Apache-2.0
#
# Sources of diffulex_core (exported as diffulex::core): the standard library only, no CUDA, no torch.
# Paths are relative to the repository root, one per line, sorted.

set(DIFFULEX_CORE_SOURCES
    csrc/core/base/arena.cpp
    csrc/core/base/thread_pool.cpp
    csrc/core/block_buffer.cpp
    csrc/core/engine_core.cpp
    csrc/core/kv/kv_cache_manager.cpp
    csrc/core/kv/page_pool.cpp
    csrc/core/kv/prefix_cache.cpp
    csrc/core/options.cpp
    csrc/core/plan/decode_batch.cpp
    csrc/core/plan/sampler_output.cpp
    csrc/core/plan/step_plan.cpp
    csrc/core/request.cpp
    csrc/core/scheduler/admission.cpp
    csrc/core/scheduler/completion.cpp
    csrc/core/scheduler/run_ahead.cpp
    csrc/core/scheduler/scheduler.cpp
    csrc/core/strategy/d2f.cpp
    csrc/core/strategy/diffusion_gemma.cpp
    csrc/core/strategy/dmax.cpp
    csrc/core/strategy/fast_dllm_v2.cpp
    csrc/core/strategy/logits_rows.cpp
    csrc/core/strategy/merge_descriptors.cpp
    csrc/core/strategy/multi_bd.cpp
    csrc/core/strategy/registry.cpp
    csrc/core/strategy/strategy_base.cpp
)
