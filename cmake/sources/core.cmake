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
    csrc/core/plan/plan_layout.cpp
    csrc/core/plan/sampler_output.cpp
    csrc/core/plan/step_plan.cpp
    csrc/core/request.cpp
    csrc/core/rules/accept_canvas.cpp
    csrc/core/rules/accept_dmax.cpp
    csrc/core/rules/accept_edit.cpp
    csrc/core/rules/accept_mask_fill.cpp
    csrc/core/scheduler/admission.cpp
    csrc/core/scheduler/completion.cpp
    csrc/core/scheduler/integrity.cpp
    csrc/core/scheduler/mailbox.cpp
    csrc/core/scheduler/run_ahead.cpp
    csrc/core/scheduler/scheduler.cpp
    csrc/core/scheduler/step_writes.cpp
    csrc/core/strategy/logits_rows.cpp
    csrc/core/strategy/merge_descriptors.cpp
    csrc/core/strategy/registry.cpp
    csrc/core/strategy/strategy_base.cpp
)

# A strategy of strategies.def has one source, of its name.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../../csrc/core/strategy/strategies.def" DIFFULEX_STRATEGY_SOURCES
     REGEX "^DIFFULEX_STRATEGY")
list(TRANSFORM DIFFULEX_STRATEGY_SOURCES REPLACE "^DIFFULEX_STRATEGY\\(([a-z0-9_]+),.*" "\\1")
list(TRANSFORM DIFFULEX_STRATEGY_SOURCES PREPEND "csrc/core/strategy/")
list(TRANSFORM DIFFULEX_STRATEGY_SOURCES APPEND ".cpp")
list(APPEND DIFFULEX_CORE_SOURCES ${DIFFULEX_STRATEGY_SOURCES})
