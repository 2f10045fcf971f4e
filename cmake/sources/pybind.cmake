# SPDX-License-Identifier: Apache-2.0
#
# Sources of the Python module diffulex_ext._core: no torch header. At most 8 files, split by topic.
# Paths are relative to the repository root, one per line, sorted.

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
