# SPDX-License-Identifier: Apache-2.0
#
# CUDA groups of diffulex_kernels. Paths are relative to the repository root, one per line, sorted.
# A group's list without suffix is always compiled; _FULL only with DIFFULEX_CUDA_PROFILE=full.

# Any architecture from sm_80 on.
set(DIFFULEX_CUDA_PORTABLE_SOURCES
  csrc/ops/accept/accept_dmax_cuda.cu
  csrc/ops/accept/accept_edit_cuda.cu
  csrc/ops/accept/accept_gemma_cuda.cu
  csrc/ops/accept/accept_mask_fill_cuda.cu
  csrc/ops/accept/entropy_bound_mask_cuda.cu
  csrc/ops/activation/activation_cuda.cu
  csrc/ops/advance/advance_decode_cuda.cu
  csrc/ops/attention/attention_cuda.cu
  csrc/ops/attention/combine.cu
  csrc/ops/attention/generic_bf16.cu
  csrc/ops/attention/generic_codes_bf16.cu
  csrc/ops/attention/generic_codes_f32.cu
  csrc/ops/attention/generic_f32.cu
  csrc/ops/attention/table.cu
  csrc/ops/comm/all_reduce_bf16.cu
  csrc/ops/comm/all_reduce_f16.cu
  csrc/ops/comm/all_reduce_f32.cu
  csrc/ops/comm/comm_cuda.cu
  csrc/ops/comm/peer_memory.cu
  csrc/ops/kv/kv_cache_cuda.cu
  csrc/ops/kv/store_codes.cu
  csrc/ops/merge/soft_embedding_cuda.cu
  csrc/ops/merge/token_merge_cuda.cu
  csrc/ops/moe/fused_moe_cuda.cu
  csrc/ops/moe/mma_bf16.cu
  csrc/ops/moe/mma_f16.cu
  csrc/ops/moe/moe_combine_cuda.cu
  csrc/ops/moe/moe_generic_cuda.cu
  csrc/ops/moe/moe_permute_cuda.cu
  csrc/ops/moe/router_gemm_cuda.cu
  csrc/ops/moe/routing_cuda.cu
  csrc/ops/moe/scaled_moe_cuda.cu
  csrc/ops/norm/norm_cuda.cu
  csrc/ops/quant/dequantize_cuda.cu
  csrc/ops/quant/products_cuda.cu
  csrc/ops/quant/quantize_cuda.cu
  csrc/ops/quant/scaled_e4m3.cu
  csrc/ops/quant/scaled_int8.cu
  csrc/ops/rope/rope_cuda.cu
  csrc/ops/rope/stream.cu
  csrc/ops/sampling/merge_token_stats_cuda.cu
  csrc/ops/sampling/sample_filtered_cuda.cu
  csrc/ops/sampling/token_stats_cuda.cu
  csrc/ops/shared/cuda/check_data.cu
  csrc/ops/warmup_cuda.cu
)
set(DIFFULEX_CUDA_PORTABLE_FULL_SOURCES
  csrc/ops/attention/generic_codes_f16.cu
  csrc/ops/attention/generic_f16.cu
)

# csrc/ops/*/sm80: tensor-core kernels of the sm_80 class. To this group and the next come the kernels
# of csrc/ops/attention/<group>/instances.def (DiffulexInstances).
set(DIFFULEX_CUDA_SM80_SOURCES
)

# csrc/ops/*/sm90: compiled for 90a only, never together with another architecture.
set(DIFFULEX_CUDA_SM90_SOURCES
  csrc/ops/attention/sm90/maps.cu
  csrc/ops/attention/sm90/table.cu
  csrc/ops/linear/sm90/few_rows.cu
  csrc/ops/moe/sm90/gather_rows.cu
  csrc/ops/moe/sm90/inst_bf16.cu
  csrc/ops/moe/sm90/inst_e4m3.cu
  csrc/ops/quant/sm90/experts_int4.cu
  csrc/ops/quant/sm90/linear_scaled.cu
  csrc/ops/quant/sm90/linear_w4a16.cu
  csrc/ops/sampling/sm90/sample_filtered_cluster.cu
  csrc/ops/sampling/sm90/token_stats_cluster.cu
)
set(DIFFULEX_CUDA_SM90_FULL_SOURCES
  csrc/ops/moe/sm90/inst_f16.cu
)

# Host-only .cpp files of diffulex_kernels: the first list when CUDA is built, the second when it is
# not (the same functions, answering kNoKernel). The sm90 lists do the same for the sm90 group.
set(DIFFULEX_CUDA_HOST_SOURCES
)
set(DIFFULEX_CUDA_ABSENT_SOURCES
  csrc/ops/comm/peer_absent.cpp
  csrc/ops/cuda_absent.cpp
  csrc/ops/warmup_absent.cpp
)
set(DIFFULEX_CUDA_SM90_HOST_SOURCES
  csrc/ops/moe/sm90/dispatch.cpp
  csrc/ops/shared/cuda/tensor_map.cpp
)
set(DIFFULEX_CUDA_SM90_ABSENT_SOURCES
  csrc/ops/attention/sm90/absent.cpp
  csrc/ops/linear/sm90/absent.cpp
  csrc/ops/moe/sm90/absent.cpp
  csrc/ops/quant/sm90/absent.cpp
  csrc/ops/sampling/sm90/absent.cpp
)
