// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the rotary kernels are told, and the parts of their work that must give the same bits in
// each of them.

#include <cstdint>

#include "diffulex/ops/exec_context.h"
#include "ops/kv/cache_view.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {

/// Heads of one projection inside the packed rows.
struct HeadGroup final {
  void* data;            // first head of token 0
  int64_t token_stride;  // in elements
  int64_t head_stride;
  const void* weight;  // [D] or null
  int32_t num_heads;
  bool has_norm;  // RMSNorm before the rotation
  bool is_weight_float;
};

struct RopeArgs final {
  HeadGroup q;
  HeadGroup k;
  HeadGroup v;           // num_heads = 0 when V needs no work; token 0 of v_out if separate
  const float* cos_sin;  // [max_pos, rotary_dim]
  int64_t cos_sin_stride;
  int64_t max_position;
  const void* positions;  // [T]
  bool is_position_int64;
  const void* slots;  // [T] or null
  bool is_slot_int64;
  CacheView k_cache;
  CacheView v_cache;
  int32_t cache_dtype;  // DType of the caches
  bool is_cache_plain;  // caches of the rows' type with contiguous, aligned heads
  int64_t num_tokens;
  int32_t num_warp_heads;  // warps per token
  int32_t warp_heads;      // consecutive heads of one projection that a warp does
  int32_t q_end;           // heads of q and k, rounded up to warp_heads
  int32_t k_end;
  int32_t head_dim;
  int32_t rotary_dim;
  float eps;
  float weight_offset;
  bool neox;
  bool v_from_raw_k;
};

/// Page and offset of a slot; page -1 when nothing is stored.
struct SlotPlace final {
  int64_t page = -1;
  int64_t offset = 0;
};

__device__ __forceinline__ SlotPlace find_slot(const RopeArgs& args, int64_t token) {
  SlotPlace place;
  if (args.slots == nullptr) {
    return place;
  }
  const int64_t slot = load_index(args.slots, args.is_slot_int64, token);
  if (slot >= 0 && slot <= UINT32_MAX) {
    const auto page_size = static_cast<uint32_t>(args.k_cache.page_size);
    const uint32_t page = static_cast<uint32_t>(slot) / page_size;
    if (page < static_cast<uint32_t>(args.k_cache.num_pages)) {
      place.page = page;
      place.offset = static_cast<uint32_t>(slot) - page * page_size;
    }
  } else if (slot >= 0 && slot / args.k_cache.page_size < args.k_cache.num_pages) {
    place.page = slot / args.k_cache.page_size;
    place.offset = slot % args.k_cache.page_size;
  }
  return place;
}

/// What warp `index` of a launch does: warp_heads heads of one projection of one token.
struct HeadRun final {
  int64_t token;
  int32_t part;   // 0 = q, 1 = k, 2 = v
  int32_t first;  // head of the projection
};

__device__ __forceinline__ HeadRun find_heads(const RopeArgs& args, int64_t index) {
  HeadRun run;
  // 32-bit division where it is enough.
  run.token = index <= UINT32_MAX
                  ? static_cast<uint32_t>(index) / static_cast<uint32_t>(args.num_warp_heads)
                  : index / args.num_warp_heads;
  run.part = 0;
  run.first = static_cast<int32_t>(index - run.token * args.num_warp_heads) * args.warp_heads;
  if (run.first >= args.q_end) {
    run.first -= args.q_end;
    run.part = 1;
    if (run.first >= args.k_end) {
      run.first -= args.k_end;
      run.part = 2;
    }
  }
  return run;
}

/// Cosines, then sines of the position of a token.
__device__ __forceinline__ const float* find_angles(const RopeArgs& args, int64_t token) {
  int64_t position = load_index(args.positions, args.is_position_int64, token);
  position = position < 0 ? 0 : (position >= args.max_position ? args.max_position - 1 : position);
  return args.cos_sin + position * args.cos_sin_stride;
}

__device__ __forceinline__ void rotate_pair(float cosine, float sine, float& first, float& second) {
  const float x1 = first;
  const float x2 = second;
  first = fmaf(x1, cosine, -(x2 * sine));
  second = fmaf(x2, cosine, x1 * sine);
}

/// Deals the heads of every projection to warps, `warp_heads` each.
inline void deal_heads(int32_t warp_heads, RopeArgs* args) {
  const auto round_up = [&](int32_t heads) {
    return (heads + warp_heads - 1) / warp_heads * warp_heads;
  };
  args->warp_heads = warp_heads;
  args->q_end = round_up(args->q.num_heads);
  args->k_end = round_up(args->k.num_heads);
  args->num_warp_heads = (args->q_end + args->k_end + round_up(args->v.num_heads)) / warp_heads;
}

}  // namespace diffulex::cuda
