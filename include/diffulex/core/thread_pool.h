// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "diffulex/export.h"

namespace diffulex {

/// Fixed set of worker threads for data-parallel loops. A loop started while another one runs
/// (from another thread or from inside a loop body) runs on its calling thread. Thread-safe.
class DIFFULEX_API ThreadPool final {
 public:
  /// Body of a loop over [begin, end).
  using RangeFn = void (*)(int64_t begin, int64_t end, void* context);

  /// `num_threads` counts the caller; below 2 every loop is serial.
  explicit ThreadPool(int32_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int32_t num_threads() const noexcept;

  /// Runs `body` over disjoint sub-ranges that cover [begin, end) exactly, each at least `grain`
  /// long except the last; returns when all are done. The first exception of a body is rethrown
  /// here after the others have finished; sub-ranges not yet started are then dropped.
  void run(int64_t begin, int64_t end, int64_t grain, RangeFn body, void* context);

  /// `run` with the signature kernels expect; `pool` is a ThreadPool.
  static void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFn body, void* context,
                           void* pool);

 private:
  class Workers;

  std::unique_ptr<Workers> workers_;
};

}  // namespace diffulex
