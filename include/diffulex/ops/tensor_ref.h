// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/ops/dtype.h"

namespace diffulex {

/// Borrowed strided tensor. `data == nullptr` with `rank == -1` means "argument absent".
struct TensorRef {
  static constexpr int32_t kMaxRank = 5;

  void* data = nullptr;           // first element; owner: the caller
  DType dtype = DType::kF32;      // element type
  int32_t rank = -1;              // number of dimensions, -1 = absent
  int64_t size[kMaxRank] = {};    // extents, in elements
  int64_t stride[kMaxRank] = {};  // distances, in elements

  [[nodiscard]] bool present() const noexcept { return rank >= 0; }
  [[nodiscard]] int64_t numel() const noexcept {
    int64_t count = 1;
    for (int32_t dim = 0; dim < rank; ++dim) {
      count *= size[dim];
    }
    return rank < 0 ? 0 : count;
  }
  /// Extent of the last dimension; 1 for a scalar.
  [[nodiscard]] int64_t last() const noexcept { return rank > 0 ? size[rank - 1] : 1; }
  template <typename T>
  [[nodiscard]] T* as() const noexcept {
    return static_cast<T*>(data);
  }
};

}  // namespace diffulex
