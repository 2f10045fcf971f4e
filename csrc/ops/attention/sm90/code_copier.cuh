// SPDX-License-Identifier: Apache-2.0
#pragma once

// The copiers of caches of codes: one warp feeds the copy engine with the queries of every unit and
// with the codes of its cached tiles, in pieces of K and V in the order in which one converter
// reads them; another fetches their scale bytes. One warp alone is slower than a converter.

#include <cstdint>
#include <type_traits>

#include "ops/attention/sm90/maps.h"
#include "ops/attention/sm90/producer.cuh"
#include "ops/attention/sm90/traits.cuh"
#include "ops/kv/codes.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/tma.cuh"

namespace diffulex::cuda::sm90 {

/// A piece of a cached tile.
template <typename Traits>
struct CodePiece final {
  int32_t index;  // of the tile
  int32_t page;   // what TileCopier::fetch() said of the tile
  int part;       // of the pieces of K or V of the tile
  int32_t first;  // key

  __device__ __forceinline__ int32_t in_tile() const { return part * Traits::kPieceKeys; }
};

/// Calls `copy` for the pieces of the cached tiles of a unit, each told to be of V or not by a
/// std::bool_constant, in the order in which one converter reads them: K a tile ahead of V.
template <typename Traits, typename Copy>
__device__ __forceinline__ void walk_pieces(const TileSetup& setup, const TileCopier<Traits>& tiles,
                                            PieceRings<Traits>& rings, const Copy& copy) {
  const int32_t count = setup.walk.num_tiles;
  const int32_t first = setup.walk.num_in_flight;  // converters fetch the tiles before
  const auto walk_tile = [&](auto is_values, int32_t index, int32_t page) {
    const int32_t base = setup.walk.template base<Traits::kTileKeys>(index);
#pragma unroll
    for (int part = 0; part < Traits::kTilePieces; ++part) {
      copy(is_values, CodePiece<Traits>{index, page, part, base + part * Traits::kPieceKeys});
      rings.template advance<decltype(is_values)::value>();
    }
  };
  int32_t page = tiles.fetch(first);
  int32_t last_page = -1;
#pragma unroll 1
  for (int32_t index = first; index <= count; ++index) {
    const int32_t next_page = tiles.fetch(index + 1);
    if (index < count) {
      walk_tile(std::false_type(), index, page);
    }
    if (index > first) {
      walk_tile(std::true_type(), index - 1, last_page);
    }
    last_page = page;
    page = next_page;
  }
}

/// Starts the copies of the codes of a piece; by the whole warp. Without a page codes are zeros.
template <typename Traits>
__device__ __forceinline__ void copy_codes(const TileCopier<Traits>& tiles, const CUtensorMap* map,
                                           int32_t page_size, int32_t head, int32_t in_tile,
                                           int32_t first, int32_t found, uint32_t target,
                                           uint32_t full) {
  constexpr int kKeys = Traits::kPieceKeys;
  const int32_t rows = min_i32(page_size, kKeys);
#pragma unroll 2
  for (int32_t row = 0; row < kKeys; row += rows) {
    const int32_t mine = __shfl_sync(kFullWarp, found, tiles.owner(in_tile + row));
    if (ptx::elect_one()) {
#pragma unroll
      for (int line = 0; line < Traits::kCodeLines; ++line) {
        ptx::tma_load(target + (line * kKeys + row) * Traits::kCodeLineBytes, map, full,
                      line * Traits::kCodeLineBytes, head, first & (page_size - 1), mine);
      }
    }
  }
}

/// The warp of the queries and codes. The first piece of K of a tile also carries the bits of the
/// tile's unmapped pages.
template <typename Traits>
__device__ __forceinline__ void copy_coded_units(const CodedAttentionArgs& args,
                                                 const AttentionMaps& maps, uint8_t* smem,
                                                 const Barriers<Traits>& barriers) {
  const int lane = threadIdx.x & 31;
  const uint32_t base = ptx::smem_address(smem);
  const int32_t page_size = args.k_cache.page_size;
  UnitReader<Traits> units(smem, barriers);
  PieceRings<Traits> rings;
  uint32_t query_phase = 0;
  while (const UnitRecord* record = units.next()) {
    const TileSetup& setup = record->setup;
    if (record->is_live != 0 && setup.walk.num_tiles > 0) {
      const TileCopier<Traits> tiles(args, setup);
      copy_queries<Traits>(args, maps, setup, base, barriers, query_phase);
      query_phase ^= 1;
      const int32_t head = setup.work.kv_head;
      walk_pieces<Traits>(setup, tiles, rings, [&](auto is_values, const CodePiece<Traits>& piece) {
        constexpr bool kIsValues = decltype(is_values)::value;
        const uint32_t place = rings.template piece<kIsValues>();
        const uint32_t full = barriers.piece_full(place);
        const int32_t found = tiles.found_page(piece.page);
        const bool is_first = !kIsValues && piece.part == 0;
        const uint32_t unmapped = is_first ? tiles.unmapped(piece.index, piece.page) : 0;
        ptx::mbarrier_wait(barriers.piece_empty(place), rings.template phase<kIsValues>() ^ 1);
        if (lane == 0) {
          if (is_first) {
            *reinterpret_cast<uint32_t*>(smem + Traits::kPieceWordOffset + place * 4) = unmapped;
          }
          ptx::mbarrier_arrive_expect(full, Traits::kPieceBytes);
        }
        __syncwarp();
        copy_codes<Traits>(tiles, kIsValues ? &maps.v_cache : &maps.k_cache, page_size, head,
                           piece.in_tile(), piece.first, found,
                           base + Traits::kPieceOffset + place * Traits::kPieceBytes, full);
      });
    }
    units.release();
  }
}

/// The warp of the scale bytes. Every lane arrives at the barrier of a piece when its bytes, four
/// at most, are there. Without a page they are zeros, and so are their values.
template <typename Traits>
__device__ __forceinline__ void copy_unit_scales(const CodedAttentionArgs& args, uint8_t* smem,
                                                 const Barriers<Traits>& barriers) {
  const int32_t key = static_cast<int32_t>(threadIdx.x & 31) * 4;
  const uint32_t target = ptx::smem_address(smem) + Traits::kPieceScaleOffset + key;
  const int32_t page_size = args.k_cache.page_size;
  UnitReader<Traits> units(smem, barriers);
  PieceRings<Traits> rings;
  while (const UnitRecord* record = units.next()) {
    const TileSetup& setup = record->setup;
    if (record->is_live != 0 && setup.walk.num_tiles > 0) {
      const TileCopier<Traits> tiles(args, setup);
      const int32_t head = setup.work.kv_head;
      walk_pieces<Traits>(setup, tiles, rings, [&](auto is_values, const CodePiece<Traits>& piece) {
        constexpr bool kIsValues = decltype(is_values)::value;
        const uint32_t place = rings.template piece<kIsValues>();
        const int32_t mine = __shfl_sync(kFullWarp, piece.page, tiles.owner(piece.in_tile() + key));
        const bool is_read = tiles.is_page(mine);
        const void* source = args.cu_seqlens_q;  // any address
        if (is_read) {
          const KvScales& scales = kIsValues ? args.v_scales : args.k_scales;
          source = scales.at(mine, (piece.first + key) & (page_size - 1), head);
        }
        ptx::mbarrier_wait(barriers.piece_empty(place), rings.template phase<kIsValues>() ^ 1);
        if (key < Traits::kPieceKeys) {
          ptx::cp_async4(target + place * Traits::kPieceKeys, source, is_read);
        }
        ptx::cp_async_arrive(barriers.piece_full(place));
      });
    }
    units.release();
  }
}

}  // namespace diffulex::cuda::sm90
