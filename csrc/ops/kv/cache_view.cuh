// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/ops/attention.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex::cuda {

/// One paged cache tensor in either layout. Element (page, offset, head, dim) lies at
/// page * page_stride + offset * token_stride + head * head_stride
///   + (dim / chunk) * chunk_stride + (dim % chunk) * dim_stride.
struct CacheView final {
  void* data = nullptr;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t chunk_stride = 0;
  int64_t dim_stride = 1;
  int32_t chunk = 1 << 30;  // dims that lie together
  int32_t page_size = 1;
  int32_t num_pages = 0;

  static CacheView of_keys(const TensorRef& cache, KvLayout layout) {
    if (layout == KvLayout::kUnified) {
      return unified(cache);
    }
    CacheView view = placed(cache, 3, 1);
    view.chunk_stride = cache.stride[2];
    view.dim_stride = cache.stride[4];
    view.chunk = static_cast<int32_t>(cache.size[4] > 0 ? cache.size[4] : 1);
    return view;
  }

  static CacheView of_values(const TensorRef& cache, KvLayout layout) {
    if (layout == KvLayout::kUnified) {
      return unified(cache);
    }
    CacheView view = placed(cache, 3, 1);
    view.dim_stride = cache.stride[2];
    return view;
  }

  __host__ __device__ int64_t offset(int64_t page, int64_t token, int64_t head, int32_t dim) const {
    return page * page_stride + token * token_stride + head * head_stride +
           static_cast<int64_t>(dim / chunk) * chunk_stride + (dim % chunk) * dim_stride;
  }

  /// True when the dims of a head are contiguous and every head starts at a multiple of
  /// `alignment` bytes.
  [[nodiscard]] bool is_row_aligned(int64_t alignment, int64_t element_bytes) const {
    return chunk == 1 << 30 && dim_stride == 1 &&
           reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(alignment) == 0 &&
           page_stride * element_bytes % alignment == 0 &&
           token_stride * element_bytes % alignment == 0 &&
           head_stride * element_bytes % alignment == 0;
  }
  [[nodiscard]] bool is_row_aligned16(int64_t element_bytes) const {
    return is_row_aligned(16, element_bytes);
  }

 private:
  static CacheView unified(const TensorRef& cache) {
    CacheView view = placed(cache, 1, 2);
    view.dim_stride = cache.stride[3];
    return view;
  }
  /// `token` and `head` are the indices of dimensions of the cache, whose first is that of pages.
  static CacheView placed(const TensorRef& cache, int token, int head) {
    CacheView view;
    view.data = cache.data;
    view.page_stride = cache.stride[0];
    view.token_stride = cache.stride[token];
    view.head_stride = cache.stride[head];
    view.page_size = static_cast<int32_t>(cache.size[token]);
    view.num_pages = static_cast<int32_t>(cache.size[0]);
    return view;
  }
};

}  // namespace diffulex::cuda
