// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/ops/attention.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex::cpu {

/// Where the D values of one (slot, head) lie: contiguous groups a fixed distance apart.
struct HeadVector {
  char* data = nullptr;
  int64_t group = 0;
  int64_t group_stride = 0;  // elements
};

/// One of the two caches with its layout resolved to strides.
class KvPages final {
 public:
  /// `scale` is absent, or the scale bytes of a unified cache of codes.
  [[nodiscard]] static KvPages keys(const TensorRef& cache, const TensorRef& scale, KvLayout layout,
                                    int64_t head_dim);
  [[nodiscard]] static KvPages values(const TensorRef& cache, const TensorRef& scale,
                                      KvLayout layout, int64_t head_dim);

  [[nodiscard]] HeadVector at(int64_t page_id, int64_t offset, int64_t head) const {
    const int64_t element = page_id * page_stride_ + offset * slot_stride_ + head * head_stride_;
    return HeadVector{data_ + element * dtype_bytes(dtype_), group_, group_stride_};
  }
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  /// Whether a slot holds codes with a scale byte per head.
  [[nodiscard]] bool has_scales() const noexcept { return scales_ != nullptr; }
  /// Scale byte of one head of a slot, only with has_scales.
  [[nodiscard]] uint8_t* scale_at(int64_t page_id, int64_t offset, int64_t head) const {
    return scales_ + page_id * scale_stride_[0] + head * scale_stride_[1] +
           offset * scale_stride_[2];
  }

 private:
  KvPages() = default;

  char* data_ = nullptr;  // owner: the caller of the op
  DType dtype_ = DType::kF32;
  int64_t page_stride_ = 0;
  int64_t slot_stride_ = 0;
  int64_t head_stride_ = 0;
  int64_t group_ = 0;
  int64_t group_stride_ = 0;
  uint8_t* scales_ = nullptr;  // owner: the caller of the op
  int64_t scale_stride_[3] = {};
};

/// Values of `count` codes below one scale byte.
void decode_head(const char* codes, uint8_t scale, int64_t count, float* out);
/// Codes of `count` values, and their scale byte.
[[nodiscard]] uint8_t encode_head(const float* values, int64_t count, char* codes);

/// Copies `count` elements of `element_bytes` between two group layouts.
void copy_head_vector(const HeadVector& from, const HeadVector& to, int64_t count,
                      int64_t element_bytes);

}  // namespace diffulex::cpu
