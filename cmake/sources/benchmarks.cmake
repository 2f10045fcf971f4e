# SPDX-License-Identifier: Apache-2.0
#
# google-benchmark program diffulex_bench; benchmark::benchmark_main is linked, do not write a main().
# A benchmark that cannot run on this host calls SkipWithError("skipped: <reason>"); any other error
# message fails the ctest bench-smoke, which runs every benchmark for one iteration.
# Paths are relative to the repository root, one per line, sorted.

set(DIFFULEX_BENCH_SOURCES
    benchmarks/cpp/core_bench.cpp
    benchmarks/cpp/cpu_kernels_bench.cpp
)
# Only when CUDA is built; .cpp (CUDA runtime API only) or .cu.
set(DIFFULEX_BENCH_CUDA_SOURCES
  benchmarks/cpp/cuda_kernels_bench.cpp
  benchmarks/cpp/cuda_ops_bench.cpp
)
