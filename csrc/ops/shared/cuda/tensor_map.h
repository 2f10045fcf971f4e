// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <cuda.h>

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"

namespace diffulex::cuda::sm90 {

/// A tensor as the copy engine sees it, innermost dimension first. The innermost stride is one
/// element; the box's innermost extent must span 128 bytes, to be swizzled, or 64, which are not.
struct TensorMapShape final {
  static constexpr int kMaxRank = 5;
  int32_t rank = 0;
  const void* data = nullptr;     // 16-byte aligned
  int64_t size[kMaxRank] = {};    // elements, >= 1
  int64_t stride[kMaxRank] = {};  // elements; [0] is not read; multiples of 16 bytes
  int32_t box[kMaxRank] = {};     // elements, <= 256
};

/// Encodes a tiled map with zero fill, and the 128-byte swizzle if rows are that long; `where`
/// names the op in errors.
[[nodiscard]] Status encode_tensor_map(const char* where, const TensorMapShape& shape, DType dtype,
                                       CUtensorMap* map);

}  // namespace diffulex::cuda::sm90
