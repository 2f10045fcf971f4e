// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/kv.h"

namespace diffulex {

/// The two caches of an op and what they must hold.
struct KvCacheArguments {
  const char* op = nullptr;
  const TensorRef& k_cache;
  const TensorRef& v_cache;
  const TensorRef& k_scale;
  const TensorRef& v_scale;
  KvLayout layout = KvLayout::kUnified;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
};

/// Page geometry read from a checked cache.
struct KvCacheGeometry {
  int64_t num_pages = 0;
  int64_t page_size = 0;
  int64_t group = 0;  // contiguous K dims per group (x of the distinct layout, D otherwise)
};

/// Shape, dtype and layout of a cache pair; unified caches may have more heads and dims.
[[nodiscard]] Status check_kv_cache(const KvCacheArguments& arguments);
/// Geometry of a cache that passed check_kv_cache.
[[nodiscard]] KvCacheGeometry kv_cache_geometry(const TensorRef& k_cache, KvLayout layout,
                                                int64_t head_dim);

}  // namespace diffulex
