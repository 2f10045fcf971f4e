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
  [[nodiscard]] static KvPages keys(const TensorRef& cache, KvLayout layout, int64_t head_dim);
  [[nodiscard]] static KvPages values(const TensorRef& cache, KvLayout layout, int64_t head_dim);

  [[nodiscard]] HeadVector at(int64_t page_id, int64_t offset, int64_t head) const {
    const int64_t element = page_id * page_stride_ + offset * slot_stride_ + head * head_stride_;
    return HeadVector{data_ + element * dtype_bytes(dtype_), group_, group_stride_};
  }
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }

 private:
  KvPages() = default;

  char* data_ = nullptr;  // owner: the caller of the op
  DType dtype_ = DType::kF32;
  int64_t page_stride_ = 0;
  int64_t slot_stride_ = 0;
  int64_t head_stride_ = 0;
  int64_t group_ = 0;
  int64_t group_stride_ = 0;
};

/// Copies `count` elements of `element_bytes` between two group layouts.
void copy_head_vector(const HeadVector& from, const HeadVector& to, int64_t count,
                      int64_t element_bytes);

}  // namespace diffulex::cpu
