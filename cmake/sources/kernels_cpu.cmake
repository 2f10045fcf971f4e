# SPDX-License-Identifier: Apache-2.0
#
# Sources of diffulex_kernels (exported as diffulex::kernels) without its CUDA groups.
# Paths are relative to the repository root, one per line, sorted.

# Shape checks, workspace formulas, tile configuration: host code shared by CPU and CUDA.
set(DIFFULEX_KERNELS_COMMON_SOURCES
  csrc/kernels/common/acceptance_checks.cpp
  csrc/kernels/common/activation_checks.cpp
  csrc/kernels/common/advance_checks.cpp
  csrc/kernels/common/attention_checks.cpp
  csrc/kernels/common/attention_config.cpp
  csrc/kernels/common/filter_checks.cpp
  csrc/kernels/common/kv_cache_checks.cpp
  csrc/kernels/common/linear_checks.cpp
  csrc/kernels/common/linear_config.cpp
  csrc/kernels/common/moe_checks.cpp
  csrc/kernels/common/moe_config.cpp
  csrc/kernels/common/norm_checks.cpp
  csrc/kernels/common/rope_checks.cpp
  csrc/kernels/common/routing_checks.cpp
  csrc/kernels/common/sampling_checks.cpp
  csrc/kernels/common/soft_embedding_config.cpp
  csrc/kernels/common/tensor_checks.cpp
  csrc/kernels/common/token_merge_checks.cpp
  csrc/kernels/common/token_stats_config.cpp
)

# CPU kernels compiled for the baseline instruction set, and csrc/kernels/dispatch.cpp.
set(DIFFULEX_KERNELS_CPU_SOURCES
  csrc/kernels/cpu/accept_dmax.cpp
  csrc/kernels/cpu/accept_edit.cpp
  csrc/kernels/cpu/accept_gemma.cpp
  csrc/kernels/cpu/accept_mask_fill.cpp
  csrc/kernels/cpu/activation.cpp
  csrc/kernels/cpu/advance_decode.cpp
  csrc/kernels/cpu/attention.cpp
  csrc/kernels/cpu/data_checks.cpp
  csrc/kernels/cpu/entropy_bound_mask.cpp
  csrc/kernels/cpu/fused_moe.cpp
  csrc/kernels/cpu/isa/kernels_base.cpp
  csrc/kernels/cpu/kv_cache.cpp
  csrc/kernels/cpu/kv_pages.cpp
  csrc/kernels/cpu/linear.cpp
  csrc/kernels/cpu/linear_few_rows.cpp
  csrc/kernels/cpu/merge_token_stats.cpp
  csrc/kernels/cpu/moe_combine.cpp
  csrc/kernels/cpu/moe_experts.cpp
  csrc/kernels/cpu/moe_permute.cpp
  csrc/kernels/cpu/norm.cpp
  csrc/kernels/cpu/rope.cpp
  csrc/kernels/cpu/routing.cpp
  csrc/kernels/cpu/sample_filtered.cpp
  csrc/kernels/cpu/soft_embedding.cpp
  csrc/kernels/cpu/stats_row.cpp
  csrc/kernels/cpu/token_merge.cpp
  csrc/kernels/cpu/token_stats.cpp
  csrc/kernels/dispatch.cpp
)

# Files that exist once per target architecture (for example the table of ISA variants): exactly one
# of the two lists is compiled.
set(DIFFULEX_KERNELS_CPU_X86_64_SOURCES
  csrc/kernels/cpu/isa/select_x86_64.cpp
)
set(DIFFULEX_KERNELS_CPU_OTHER_ARCH_SOURCES
  csrc/kernels/cpu/isa/select_generic.cpp
)

# ISA variants, compiled only for x86-64: for each NAME in DIFFULEX_KERNELS_CPU_ISA_VARIANTS the files
# of DIFFULEX_KERNELS_CPU_ISA_<NAME>_SOURCES get the flags DIFFULEX_KERNELS_CPU_ISA_<NAME>_FLAGS.
# A variant file is entered only after a run-time capability check. It must keep everything in an
# anonymous namespace and use no inline function of a shared header (std:: containers included) that a
# baseline file uses too: the linker keeps one copy of each, and it could be the wide one.
# The names appear in build_info(); a variant without sources is left out.
set(DIFFULEX_KERNELS_CPU_ISA_VARIANTS v3 v4)
set(DIFFULEX_KERNELS_CPU_ISA_v3_FLAGS -march=x86-64-v3)
set(DIFFULEX_KERNELS_CPU_ISA_v3_SOURCES
  csrc/kernels/cpu/isa/kernels_v3.cpp
)
set(DIFFULEX_KERNELS_CPU_ISA_v4_FLAGS -march=x86-64-v4)
set(DIFFULEX_KERNELS_CPU_ISA_v4_SOURCES
  csrc/kernels/cpu/isa/kernels_v4.cpp
)
