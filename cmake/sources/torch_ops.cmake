# SPDX-License-Identifier: Apache-2.0
#
# Sources of libdiffulex_ops.so: torch stable ABI only (torch/csrc/stable, torch/headeronly).
# Paths are relative to the repository root, one per line, sorted.

# Schemas, checks and the CPU registrations.
set(DIFFULEX_TORCH_SOURCES
  csrc/torch/bind_acceptance.cpp
  csrc/torch/bind_activation.cpp
  csrc/torch/bind_attention.cpp
  csrc/torch/bind_decode.cpp
  csrc/torch/bind_kv_cache.cpp
  csrc/torch/bind_linear.cpp
  csrc/torch/bind_merge.cpp
  csrc/torch/bind_moe.cpp
  csrc/torch/bind_norm.cpp
  csrc/torch/bind_rope.cpp
  csrc/torch/bind_sampling.cpp
  csrc/torch/checks.cpp
  csrc/torch/control.cpp
  csrc/torch/register_ops.cpp
  csrc/torch/schemas.cpp
  csrc/torch/stream.cpp
)
# The CUDA registrations; compiled only when CUDA is built.
set(DIFFULEX_TORCH_CUDA_SOURCES
  csrc/torch/register_cuda.cpp
)
# Their counterparts when CUDA is not built (usually none).
set(DIFFULEX_TORCH_NO_CUDA_SOURCES
)
