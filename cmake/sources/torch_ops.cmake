# SPDX-License-Identifier: Apache-2.0
#
# Sources of libdiffulex_ops.so: torch stable ABI only (torch/csrc/stable, torch/headeronly).
# Paths are relative to the repository root, one per line, sorted.

# Schemas, checks and the CPU registrations.
set(DIFFULEX_TORCH_SOURCES
  csrc/torch/checks.cpp
  csrc/torch/control.cpp
  csrc/torch/op_arguments.cpp
  csrc/torch/ops.cpp
  csrc/torch/stream.cpp
)
# The CUDA registrations; compiled only when CUDA is built.
set(DIFFULEX_TORCH_CUDA_SOURCES
  csrc/torch/register_cuda.cpp
)
# Their counterparts when CUDA is not built (usually none).
set(DIFFULEX_TORCH_NO_CUDA_SOURCES
)
