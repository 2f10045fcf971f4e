// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <cuda.h>

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"

namespace diffulex::cuda {
struct AttentionArgs;
}  // namespace diffulex::cuda

namespace diffulex::cuda::sm90 {

/// Rows of one box of in-flight keys or values of a short piece.
inline constexpr int kInFlightBox = 32;

/// Boxes of cached keys: elements of `dtype`, `dims` and at most `keys` of them.
struct CacheBox final {
  DType dtype;
  int32_t dims;
  int32_t keys;
};

/// Tensor maps of one call. Coordinates, innermost first:
struct AttentionMaps final {
  CUtensorMap q;       // dim, head in group, token, KV head; box 64 x G x tokens_per_tile x 1
  CUtensorMap k;       // dim, head, token; box 64 x 1 x kInFlightBox
  CUtensorMap v;       // as k
  CUtensorMap k_tile;  // as k with boxes of a whole key tile
  CUtensorMap v_tile;
  CUtensorMap k_cache;  // dim, head, token in page, page; box dims x 1 x min(page_size, keys) x 1
  CUtensorMap v_cache;  // as k_cache
};

/// Encodes the maps of a call whose key tiles hold `tile_keys` keys.
[[nodiscard]] Status make_attention_maps(const AttentionArgs& args, DType dtype, int tile_keys,
                                         const CacheBox& cache_box, AttentionMaps* maps);

}  // namespace diffulex::cuda::sm90
