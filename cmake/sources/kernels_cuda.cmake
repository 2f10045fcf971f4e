# SPDX-License-Identifier: Apache-2.0
#
# CUDA groups of diffulex_kernels. Paths are relative to the repository root, one per line, sorted.
# A group's list without suffix is always compiled; _FULL only with DIFFULEX_CUDA_PROFILE=full,
# _MINIMAL only with DIFFULEX_CUDA_PROFILE=minimal (for example a dispatch table with fewer entries).

# csrc/kernels/cuda/portable: any architecture from sm_80 on.
set(DIFFULEX_CUDA_PORTABLE_SOURCES
  csrc/kernels/cuda/portable/accept_dmax.cu
  csrc/kernels/cuda/portable/accept_edit.cu
  csrc/kernels/cuda/portable/accept_gemma.cu
  csrc/kernels/cuda/portable/accept_mask_fill.cu
  csrc/kernels/cuda/portable/activation.cu
  csrc/kernels/cuda/portable/advance_decode.cu
  csrc/kernels/cuda/portable/attention.cu
  csrc/kernels/cuda/portable/attention_combine.cu
  csrc/kernels/cuda/portable/attention_generic_bf16.cu
  csrc/kernels/cuda/portable/attention_generic_f32.cu
  csrc/kernels/cuda/portable/check_data.cu
  csrc/kernels/cuda/portable/entropy_bound_mask.cu
  csrc/kernels/cuda/portable/fused_moe.cu
  csrc/kernels/cuda/portable/kv_cache.cu
  csrc/kernels/cuda/portable/merge_token_stats.cu
  csrc/kernels/cuda/portable/moe_combine.cu
  csrc/kernels/cuda/portable/moe_generic.cu
  csrc/kernels/cuda/portable/moe_mma_bf16.cu
  csrc/kernels/cuda/portable/moe_mma_f16.cu
  csrc/kernels/cuda/portable/moe_permute.cu
  csrc/kernels/cuda/portable/norm.cu
  csrc/kernels/cuda/portable/rope.cu
  csrc/kernels/cuda/portable/rope_stream.cu
  csrc/kernels/cuda/portable/router_gemm.cu
  csrc/kernels/cuda/portable/routing.cu
  csrc/kernels/cuda/portable/sample_filtered.cu
  csrc/kernels/cuda/portable/soft_embedding.cu
  csrc/kernels/cuda/portable/token_merge.cu
  csrc/kernels/cuda/portable/token_stats.cu
  csrc/kernels/cuda/portable/warmup.cu
)
set(DIFFULEX_CUDA_PORTABLE_FULL_SOURCES
  csrc/kernels/cuda/portable/attention_generic_f16.cu
  csrc/kernels/cuda/portable/attention_table_full.cu
)
set(DIFFULEX_CUDA_PORTABLE_MINIMAL_SOURCES
  csrc/kernels/cuda/portable/attention_table_minimal.cu
)

# csrc/kernels/cuda/sm80: tensor-core kernels of the sm_80 class.
set(DIFFULEX_CUDA_SM80_SOURCES
  csrc/kernels/cuda/sm80/attention/inst_bf16_d128_m128.cu
  csrc/kernels/cuda/sm80/attention/inst_bf16_d128_m128_s2.cu
  csrc/kernels/cuda/sm80/attention/inst_bf16_d128_m64.cu
  csrc/kernels/cuda/sm80/attention/inst_bf16_d128_m64_s2.cu
  csrc/kernels/cuda/sm80/attention/inst_bf16_d64_m128.cu
  csrc/kernels/cuda/sm80/attention/inst_bf16_d64_m64.cu
)
set(DIFFULEX_CUDA_SM80_FULL_SOURCES
  csrc/kernels/cuda/sm80/attention/inst_bf16_d256_m128.cu
  csrc/kernels/cuda/sm80/attention/inst_bf16_d256_m64.cu
  csrc/kernels/cuda/sm80/attention/inst_bf16_d512_m32.cu
  csrc/kernels/cuda/sm80/attention/inst_bf16_d512_m64.cu
  csrc/kernels/cuda/sm80/attention/inst_f16_d128_m128.cu
  csrc/kernels/cuda/sm80/attention/inst_f16_d128_m128_s2.cu
  csrc/kernels/cuda/sm80/attention/inst_f16_d128_m64.cu
  csrc/kernels/cuda/sm80/attention/inst_f16_d128_m64_s2.cu
  csrc/kernels/cuda/sm80/attention/inst_f16_d256_m128.cu
  csrc/kernels/cuda/sm80/attention/inst_f16_d256_m64.cu
  csrc/kernels/cuda/sm80/attention/inst_f16_d512_m32.cu
  csrc/kernels/cuda/sm80/attention/inst_f16_d512_m64.cu
  csrc/kernels/cuda/sm80/attention/inst_f16_d64_m128.cu
  csrc/kernels/cuda/sm80/attention/inst_f16_d64_m64.cu
)
set(DIFFULEX_CUDA_SM80_MINIMAL_SOURCES
)

# csrc/kernels/cuda/sm90: compiled for 90a only, never together with another architecture.
set(DIFFULEX_CUDA_SM90_SOURCES
  csrc/kernels/cuda/sm90/attention/inst_bf16_d128_m128.cu
  csrc/kernels/cuda/sm90/attention/inst_bf16_d128_m64.cu
  csrc/kernels/cuda/sm90/attention/maps.cu
  csrc/kernels/cuda/sm90/linear/few_rows.cu
  csrc/kernels/cuda/sm90/moe/gather_rows.cu
  csrc/kernels/cuda/sm90/moe/inst_bf16.cu
  csrc/kernels/cuda/sm90/sampling/sample_filtered_cluster.cu
  csrc/kernels/cuda/sm90/sampling/token_stats_cluster.cu
)
set(DIFFULEX_CUDA_SM90_FULL_SOURCES
  csrc/kernels/cuda/sm90/attention/inst_bf16_d256_m128.cu
  csrc/kernels/cuda/sm90/attention/inst_bf16_d256_m64.cu
  csrc/kernels/cuda/sm90/attention/inst_bf16_d512_m64.cu
  csrc/kernels/cuda/sm90/attention/inst_bf16_d64_m128.cu
  csrc/kernels/cuda/sm90/attention/inst_bf16_d64_m64.cu
  csrc/kernels/cuda/sm90/attention/inst_f16_d128_m128.cu
  csrc/kernels/cuda/sm90/attention/inst_f16_d128_m64.cu
  csrc/kernels/cuda/sm90/attention/inst_f16_d256_m128.cu
  csrc/kernels/cuda/sm90/attention/inst_f16_d256_m64.cu
  csrc/kernels/cuda/sm90/attention/inst_f16_d512_m64.cu
  csrc/kernels/cuda/sm90/attention/inst_f16_d64_m128.cu
  csrc/kernels/cuda/sm90/attention/inst_f16_d64_m64.cu
  csrc/kernels/cuda/sm90/attention/table_full.cu
  csrc/kernels/cuda/sm90/moe/inst_f16.cu
)
set(DIFFULEX_CUDA_SM90_MINIMAL_SOURCES
  csrc/kernels/cuda/sm90/attention/table_minimal.cu
)

# Host-only .cpp files of diffulex_kernels: the first list when CUDA is built, the second when it is
# not (the same functions, answering kNoKernel). The sm90 lists do the same for the sm90 group.
set(DIFFULEX_CUDA_HOST_SOURCES
)
set(DIFFULEX_CUDA_ABSENT_SOURCES
  csrc/kernels/cuda/warmup_absent.cpp
  csrc/kernels/cuda_absent.cpp
)
set(DIFFULEX_CUDA_SM90_HOST_SOURCES
  csrc/kernels/cuda/sm90/moe/dispatch.cpp
  csrc/kernels/cuda/sm90/tensor_map.cpp
)
set(DIFFULEX_CUDA_SM90_ABSENT_SOURCES
  csrc/kernels/cuda/sm90/attention/absent.cpp
  csrc/kernels/cuda/sm90/linear/absent.cpp
  csrc/kernels/cuda/sm90/moe/absent.cpp
  csrc/kernels/cuda/sm90/sampling/absent.cpp
)
