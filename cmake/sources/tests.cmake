# SPDX-License-Identifier: Apache-2.0
#
# GoogleTest programs, one per directory: diffulex_tests_core, diffulex_tests_ops,
# diffulex_tests_edge and diffulex_tests_cuda (only when CUDA is built; skips its tests without a device).
# GTest::gmock and GTest::gtest_main are linked; do not write a main(). Every test file may include
# private headers by their path from csrc/ and read DIFFULEX_TEST_DATA_DIR (tests/data).
# Paths are relative to the repository root, one per line, sorted.

set(DIFFULEX_TESTS_CORE_SOURCES
    tests/cpp/core/acceptance_test.cpp
    tests/cpp/core/block_buffer_property_test.cpp
    tests/cpp/core/block_buffer_test.cpp
    tests/cpp/core/block_buffer_variant_test.cpp
    tests/cpp/core/canvas_rules_test.cpp
    tests/cpp/core/diffusion_gemma_property_test.cpp
    tests/cpp/core/dual_cache_rules_test.cpp
    tests/cpp/core/early_store_test.cpp
    tests/cpp/core/fast_dllm_v2_property_test.cpp
    tests/cpp/core/kv_cache_manager_test.cpp
    tests/cpp/core/mixed_step_test.cpp
    tests/cpp/core/options_test.cpp
    tests/cpp/core/page_pool_test.cpp
    tests/cpp/core/philox_test.cpp
    tests/cpp/core/prefix_cache_test.cpp
    tests/cpp/core/scheduler_allocation_test.cpp
    tests/cpp/core/scheduler_property_test.cpp
    tests/cpp/core/scheduler_test.cpp
    tests/cpp/core/scheduler_thread_test.cpp
    tests/cpp/core/status_enums_test.cpp
    tests/cpp/core/step_plan_test.cpp
    tests/cpp/core/thread_pool_test.cpp
    tests/cpp/core/trace_test.cpp
)
set(DIFFULEX_TESTS_OPS_SOURCES
  tests/cpp/ops/accept_mask_fill_test.cpp
  tests/cpp/ops/acceptance_boundary_test.cpp
  tests/cpp/ops/acceptance_test.cpp
  tests/cpp/ops/activation_test.cpp
  tests/cpp/ops/attention_config_test.cpp
  tests/cpp/ops/block_attention_test.cpp
  tests/cpp/ops/guard_page_test.cpp
  tests/cpp/ops/kernel_errors_test.cpp
  tests/cpp/ops/kernel_table_test.cpp
  tests/cpp/ops/kv_cache_test.cpp
  tests/cpp/ops/linear_config_test.cpp
  tests/cpp/ops/linear_test.cpp
  tests/cpp/ops/moe_test.cpp
  tests/cpp/ops/nibble_plan_test.cpp
  tests/cpp/ops/norm_test.cpp
  tests/cpp/ops/quantize_test.cpp
  tests/cpp/ops/rope_test.cpp
  tests/cpp/ops/routing_test.cpp
  tests/cpp/ops/row_choice_test.cpp
  tests/cpp/ops/row_interval_test.cpp
  tests/cpp/ops/sample_filtered_test.cpp
  tests/cpp/ops/token_merge_test.cpp
  tests/cpp/ops/token_stats_test.cpp
)
set(DIFFULEX_TESTS_EDGE_SOURCES
  tests/cpp/edge/options_test.cpp
  tests/cpp/edge/session_test.cpp
)
# .cpp (CUDA runtime API only) or .cu.
set(DIFFULEX_TESTS_CUDA_SOURCES
    tests/cpp/cuda/acceptance_test.cpp
    tests/cpp/cuda/advance_decode_test.cpp
    tests/cpp/cuda/attention_overlap_test.cu
    tests/cpp/cuda/attention_paths_test.cpp
    tests/cpp/cuda/block_attention_test.cpp
    tests/cpp/cuda/block_rules_device_test.cu
    tests/cpp/cuda/concurrent_calls_test.cpp
    tests/cpp/cuda/dense_ops_test.cpp
    tests/cpp/cuda/hopper_attention_test.cpp
    tests/cpp/cuda/linear_chain_test.cpp
    tests/cpp/cuda/linear_hopper_test.cpp
    tests/cpp/cuda/moe_hopper_test.cpp
    tests/cpp/cuda/moe_test.cpp
    tests/cpp/cuda/op_limits_test.cu
    tests/cpp/cuda/op_overlap_test.cu
    tests/cpp/cuda/sampler_cluster_test.cpp
    tests/cpp/cuda/sampling_test.cpp
    tests/cpp/cuda/token_merge_test.cpp
)
