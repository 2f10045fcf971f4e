// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/ops/dtype.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex::cuda {

/// Offsets of the rows of a tensor [..., H] whose leading strides are free: adjacent dimensions
/// are merged on the host, so the common case costs one multiplication.
struct RowLayout final {
  static constexpr int kMaxDims = TensorRef::kMaxRank - 1;

  int32_t num_dims = 0;         // merged leading dimensions, innermost first
  int64_t size[kMaxDims] = {};  // extents
  int64_t stride[kMaxDims] = {};

  static RowLayout of(const TensorRef& tensor) {
    RowLayout layout;
    for (int32_t dim = tensor.rank - 2; dim >= 0; --dim) {
      if (tensor.size[dim] == 1) {
        continue;
      }
      const int32_t inner = layout.num_dims - 1;
      if (inner >= 0 && tensor.stride[dim] == layout.stride[inner] * layout.size[inner]) {
        layout.size[inner] *= tensor.size[dim];
        continue;
      }
      layout.size[layout.num_dims] = tensor.size[dim];
      layout.stride[layout.num_dims] = tensor.stride[dim];
      ++layout.num_dims;
    }
    return layout;
  }

  /// Offset in elements of row `row`.
  __host__ __device__ int64_t offset(int64_t row) const {
    if (num_dims <= 1) {
      return num_dims == 0 ? 0 : row * stride[0];
    }
    int64_t result = 0;
#pragma unroll
    for (int dim = 0; dim < kMaxDims; ++dim) {
      if (dim < num_dims) {
        result += (row % size[dim]) * stride[dim];
        row /= size[dim];
      }
    }
    return result;
  }

  /// True when every row starts at a multiple of 16 bytes after the base.
  [[nodiscard]] bool is_aligned16(int64_t element_bytes) const {
    for (int32_t dim = 0; dim < num_dims; ++dim) {
      if (stride[dim] * element_bytes % 16 != 0) {
        return false;
      }
    }
    return true;
  }
};

/// Rows of a tensor [..., H].
[[nodiscard]] inline int64_t num_rows(const TensorRef& tensor) {
  return tensor.last() == 0 ? 0 : tensor.numel() / tensor.last();
}

}  // namespace diffulex::cuda
