// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex::cpu {

/// Calls body(begin, end) over [0, n); on the calling thread alone when n <= grain, because waking
/// a pool costs more than the work.
template <typename Body>
void parallel_ranges(const ExecContext& context, int64_t n, int64_t grain, const Body& body) {
  if (n <= grain) {
    if (n > 0) {
      body(int64_t{0}, n);
    }
    return;
  }
  const auto call = [](int64_t begin, int64_t end, void* user) {
    (*static_cast<const Body*>(user))(begin, end);
  };
  context.parallel_for(0, n, grain, call, const_cast<Body*>(&body), context.parallel_pool);
}

/// Elements a thread should handle at least in row-wise ops.
inline constexpr int64_t kParallelElements = 32768;

/// Rows per piece so that a piece has at least kParallelElements elements.
[[nodiscard]] inline int64_t row_grain(int64_t row_elements) {
  return std::max<int64_t>(1, kParallelElements / std::max<int64_t>(1, row_elements));
}

/// At least `count` floats of this thread, 64-byte aligned, contents undefined; the next call on
/// the thread with the same Tag invalidates it. Grows only, so that steady state never allocates.
template <typename Tag>
[[nodiscard]] float* thread_floats(int64_t count) {
  constexpr size_t kAlignment = 64;
  thread_local std::vector<float> storage;
  const size_t needed = static_cast<size_t>(count) + kAlignment / sizeof(float);
  if (storage.size() < needed) {
    storage.resize(needed);
  }
  void* start = storage.data();
  size_t space = storage.size() * sizeof(float);
  return static_cast<float*>(
      std::align(kAlignment, static_cast<size_t>(count) * sizeof(float), start, space));
}

/// Number of rows (all dimensions but the last).
[[nodiscard]] inline int64_t num_rows(const TensorRef& tensor) {
  int64_t rows = 1;
  for (int32_t dim = 0; dim + 1 < tensor.rank; ++dim) {
    rows *= tensor.size[dim];
  }
  return rows;
}

/// Element offset of row `row` in row-major order of the leading dimensions.
[[nodiscard]] inline int64_t row_offset(const TensorRef& tensor, int64_t row) {
  int64_t offset = 0;
  for (int32_t dim = tensor.rank - 2; dim >= 0; --dim) {
    offset += row % tensor.size[dim] * tensor.stride[dim];
    row /= tensor.size[dim];
  }
  return offset;
}

/// Address of the element at `offset`.
[[nodiscard]] inline char* element_at(const TensorRef& tensor, int64_t offset) {
  return tensor.as<char>() + offset * dtype_bytes(tensor.dtype);
}

/// Element `index` of an int32 or int64 vector.
[[nodiscard]] inline int64_t index_at(const TensorRef& tensor, int64_t index) {
  const int64_t offset = index * tensor.stride[0];
  return tensor.dtype == DType::kI64 ? tensor.as<const int64_t>()[offset]
                                     : tensor.as<const int32_t>()[offset];
}

}  // namespace diffulex::cpu
