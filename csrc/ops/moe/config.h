// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tile and path choice of the expert products, and how their scratch is laid out: host code shared
// by CPU and CUDA.

#include <cstddef>
#include <cstdint>

#include "diffulex/ops/moe.h"

namespace diffulex {

/// Rows of one work tile on the CPU.
inline constexpr int32_t kMoeCpuTile = 64;
/// Rows of one work tile of the generic CUDA kernels.
inline constexpr int32_t kMoeGenericTile = 32;
/// Smallest and largest tile of the tensor-core kernels.
inline constexpr int32_t kMoeMmaMinTile = 16;
inline constexpr int32_t kMoeMmaMaxTile = 128;
/// Positions of a tile that two CTAs of the Hopper kernels share.
inline constexpr int32_t kMoePairTile = 320;
/// Tile of the tensor-core kernels when results must not depend on the batch.
inline constexpr int32_t kMoeInvariantTile = 64;

/// Which CUDA kernels compute the expert products.
enum class MoePath : int32_t {
  kGeneric,  // any dtype, stride and even width, float32 arithmetic
  kMma,      // 16-bit types with 16-byte aligned rows: tensor cores, sm_80 and later
  kWgmma,    // as kMma with sizes that are multiples of 64, on Hopper
};

/// What the choice of a path depends on.
struct MoePathQuery {
  DType dtype = DType::kF32;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  bool is_aligned = false;  // every base address and row stride is a multiple of 16 bytes
  bool has_wgmma = false;  // the library holds the Hopper kernels of dtype and the device runs them
};
[[nodiscard]] MoePath choose_moe_path(const MoePathQuery& query);

/// Rows of a tensor-core tile: twice the mean number of rows of an expert as a power of two, so
/// that most experts are one tile and read their weights once.
[[nodiscard]] int32_t choose_moe_tile(int64_t num_rows, int32_t num_local_experts,
                                      bool is_batch_invariant);

/// Positions of a tile of the Hopper kernels, 16, 32, 64, 96, 128, 160 or kMoePairTile: the fewest
/// that keep nearly every expert in one tile, so that its weights are read once. `max_expert_rows`
/// bounds the rows one expert can get.
[[nodiscard]] int32_t choose_moe_wgmma_tile(int64_t num_rows, int64_t max_expert_rows,
                                            int32_t num_local_experts, bool is_batch_invariant);

/// Whether tiles of `tile` positions read nearly every weight once, of `num_rows` expected rows and
/// at most `max_expert_rows` of one expert.
[[nodiscard]] bool is_streamed_once(int32_t tile, int64_t num_rows, int64_t max_expert_rows,
                                    int32_t num_local_experts);

/// Slots that reach the experts held here, of `num_slots` of all `num_experts`, if routing is even;
/// what a tile is chosen for.
[[nodiscard]] int64_t expected_local_slots(int64_t num_slots, int64_t num_experts,
                                           int32_t num_local_experts);

/// Byte offsets into the scratch of one call.
struct MoeScratch {
  size_t sorted_slots = 0;    // [T K] int32
  size_t expert_offsets = 0;  // [L + 1] int32
  size_t tile_expert = 0;     // [max_tiles] int32
  size_t tile_start = 0;      // [max_tiles] int32
  size_t counters = 0;        // [2] int32
  size_t activated = 0;       // [T K, I] dtype of x; float32 on the CPU
  size_t slot_out = 0;        // [T K, H] dtype of x
  // With scales: `activated` is float32, and codes with scales of
  size_t x_codes = 0;      // [T, H]
  size_t x_scale = 0;      // [ceil(H / 128), T] float32, T padded to 4
  size_t inner_codes = 0;  // [T K, I]
  size_t inner_scale = 0;  // [ceil(I / 128), T K] float32, T K padded to 4
  size_t total = 0;
};

/// Layout for fused_moe. Tiles are counted for the smallest tile, so that every choice fits.
[[nodiscard]] MoeScratch fused_moe_scratch(const MoeShape& shape, Device device);

/// Layout for fused_experts_packed: sorted_slots, expert_offsets and slot_out are empty.
struct PackedShape {
  int64_t num_rows = 0;
  int32_t num_local_experts = 0;
  int64_t intermediate_size = 0;
  DType dtype = DType::kBF16;
};
[[nodiscard]] MoeScratch packed_scratch(const PackedShape& shape, Device device);

}  // namespace diffulex
