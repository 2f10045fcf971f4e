// SPDX-License-Identifier: Apache-2.0
#pragma once

// Device view of one block_attention call, shared by the tensor-core, generic and combine kernels.
// T packed rows, R requests, Hq / Hkv heads, G = Hq / Hkv, D head dim, S split bound.

#include <cstdint>
#include <type_traits>

#include "diffulex/ops/row_interval.h"
#include "ops/kv/cache_view.cuh"
#include "ops/kv/codes.cuh"
#include "ops/quant/code_rows.cuh"
#include "ops/shared/fast_div.h"

namespace diffulex::cuda {

struct AttentionArgs {
  const void* q;        // [T, Hq, D]
  const void* k;        // [T, Hkv, D]
  const void* v;        // [T, Hkv, D]
  void* out;            // [T, Hq, D], or null where the codes alone are wanted
  float* lse;           // [T, Hq] or null
  int64_t q_stride[3];  // token, head, dim
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t out_stride[3];
  int64_t lse_stride[2];
  CacheView k_cache;
  CacheView v_cache;
  const int32_t* page_table;  // [R, max_pages]
  int64_t page_table_stride;
  int32_t max_pages;
  int32_t page_shift;                 // log2(page_size) for the tensor-core kernels
  const int32_t* cu_seqlens_q;        // [R + 1]
  const int32_t* context_lens;        // [R]
  const int32_t* valid_slices;        // [R]
  const int32_t* mask_kinds;          // [R]
  const int32_t* prefix_lens;         // [R] or null
  const int32_t* padded_prefix_lens;  // [R] or null
  const int32_t* q_starts;            // [R] or null
  float* partial_out;                 // [S, R, max_seqlen_q, Hq, D], unnormalised
  float2* partial_stats;              // [S, R, max_seqlen_q, Hq]: maximum (base 2), sum
  uint64_t* arrivals;                 // sm90: [units, cluster_size], see arrive_last()
  uint64_t launch_tag;                // sm90: what counters of this launch are marked with
  float scale;
  float softcap;
  int32_t num_tokens;  // T
  int32_t num_reqs;    // R
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t group;  // G
  int32_t head_dim;
  int32_t block_size;
  int32_t sliding_window;
  int32_t max_seqlen_q;
  int32_t tiles_per_request;
  int32_t rows_per_tile;  // M
  int32_t tokens_per_tile;
  int32_t num_splits;  // S
  int32_t keys_per_split;
  int32_t block_shift;  // log2(block_size), or -1
  FastDiv by_group;
  FastDiv by_kv_heads;
  FastDiv by_tile_tokens;
  int32_t cluster_size;  // CTAs that share a unit as splits; 1 = each split is a unit
};

/// A call whose caches hold codes; its kernels cast to it what they are handed.
struct CodedAttentionArgs final : AttentionArgs {
  KvScales k_scales;
  KvScales v_scales;
};

/// What the kernels for cached elements of type Cached are told: KvCode, or the type of the rows.
template <typename Cached>
using AttentionArgsOf =
    std::conditional_t<std::is_same_v<Cached, KvCode>, CodedAttentionArgs, AttentionArgs>;

/// One request as the kernels see it: lengths clamped so that bad data cannot leave the buffers.
struct RequestView final {
  RequestMask mask;
  int32_t first_token;  // first packed row
  int32_t num_rows;     // L
  int32_t splits;       // s_r
};

/// The metadata of one request as stored.
struct RawRequest final {
  int32_t start = 0;
  int32_t end = 0;
  int32_t valid_slice = 0;
  int32_t context_len = 0;
  int32_t mask_kind = 0;
  int32_t prefix_len = 0;
  int32_t padded_prefix_len = 0;
  int32_t q_start = 0;

  __device__ __forceinline__ bool equals(const RawRequest& other) const {
    return start == other.start && end == other.end && valid_slice == other.valid_slice &&
           context_len == other.context_len && mask_kind == other.mask_kind &&
           prefix_len == other.prefix_len && padded_prefix_len == other.padded_prefix_len &&
           q_start == other.q_start;
  }
};

/// Reads past L1: a kernel may look at the metadata before the kernels ahead of it have ended, and
/// must not find what it saw then when it looks again.
__device__ __forceinline__ RawRequest read_request(const AttentionArgs& args, int32_t request) {
  RawRequest raw;
  raw.start = __ldcg(args.cu_seqlens_q + request);
  raw.end = __ldcg(args.cu_seqlens_q + request + 1);
  raw.valid_slice = __ldcg(args.valid_slices + request);
  raw.context_len = __ldcg(args.context_lens + request);
  raw.mask_kind = __ldcg(args.mask_kinds + request);
  raw.prefix_len = args.prefix_lens == nullptr ? 0 : __ldcg(args.prefix_lens + request);
  raw.padded_prefix_len =
      args.padded_prefix_lens == nullptr ? 0 : __ldcg(args.padded_prefix_lens + request);
  raw.q_start = args.q_starts == nullptr ? raw.context_len : __ldcg(args.q_starts + request);
  return raw;
}

/// Rows of a request that are real.
__device__ __forceinline__ int32_t live_rows(const AttentionArgs& args, const RawRequest& raw) {
  const int32_t start = clamp_i32(raw.start, 0, args.num_tokens);
  const int32_t end = clamp_i32(raw.end, start, args.num_tokens);
  return num_valid_rows(start, start + min_i32(end - start, args.max_seqlen_q), raw.valid_slice);
}

__device__ __forceinline__ RequestView view_request(const AttentionArgs& args,
                                                    const RawRequest& raw) {
  RequestView view;
  const int32_t start = clamp_i32(raw.start, 0, args.num_tokens);
  const int32_t end = clamp_i32(raw.end, start, args.num_tokens);
  view.first_token = start;
  view.num_rows = min_i32(end - start, args.max_seqlen_q);
  const int64_t capacity = static_cast<int64_t>(args.max_pages) * args.k_cache.page_size;
  const int32_t limit = capacity < (1 << 30) ? static_cast<int32_t>(capacity) : 1 << 30;
  RequestMask& mask = view.mask;
  mask.context_len = clamp_i32(raw.context_len, 0, limit);
  mask.num_valid = num_valid_rows(start, start + view.num_rows, raw.valid_slice);
  mask.start_position = raw.q_start;
  mask.prefix_len = raw.prefix_len;
  mask.padded_prefix_len = raw.padded_prefix_len;
  mask.kind = raw.mask_kind & 0xFF;
  mask.block_size = args.block_size;
  mask.block_shift = args.block_shift;
  mask.block_origin = mask_block_origin(mask);
  mask.sliding_window = args.sliding_window;
  mask.is_anchored = (raw.mask_kind & kMaskAnchorBit) != 0;
  mask.hole = mask_hole(raw.mask_kind, mask.context_len, mask.prefix_len, mask.padded_prefix_len);
  view.splits = 1;
  if (args.num_splits > 1) {
    view.splits = request_splits(
        max_tile_keys(mask.context_len, mask.num_valid, raw.mask_kind, args.sliding_window),
        args.num_splits, args.keys_per_split);
  }
  return view;
}

__device__ __forceinline__ RequestView load_request(const AttentionArgs& args, int32_t request) {
  return view_request(args, read_request(args, request));
}

/// Index of the partial record of a row; the request, not the packed row, addresses it, so that
/// bad offsets cannot leave the workspace.
__device__ __forceinline__ int64_t partial_index(const AttentionArgs& args, int32_t split,
                                                 int32_t request, int32_t token, int32_t head) {
  return ((static_cast<int64_t>(split) * args.num_reqs + request) * args.max_seqlen_q + token) *
             args.num_q_heads +
         head;
}

/// One unit of work of a CTA.
struct AttentionWork final {
  int32_t request;
  int32_t kv_head;
  int32_t tile;
  int32_t split;
};

/// Units that compute rows: every (request, head, tile, split).
__device__ __forceinline__ int64_t num_work(const AttentionArgs& args) {
  return static_cast<int64_t>(args.num_reqs) * args.num_kv_heads * args.num_splits *
         args.tiles_per_request;
}

/// Unit `index`. Row tiles run innermost, last tile first: they share K and V through L2, and the
/// last tile of a causal request sees most keys.
__device__ __forceinline__ AttentionWork work_at(const AttentionArgs& args, int64_t index) {
  AttentionWork work;
  work.tile = args.tiles_per_request - 1 - static_cast<int32_t>(index % args.tiles_per_request);
  index /= args.tiles_per_request;
  work.split = static_cast<int32_t>(index % args.num_splits);
  index /= args.num_splits;
  work.kv_head = static_cast<int32_t>(index % args.num_kv_heads);
  work.request = static_cast<int32_t>(index / args.num_kv_heads);
  return work;
}

/// Units that only zero rows: per request and tile the rows past valid_slices, and for the
/// pseudo-request R the packed rows past the last request.
__device__ __forceinline__ int64_t num_zero_work(const AttentionArgs& args) {
  return static_cast<int64_t>(args.num_reqs + 1) * args.tiles_per_request;
}

/// Zeroes `count` elements `stride` apart, 16 bytes a thread where they lie together: a single warp
/// has whole tiles of rows to zero.
template <typename T>
__device__ __forceinline__ void zero_run(T* out, int32_t count, int64_t stride, int32_t thread,
                                         int32_t num_threads) {
  constexpr int32_t kPiece = 16 / sizeof(T);
  int32_t done = 0;
  if (stride == 1 && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    done = count / kPiece * kPiece;
#pragma unroll 4
    for (int32_t elem = thread * kPiece; elem < done; elem += num_threads * kPiece) {
      *reinterpret_cast<uint4*>(out + elem) = make_uint4(0, 0, 0, 0);
    }
  }
  for (int32_t elem = done + thread; elem < count; elem += num_threads) {
    out[elem * stride] = T(0.0F);
  }
}

/// Zeroes the rows of one such unit, and their codes where there are some, with the threads
/// `thread`, `thread` + `num_threads`, ...
template <typename T, typename Rows = NoCodeRows>
__device__ void zero_rows(const AttentionArgs& args, int64_t unit, int32_t thread,
                          int32_t num_threads, [[maybe_unused]] const Rows& code_rows = {}) {
  constexpr bool kWritesCodes = std::is_same_v<Rows, CodeRows>;
  const int32_t request = static_cast<int32_t>(unit / args.tiles_per_request);
  const int32_t tile = static_cast<int32_t>(unit % args.tiles_per_request);
  int32_t first;
  int32_t last;
  int32_t step = 1;
  if (request < args.num_reqs) {
    const RequestView view = load_request(args, request);
    first = view.first_token + max_i32(tile * args.tokens_per_tile, view.mask.num_valid);
    last = view.first_token + min_i32((tile + 1) * args.tokens_per_tile, view.num_rows);
  } else {
    first = clamp_i32(args.cu_seqlens_q[args.num_reqs], 0, args.num_tokens) + tile;
    last = args.num_tokens;
    step = args.tiles_per_request;
  }
  const bool is_dense = args.out_stride[2] == 1 && args.out_stride[1] == args.head_dim;
  const int32_t num_runs = is_dense ? 1 : args.num_q_heads;
  const int32_t run_elems = is_dense ? args.num_q_heads * args.head_dim : args.head_dim;
  for (int32_t token = first; token < last; token += step) {
    T* row = static_cast<T*>(args.out) + token * args.out_stride[0];
    for (int32_t run = 0; run < num_runs && (!kWritesCodes || args.out != nullptr); ++run) {
      zero_run(row + run * args.out_stride[1], run_elems, args.out_stride[2], thread, num_threads);
    }
    if constexpr (kWritesCodes) {
      const int32_t width = args.num_q_heads * args.head_dim;
      zero_run(code_rows.codes + token * code_rows.codes_stride, width, 1, thread, num_threads);
      for (int32_t group = thread; group < width / kQuantGroup; group += num_threads) {
        code_rows.scale[group * code_rows.scale_stride + token] = 1.0F;
      }
    }
    if (args.lse != nullptr) {
      for (int32_t head = thread; head < args.num_q_heads; head += num_threads) {
        args.lse[token * args.lse_stride[0] + head * args.lse_stride[1]] = -INFINITY;
      }
    }
  }
}

template <typename T>
__device__ void zero_rows(const AttentionArgs& args, int64_t unit) {
  zero_rows<T>(args, unit, static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x));
}

}  // namespace diffulex::cuda
