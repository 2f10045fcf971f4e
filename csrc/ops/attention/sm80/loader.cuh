// SPDX-License-Identifier: Apache-2.0
#pragma once

// Global to shared copies: packed query rows and key tiles from pages or from in-flight rows.

#include <cstdint>

#include "ops/attention/args.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/tile_walk.cuh"

namespace diffulex::cuda::sm80 {

/// Byte offset of 16-byte piece `chunk` of row `row`; the exclusive or spreads the eight rows of an
/// 8x8 matrix over all banks.
template <int kChunks>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return static_cast<uint32_t>((row * kChunks + (chunk ^ (row & 7))) * 16);
}

/// Packed query rows token * G + g of tokens [first, first + count); rows past them are zero.
template <typename Traits>
__device__ __forceinline__ void load_queries(const AttentionArgs& args, uint32_t target,
                                             int32_t first_token, int32_t num_rows,
                                             int32_t kv_head) {
  using T = typename Traits::Element;
  const T* q = static_cast<const T*>(args.q);
  const int chunk = threadIdx.x % Traits::kChunks;
  for (int row = threadIdx.x / Traits::kChunks; row < Traits::kTileRows;
       row += Traits::kRowsPerPass) {
    const bool is_real = row < num_rows;
    const int32_t token = first_token + row / args.group;
    const int32_t head = kv_head * args.group + row % args.group;
    const T* source =
        is_real ? q + token * args.q_stride[0] + head * args.q_stride[1] + chunk * 8 : q;
    ptx::cp_async16(target + swizzled<Traits::kChunks>(row, chunk), source, is_real);
  }
}

/// Copies key tiles; page ids are fetched one tile ahead so that the copies never wait for them.
template <typename Traits>
class KeyLoader final {
 public:
  using T = typename Traits::Element;

  __device__ KeyLoader(const typename Traits::Args& args, const RequestView& view, int32_t request,
                       int32_t kv_head, const TileWalk& walk)
      : args_(args),
        walk_(walk),
        hole_(view.mask.hole),
        table_(args.page_table + request * args.page_table_stride),
        row_(threadIdx.x / Traits::kChunks),
        chunk_(threadIdx.x % Traits::kChunks),
        kv_head_(kv_head),
        first_token_(view.first_token) {}

  /// Reads the page ids of tile `index`.
  __device__ __forceinline__ void fetch_pages(int32_t index) {
    if (index >= walk_.num_tiles || walk_.is_in_flight(index)) {
      return;
    }
    const int32_t base = walk_.template base<Traits::kTileKeys>(index);
    const KeyRange bounds = walk_.template bounds<Traits::kTileKeys>(index);
#pragma unroll
    for (int pass = 0; pass < Traits::kPasses; ++pass) {
      const int32_t key = base + row_ + pass * Traits::kRowsPerPass;
      page_[pass] = contains(bounds, key) ? table_[key >> args_.page_shift] : -1;
    }
  }

  /// Starts the copies of tile `index`, whose pages were fetched. Keys outside the piece, in the
  /// hole or on an unmapped page become zeros, so that stale memory never reaches the tensor
  /// cores. Returns false if this thread met an unmapped page; `flags` then holds 0 for its key.
  __device__ __forceinline__ bool issue(int32_t index, uint32_t keys, uint32_t values,
                                        uint8_t* flags) {
    if constexpr (Traits::kIsCoded) {
      if (!walk_.is_in_flight(index)) {
        return decode(index, keys, values, flags);
      }
    }
    const int32_t base = walk_.template base<Traits::kTileKeys>(index);
    const KeyRange bounds = walk_.template bounds<Traits::kTileKeys>(index);
    const bool is_in_flight = walk_.is_in_flight(index);
    bool is_mapped = true;
#pragma unroll
    for (int pass = 0; pass < Traits::kPasses; ++pass) {
      const int row = row_ + pass * Traits::kRowsPerPass;
      const int32_t key = base + row;
      bool is_read = contains(bounds, key);
      const T* k = static_cast<const T*>(args_.q);
      const T* v = k;
      if (is_in_flight) {
        if (is_read) {
          const int64_t token = first_token_ + (key - walk_.context_len);
          k = static_cast<const T*>(args_.k) + token * args_.k_stride[0] +
              kv_head_ * args_.k_stride[1] + chunk_ * 8;
          v = static_cast<const T*>(args_.v) + token * args_.v_stride[0] +
              kv_head_ * args_.v_stride[1] + chunk_ * 8;
        }
      } else if constexpr (!Traits::kIsCoded) {
        is_read = is_read && !contains(hole_, key);
        const int32_t page = page_[pass];
        const bool is_page = page >= 0 && page < args_.k_cache.num_pages;
        is_mapped = is_mapped && (!is_read || is_page);
        if (chunk_ == 0) {
          flags[row] = is_page;
        }
        is_read = is_read && is_page;
        if (is_read) {
          const int64_t offset = key & (args_.k_cache.page_size - 1);
          k = static_cast<const T*>(args_.k_cache.data) + page * args_.k_cache.page_stride +
              offset * args_.k_cache.token_stride + kv_head_ * args_.k_cache.head_stride +
              chunk_ * 8;
          v = static_cast<const T*>(args_.v_cache.data) + page * args_.v_cache.page_stride +
              offset * args_.v_cache.token_stride + kv_head_ * args_.v_cache.head_stride +
              chunk_ * 8;
        }
      }
      const uint32_t target = swizzled<Traits::kChunks>(row, chunk_);
      ptx::cp_async16(keys + target, k, is_read);
      ptx::cp_async16(values + target, v, is_read);
    }
    return is_mapped;
  }

 private:
  /// As issue(), for a tile of codes: reads them and writes their values, at once.
  __device__ __forceinline__ bool decode(int32_t index, uint32_t keys, uint32_t values,
                                         uint8_t* flags) {
    const int32_t base = walk_.template base<Traits::kTileKeys>(index);
    const KeyRange bounds = walk_.template bounds<Traits::kTileKeys>(index);
    bool is_mapped = true;
    uint2 codes[2][Traits::kPasses];
    uint8_t scales[2][Traits::kPasses];
#pragma unroll
    for (int pass = 0; pass < Traits::kPasses; ++pass) {
      const int row = row_ + pass * Traits::kRowsPerPass;
      const int32_t key = base + row;
      const int32_t page = page_[pass];
      const bool is_page = page >= 0 && page < args_.k_cache.num_pages;
      const bool is_seen = contains(bounds, key) && !contains(hole_, key);
      is_mapped = is_mapped && (!is_seen || is_page);
      if (chunk_ == 0) {
        flags[row] = is_page;
      }
      const int64_t offset = key & (args_.k_cache.page_size - 1);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const CacheView& cache = side == 0 ? args_.k_cache : args_.v_cache;
        const KvScales& bytes = side == 0 ? args_.k_scales : args_.v_scales;
        codes[side][pass] = make_uint2(0, 0);
        scales[side][pass] = kZeroKvScale;
        if (is_seen && is_page) {
          codes[side][pass] = *reinterpret_cast<const uint2*>(
              static_cast<const uint8_t*>(cache.data) + page * cache.page_stride +
              offset * cache.token_stride + kv_head_ * cache.head_stride + chunk_ * 8);
          scales[side][pass] = *bytes.at(page, offset, kv_head_);
        }
      }
    }
#pragma unroll
    for (int pass = 0; pass < Traits::kPasses; ++pass) {
      const uint32_t target = swizzled<Traits::kChunks>(row_ + pass * Traits::kRowsPerPass, chunk_);
      ptx::store_shared16(keys + target, decode_eight<T>(codes[0][pass], scales[0][pass]));
      ptx::store_shared16(values + target, decode_eight<T>(codes[1][pass], scales[1][pass]));
    }
    return is_mapped;
  }

  const typename Traits::Args& args_;
  const TileWalk& walk_;
  const KeyRange hole_;
  const int32_t* table_;
  const int row_;
  const int chunk_;
  const int32_t kv_head_;
  const int32_t first_token_;
  int32_t page_[Traits::kPasses];
};

}  // namespace diffulex::cuda::sm80
