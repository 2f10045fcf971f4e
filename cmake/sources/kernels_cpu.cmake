# SPDX-License-Identifier: Apache-2.0
#
# Sources of diffulex_kernels (exported as diffulex::kernels) without its CUDA groups.
# Paths are relative to the repository root, one per line, sorted.

# Shape checks, workspace formulas, tile configuration: host code shared by CPU and CUDA.
set(DIFFULEX_KERNELS_COMMON_SOURCES
  csrc/ops/accept/check.cpp
  csrc/ops/activation/check.cpp
  csrc/ops/advance/check.cpp
  csrc/ops/attention/check.cpp
  csrc/ops/attention/config.cpp
  csrc/ops/comm/check.cpp
  csrc/ops/comm/config.cpp
  csrc/ops/kv/check.cpp
  csrc/ops/linear/check.cpp
  csrc/ops/linear/config.cpp
  csrc/ops/merge/check.cpp
  csrc/ops/merge/soft_embedding_config.cpp
  csrc/ops/moe/check.cpp
  csrc/ops/moe/config.cpp
  csrc/ops/moe/routing_check.cpp
  csrc/ops/norm/check.cpp
  csrc/ops/quant/check.cpp
  csrc/ops/quant/expert_tiles.cpp
  csrc/ops/quant/nibble_plan.cpp
  csrc/ops/rope/check.cpp
  csrc/ops/sampling/check.cpp
  csrc/ops/sampling/token_stats_config.cpp
  csrc/ops/shared/tensor_checks.cpp
)

# CPU kernels compiled for the baseline instruction set, and csrc/ops/dispatch.cpp.
set(DIFFULEX_KERNELS_CPU_SOURCES
  csrc/ops/accept/accept_cpu.cpp
  csrc/ops/accept/entropy_bound_mask_cpu.cpp
  csrc/ops/activation/activation_cpu.cpp
  csrc/ops/advance/advance_decode_cpu.cpp
  csrc/ops/attention/attention_cpu.cpp
  csrc/ops/comm/sum_add_rms_norm_cpu.cpp
  csrc/ops/dispatch.cpp
  csrc/ops/kv/kv_cache_cpu.cpp
  csrc/ops/kv/pages_cpu.cpp
  csrc/ops/linear/linear_cpu.cpp
  csrc/ops/linear/linear_few_rows_cpu.cpp
  csrc/ops/merge/soft_embedding_cpu.cpp
  csrc/ops/merge/token_merge_cpu.cpp
  csrc/ops/moe/fused_moe_cpu.cpp
  csrc/ops/moe/moe_combine_cpu.cpp
  csrc/ops/moe/moe_experts_cpu.cpp
  csrc/ops/moe/moe_permute_cpu.cpp
  csrc/ops/moe/routing_cpu.cpp
  csrc/ops/norm/norm_cpu.cpp
  csrc/ops/quant/isa/int8_base.cpp
  csrc/ops/quant/linear_scaled_cpu.cpp
  csrc/ops/quant/linear_w4a16_cpu.cpp
  csrc/ops/quant/dequantize_cpu.cpp
  csrc/ops/quant/quantize_cpu.cpp
  csrc/ops/rope/rope_cpu.cpp
  csrc/ops/sampling/merge_token_stats_cpu.cpp
  csrc/ops/sampling/sample_filtered_cpu.cpp
  csrc/ops/sampling/stats_row_cpu.cpp
  csrc/ops/sampling/token_stats_cpu.cpp
  csrc/ops/shared/cpu_isa/kernels_base.cpp
  csrc/ops/shared/data_checks_cpu.cpp
)

# Files that exist once per target architecture (for example the table of ISA variants): exactly one
# of the lists is compiled.
set(DIFFULEX_KERNELS_CPU_X86_64_SOURCES
  csrc/ops/quant/isa/select_x86_64.cpp
  csrc/ops/shared/cpu_isa/select_x86_64.cpp)
set(DIFFULEX_KERNELS_CPU_ONE_TABLE csrc/ops/shared/cpu_isa/select_generic.cpp)
set(DIFFULEX_KERNELS_CPU_AARCH64_SOURCES
  csrc/ops/quant/isa/select_aarch64.cpp ${DIFFULEX_KERNELS_CPU_ONE_TABLE})
set(DIFFULEX_KERNELS_CPU_OTHER_ARCH_SOURCES
  csrc/ops/quant/isa/select_generic.cpp ${DIFFULEX_KERNELS_CPU_ONE_TABLE})

# ISA variants of an architecture: for each NAME in DIFFULEX_KERNELS_CPU_<ARCHITECTURE>_VARIANTS the files
# of DIFFULEX_KERNELS_CPU_ISA_<NAME>_SOURCES get the flags DIFFULEX_KERNELS_CPU_ISA_<NAME>_FLAGS.
# A variant file is entered only after a run-time capability check. It must keep everything in an
# anonymous namespace and use no inline function of a shared header (std:: containers included) that a
# baseline file uses too: the linker keeps one copy of each, and it could be the wide one.
# The names appear in build_info().
set(DIFFULEX_KERNELS_CPU_X86_64_VARIANTS v3 v3n v4 v4n)
set(DIFFULEX_KERNELS_CPU_AARCH64_VARIANTS dot)
set(DIFFULEX_KERNELS_CPU_ISA_v3_FLAGS -march=x86-64-v3)
set(DIFFULEX_KERNELS_CPU_ISA_v3_SOURCES
  csrc/ops/quant/isa/int8_v3.cpp
  csrc/ops/shared/cpu_isa/kernels_v3.cpp
)
# With instructions for products of bytes.
set(DIFFULEX_KERNELS_CPU_ISA_v3n_FLAGS -march=x86-64-v3 -mavxvnni)
set(DIFFULEX_KERNELS_CPU_ISA_v3n_SOURCES csrc/ops/quant/isa/int8_v3n.cpp)
set(DIFFULEX_KERNELS_CPU_ISA_v4_FLAGS -march=x86-64-v4)
set(DIFFULEX_KERNELS_CPU_ISA_v4_SOURCES
  csrc/ops/quant/isa/int8_v4.cpp
  csrc/ops/shared/cpu_isa/kernels_v4.cpp
)
set(DIFFULEX_KERNELS_CPU_ISA_v4n_FLAGS -march=x86-64-v4 -mavx512vnni)
set(DIFFULEX_KERNELS_CPU_ISA_v4n_SOURCES csrc/ops/quant/isa/int8_v4n.cpp)
set(DIFFULEX_KERNELS_CPU_ISA_dot_FLAGS -march=armv8.2-a+dotprod)
set(DIFFULEX_KERNELS_CPU_ISA_dot_SOURCES csrc/ops/quant/isa/int8_dot.cpp)
