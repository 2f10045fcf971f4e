// SPDX-License-Identifier: Apache-2.0
#pragma once

// The copier of caches of codes: one warp feeds the copy engine with the queries of every unit and
// with the codes of its cached tiles, in pieces of K and V in the order in which the converter
// reads them, and fetches their scale bytes.

#include <cstdint>

#include "ops/attention/sm90/maps.h"
#include "ops/attention/sm90/producer.cuh"
#include "ops/attention/sm90/traits.cuh"
#include "ops/kv/codes.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/tma.cuh"

namespace diffulex::cuda::sm90 {

/// Where a piece of codes comes from, and where it goes.
struct CodePiece final {
  int32_t part;  // of the pieces of the tile
  const CUtensorMap* map;
  const KvScales* scales;
  uint32_t codes;      // addresses in shared memory
  uint32_t scale_row;  // of the scale bytes
  uint32_t full;       // the barrier
};

/// Starts the copies of a piece of tile `index`; by the whole warp, of which every lane arrives at
/// the barrier when its scale bytes are there. `page` is what TileCopier::fetch() said. Without a
/// page codes and scale bytes are zeros, and so are their values.
template <typename Traits>
__device__ __forceinline__ void copy_piece(const CodedAttentionArgs& args, const TileSetup& setup,
                                           const TileCopier<Traits>& tiles, int32_t index,
                                           int32_t page, const CodePiece& piece) {
  constexpr int kKeys = Traits::kPieceKeys;
  const int32_t page_size = args.k_cache.page_size;
  const int32_t head = setup.work.kv_head;
  const int32_t in_tile = piece.part * kKeys;
  const int32_t first = setup.walk.template base<Traits::kTileKeys>(index) + in_tile;
  const int32_t rows = min_i32(page_size, kKeys);
  const int32_t found = tiles.found_page(page);
#pragma unroll 2
  for (int32_t row = 0; row < kKeys; row += rows) {
    const int32_t mine = __shfl_sync(kFullWarp, found, tiles.owner(in_tile + row));
    if (ptx::elect_one()) {
#pragma unroll
      for (int line = 0; line < Traits::kCodeLines; ++line) {
        ptx::tma_load(
            piece.codes + line * kKeys * Traits::kCodeLineBytes + row * Traits::kCodeLineBytes,
            piece.map, piece.full, line * Traits::kCodeLineBytes, head, first & (page_size - 1),
            mine);
      }
    }
  }
  const int32_t key = static_cast<int32_t>(threadIdx.x & 31) * 4;  // four scale bytes a lane
  const int32_t mine = __shfl_sync(kFullWarp, page, tiles.owner(in_tile + key));
  if (key < kKeys) {
    const bool is_read = tiles.is_page(mine);
    const void* source = args.cu_seqlens_q;  // any address
    if (is_read) {
      source = piece.scales->at(mine, (first + key) & (page_size - 1), head);
    }
    ptx::cp_async4(piece.scale_row + key, source, is_read);
  }
  ptx::cp_async_arrive(piece.full);
}

/// The copier warp. A piece waits until the converter has left its place. The first of a tile also
/// carries the bits of the tile's unmapped pages.
template <typename Traits>
__device__ __forceinline__ void copy_coded_units(const CodedAttentionArgs& args,
                                                 const AttentionMaps& maps, uint8_t* smem,
                                                 const Barriers<Traits>& barriers) {
  const int lane = threadIdx.x & 31;
  const uint32_t base = ptx::smem_address(smem);
  UnitReader<Traits> units(smem, barriers);
  Ring<Traits::kPieces> ring;
  uint32_t query_phase = 0;
  while (const UnitRecord* record = units.next()) {
    const TileSetup& setup = record->setup;
    const int32_t count = record->is_live != 0 ? setup.walk.num_tiles : 0;
    if (count == 0) {
      units.release();
      continue;
    }
    const TileCopier<Traits> tiles(args, setup);
    int32_t index = setup.walk.num_in_flight;  // the converter fetches the tiles before
    int32_t page = tiles.fetch(index);
    copy_queries<Traits>(args, maps, setup, base, barriers, query_phase);
    query_phase ^= 1;
    for (; index < count; ++index) {
      const int32_t next_page = tiles.fetch(index + 1);
      const uint32_t unmapped = tiles.unmapped(index, page);
#pragma unroll 1
      for (int part = 0; part < 2 * Traits::kTilePieces; ++part, ring.advance()) {
        const bool is_values = part >= Traits::kTilePieces;
        const CodePiece piece{is_values ? part - Traits::kTilePieces : part,
                              is_values ? &maps.v_cache : &maps.k_cache,
                              is_values ? &args.v_scales : &args.k_scales,
                              base + Traits::kPieceOffset + ring.stage * Traits::kPieceBytes,
                              base + Traits::kPieceScaleOffset + ring.stage * Traits::kPieceKeys,
                              barriers.piece_full(ring.stage)};
        ptx::mbarrier_wait(barriers.piece_empty(ring.stage), ring.phase ^ 1);
        if (lane == 0) {
          *reinterpret_cast<uint32_t*>(smem + Traits::kPieceWordOffset + ring.stage * 4) = unmapped;
          ptx::mbarrier_arrive_expect(piece.full, Traits::kPieceBytes);
        }
        __syncwarp();
        copy_piece<Traits>(args, setup, tiles, index, page, piece);
      }
      page = next_page;
    }
    units.release();
  }
}

}  // namespace diffulex::cuda::sm90
