# SPDX-License-Identifier: Apache-2.0
#
# Sources of what Python loads. Paths are relative to the repository root, one per line, sorted.

# The module diffulex_ext._core: no torch header. At most 8 files, split by topic.
set(DIFFULEX_PYBIND_SOURCES
  csrc/pybind/bind_kernels.cpp
  csrc/pybind/bind_kv_cache.cpp
  csrc/pybind/bind_options.cpp
  csrc/pybind/bind_plan.cpp
  csrc/pybind/bind_request.cpp
  csrc/pybind/bind_scheduler.cpp
  csrc/pybind/bind_strategy.cpp
  csrc/pybind/module.cpp
)

# libdiffulex_ops.so: torch stable ABI only (torch/csrc/stable, torch/headeronly).
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
