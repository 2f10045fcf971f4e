// SPDX-License-Identifier: Apache-2.0
#pragma once

// The producer warpgroup: warps 0 and 2 feed the copy engine with queries and keys and with values,
// warp 1 zeroes value rows that no row of the tile may see, warp 3 is the scheduler, which finally
// zeroes the output rows that belong to no request.

#include <cstdint>

#include "ops/attention/sm90/maps.h"
#include "ops/attention/sm90/schedule.cuh"
#include "ops/attention/sm90/traits.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/tma.cuh"

namespace diffulex::cuda::sm90 {

/// Issues the boxes of key tiles. The lanes hold the page ids, read one tile ahead.
template <typename Traits>
class TileCopier final {
 public:
  static constexpr int kTileKeys = Traits::kTileKeys;

  __device__ TileCopier(const AttentionArgs& args, const TileSetup& setup)
      : args_(args),
        setup_(setup),
        table_(args.page_table + setup.work.request * args.page_table_stride),
        lane_(threadIdx.x & 31),
        box_rows_(min_i32(args.k_cache.page_size, kTileKeys)) {}

  /// Page id for this lane (the page of box row `lane`) of tile `index`.
  __device__ __forceinline__ int32_t fetch(int32_t index) const {
    if (index >= setup_.walk.num_tiles || setup_.walk.is_in_flight(index)) {
      return -1;
    }
    const int32_t key = setup_.walk.template base<kTileKeys>(index) + lane_ * box_rows_;
    const KeyRange bounds = setup_.walk.template bounds<kTileKeys>(index);
    const bool is_read =
        lane_ * box_rows_ < kTileKeys && key < bounds.end && key + box_rows_ > bounds.begin;
    return is_read ? table_[key >> args_.page_shift] : -1;
  }

  /// Bits of boxes (in units of box rows) whose pages are unmapped.
  __device__ __forceinline__ uint32_t unmapped(int32_t index, int32_t page) const {
    const bool is_box = lane_ * box_rows_ < kTileKeys && !setup_.walk.is_in_flight(index);
    return __ballot_sync(kFullWarp, is_box && !is_page(page));
  }

  /// Bytes the copies of one operand of tile `index` deliver.
  __device__ __forceinline__ uint32_t bytes(int32_t index) const {
    return setup_.walk.is_in_flight(index)
               ? in_flight_boxes(index) * kInFlightBox * Traits::kHeadDim * 2
               : Traits::kKeyBytes;
  }

  /// Starts the copies of tile `index`; by the whole warp.
  __device__ __forceinline__ void issue(int32_t index, int32_t page, uint32_t target,
                                        uint32_t barrier, const CUtensorMap* piece,
                                        const CUtensorMap* tile, const CUtensorMap* cache) const {
    if (setup_.walk.is_in_flight(index)) {
      issue_in_flight(index, target, barrier, piece, tile);
      return;
    }
    const int32_t found = found_page(page);
    const int32_t offset =
        setup_.walk.template base<kTileKeys>(index) & (args_.k_cache.page_size - 1);
    const int boxes = kTileKeys / box_rows_;
#pragma unroll 4
    for (int box = 0; box < boxes; ++box) {
      const int32_t mine = __shfl_sync(kFullWarp, found, box);
      if (ptx::elect_one()) {
#pragma unroll
        for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
          ptx::tma_load(target + chunk * Traits::kKeyChunkBytes + box * box_rows_ * 128, cache,
                        barrier, chunk * 64, setup_.work.kv_head, offset, mine);
        }
      }
    }
  }

  /// As issue(), for a tile of keys in flight.
  __device__ __forceinline__ void issue_in_flight(int32_t index, uint32_t target, uint32_t barrier,
                                                  const CUtensorMap* piece,
                                                  const CUtensorMap* tile) const {
    const int32_t token = setup_.view.first_token + setup_.walk.template base<kTileKeys>(index) -
                          setup_.walk.context_len;
    // Few large boxes are issued much faster than many small ones.
    const int boxes = in_flight_boxes(index);
    const bool is_whole = boxes * kInFlightBox == kTileKeys;
    const CUtensorMap* map = is_whole ? tile : piece;
#pragma unroll 1
    for (int box = 0; box < (is_whole ? 1 : boxes); ++box) {
      if (ptx::elect_one()) {
#pragma unroll
        for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
          ptx::tma_load(target + chunk * Traits::kKeyChunkBytes + box * (kInFlightBox * 128), map,
                        barrier, chunk * 64, setup_.work.kv_head, token + box * kInFlightBox);
        }
      }
    }
  }

  /// The page to copy; for none a coordinate past the last, where boxes are filled with zeros.
  __device__ __forceinline__ int32_t found_page(int32_t page) const {
    return is_page(page) ? page : max_i32(args_.k_cache.num_pages, 1);
  }
  __device__ __forceinline__ bool is_page(int32_t page) const {
    return page >= 0 && page < args_.k_cache.num_pages;
  }
  /// The lane that holds the page of key `offset` of a tile.
  __device__ __forceinline__ int owner(int32_t offset) const {
    return offset >> (__ffs(box_rows_) - 1);
  }

 private:
  __device__ __forceinline__ int32_t in_flight_boxes(int32_t index) const {
    const KeyRange bounds = setup_.walk.template bounds<kTileKeys>(index);
    return ceil_div_i32(bounds.end - setup_.walk.template base<kTileKeys>(index), kInFlightBox);
  }

  const AttentionArgs& args_;
  const TileSetup& setup_;
  const int32_t* table_;
  const int32_t lane_;
  const int32_t box_rows_;
};

/// Copies the query rows of a unit as soon as the consumers have left those of the last.
template <typename Traits>
__device__ __forceinline__ void copy_queries(const AttentionArgs& args, const AttentionMaps& maps,
                                             const TileSetup& setup, uint32_t target,
                                             const Barriers<Traits>& barriers, uint32_t phase) {
  ptx::mbarrier_wait(barriers.query_empty(), phase ^ 1);
  if ((threadIdx.x & 31) == 0) {
    ptx::mbarrier_arrive_expect(
        barriers.query_full(),
        static_cast<uint32_t>(args.tokens_per_tile * args.group * Traits::kHeadDim * 2));
  }
  __syncwarp();
  if (ptx::elect_one()) {
#pragma unroll
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      ptx::tma_load(target + chunk * Traits::kQueryChunkBytes, &maps.q, barriers.query_full(),
                    chunk * 64, 0, setup.first_token, setup.work.kv_head);
    }
  }
}

/// A copier warp: the values of every unit, or its queries and keys.
template <typename Traits, bool kIsValues>
__device__ __forceinline__ void copy_units(const AttentionArgs& args, const AttentionMaps& maps,
                                           uint8_t* smem, const Barriers<Traits>& barriers) {
  const int lane = threadIdx.x & 31;
  const uint32_t base = ptx::smem_address(smem);
  const uint32_t stages = base + (kIsValues ? Traits::kValueOffset : Traits::kKeyOffset);
  const CUtensorMap* const piece = kIsValues ? &maps.v : &maps.k;
  const CUtensorMap* const tile = kIsValues ? &maps.v_tile : &maps.k_tile;
  const CUtensorMap* const cache = kIsValues ? &maps.v_cache : &maps.k_cache;
  UnitReader<Traits> units(smem, barriers);
  Ring<Traits::kStages> ring;
  uint32_t query_phase = 0;
  while (const UnitRecord* record = units.next()) {
    const TileSetup& setup = record->setup;
    if (record->is_live == 0 || setup.walk.num_tiles == 0) {
      units.release();
      continue;
    }
    const TileCopier<Traits> copier(args, setup);
    int32_t page = copier.fetch(0);
    if constexpr (!kIsValues) {
      copy_queries<Traits>(args, maps, setup, base, barriers, query_phase);
      query_phase ^= 1;
    }
    for (int32_t index = 0; index < setup.walk.num_tiles; ++index) {
      const int32_t next_page = copier.fetch(index + 1);
      const uint32_t full =
          kIsValues ? barriers.value_full(ring.stage) : barriers.key_full(ring.stage);
      const uint32_t empty =
          kIsValues ? barriers.value_empty(ring.stage) : barriers.key_empty(ring.stage);
      const uint32_t unmapped = kIsValues ? 0 : copier.unmapped(index, page);
      ptx::mbarrier_wait(empty, ring.phase ^ 1);
      if (lane == 0) {
        if constexpr (!kIsValues) {
          *reinterpret_cast<uint32_t*>(smem + Barriers<Traits>::unmapped_offset(ring.stage)) =
              unmapped;
        }
        ptx::mbarrier_arrive_expect(full, copier.bytes(index));
      }
      __syncwarp();
      copier.issue(index, page, stages + ring.stage * Traits::kKeyBytes, full, piece, tile, cache);
      page = next_page;
      ring.advance();
    }
    units.release();
  }
}

/// Zeroes the value rows of tile `index` that no row of the unit may see: they may hold anything,
/// and 0 * NaN is NaN.
template <typename Traits>
__device__ __forceinline__ void clean_tile(const TileSetup& setup, int32_t index, uint8_t* rows) {
  constexpr int kTileKeys = Traits::kTileKeys;
  const KeyRange range = setup.seen<kTileKeys>(index);
  const bool is_in_flight = setup.walk.is_in_flight(index);
  const int32_t base = setup.walk.template base<kTileKeys>(index);
  const int32_t pieces = setup.extent<kTileKeys>(index) * 8;  // 16 bytes of 128
  for (int32_t piece = threadIdx.x & 31; piece < pieces; piece += 32) {
    const int32_t key = base + piece / 8;
    if (contains(range, key) && (is_in_flight || !contains(setup.view.mask.hole, key))) {
      continue;
    }
#pragma unroll
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      *reinterpret_cast<uint4*>(rows + chunk * Traits::kKeyChunkBytes + piece * 16) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

/// Cleans the boundary tiles of every unit.
template <typename Traits>
__device__ __forceinline__ void clean_units(uint8_t* smem, const Barriers<Traits>& barriers) {
  constexpr int kTileKeys = Traits::kTileKeys;
  const int lane = threadIdx.x & 31;
  UnitReader<Traits> units(smem, barriers);
  Ring<Traits::kStages> ring;
  while (const UnitRecord* record = units.next()) {
    const TileSetup& setup = record->setup;
    const int32_t count = record->is_live != 0 ? setup.walk.num_tiles : 0;
    for (int32_t index = 0; index < count; ++index, ring.advance()) {
      // Every tile, not only the unclean ones: a warp that ran ahead would mistake phases.
      ptx::mbarrier_wait(barriers.value_full(ring.stage), ring.phase);
      if (setup.has_invisible<kTileKeys>(index)) {
        clean_tile<Traits>(setup, index,
                           smem + Traits::kValueOffset + ring.stage * Traits::kKeyBytes);
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
          ptx::mbarrier_arrive(barriers.value_clean(ring.stage));
        }
      }
      if (lane == 0) {
        ptx::mbarrier_arrive(barriers.value_empty(ring.stage));
      }
    }
    units.release();
  }
}

/// Rows past valid_slices and past the last request, by one warp.
template <typename Traits>
__device__ __forceinline__ void zero_units(const AttentionArgs& args,
                                           const typename Traits::Rows& code_rows) {
  if (blockIdx.y > 0) {
    return;
  }
  for (int64_t unit = blockIdx.x; unit < num_zero_work(args); unit += gridDim.x) {
    zero_rows<typename Traits::Element>(args, unit, static_cast<int32_t>(threadIdx.x & 31), 32,
                                        code_rows);
  }
}

}  // namespace diffulex::cuda::sm90
