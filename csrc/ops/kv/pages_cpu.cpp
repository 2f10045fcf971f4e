// SPDX-License-Identifier: Apache-2.0
#include "ops/kv/pages_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/kv/scaled_code.h"

namespace diffulex::cpu {
namespace {

template <typename T>
void copy_scattered(const HeadVector& from, const HeadVector& to, int64_t count) {
  const T* source = static_cast<const T*>(static_cast<const void*>(from.data));
  T* target = static_cast<T*>(static_cast<void*>(to.data));
  for (int64_t i = 0; i < count; ++i) {
    target[i / to.group * to.group_stride + i % to.group] =
        source[i / from.group * from.group_stride + i % from.group];
  }
}

}  // namespace

KvPages KvPages::keys(const TensorRef& cache, const TensorRef& scale, KvLayout layout,
                      int64_t head_dim) {
  KvPages pages;
  pages.data_ = cache.as<char>();
  pages.dtype_ = cache.dtype;
  pages.page_stride_ = cache.stride[0];
  if (layout == KvLayout::kDistinct) {
    pages.head_stride_ = cache.stride[1];
    pages.group_stride_ = cache.stride[2];
    pages.slot_stride_ = cache.stride[3];
    pages.group_ = cache.size[4];
  } else {
    pages.slot_stride_ = cache.stride[1];
    pages.head_stride_ = cache.stride[2];
    pages.group_ = head_dim;
    pages.group_stride_ = head_dim;
  }
  if (scale.present()) {
    pages.scales_ = scale.as<uint8_t>();
    std::copy_n(scale.stride, 3, pages.scale_stride_);
  }
  return pages;
}

KvPages KvPages::values(const TensorRef& cache, const TensorRef& scale, KvLayout layout,
                        int64_t head_dim) {
  if (layout != KvLayout::kDistinct) {
    return keys(cache, scale, layout, head_dim);
  }
  KvPages pages;
  pages.data_ = cache.as<char>();
  pages.dtype_ = cache.dtype;
  pages.page_stride_ = cache.stride[0];
  pages.head_stride_ = cache.stride[1];
  pages.group_stride_ = cache.stride[2];
  pages.slot_stride_ = 1;
  pages.group_ = 1;
  return pages;
}

void decode_head(const char* codes, uint8_t scale, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = kv_value(static_cast<uint8_t>(codes[i]), scale);
  }
}

uint8_t encode_head(const float* values, int64_t count, char* codes) {
  float largest = 0.0F;
  bool has_nan = false;
  for (int64_t i = 0; i < count; ++i) {
    has_nan = has_nan || std::isnan(values[i]);
    largest = std::max(largest, std::fabs(values[i]));
  }
  if (has_nan) {
    std::memset(codes, 0, static_cast<size_t>(count));
    return kNanKvScale;
  }
  const uint8_t scale = kv_scale(largest);
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<char>(kv_code(values[i], scale));
  }
  return scale;
}

void copy_head_vector(const HeadVector& from, const HeadVector& to, int64_t count,
                      int64_t element_bytes) {
  const int64_t group = std::min(from.group, to.group);
  const bool whole_groups = from.group % group == 0 && to.group % group == 0;
  // Short groups cost more as calls than as element copies.
  constexpr int64_t kShortGroup = 4;
  if (!whole_groups || group < kShortGroup) {
    return element_bytes == 4 ? copy_scattered<uint32_t>(from, to, count)
                              : copy_scattered<uint16_t>(from, to, count);
  }
  for (int64_t i = 0; i < count; i += group) {
    const int64_t length = std::min(group, count - i);
    const int64_t source = i / from.group * from.group_stride + i % from.group;
    const int64_t target = i / to.group * to.group_stride + i % to.group;
    std::memcpy(to.data + target * element_bytes, from.data + source * element_bytes,
                static_cast<size_t>(length * element_bytes));
  }
}

}  // namespace diffulex::cpu
