// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"
#include "diffulex/ops/exec_context.h"
#include "ops/moe/gemm.h"

namespace diffulex::cuda {

/// Largest tile whose rows are gathered during the product.
inline constexpr int32_t kMoeMaxGatherTile = 128;

/// Largest tile whose products sort the slots themselves.
inline constexpr int32_t kMoeMaxSortingTile = 64;

/// Tile of products of nibbles, whose order of sums has no other.
inline constexpr int32_t kMoeTiledTile = kMoeInvariantTile;

/// What a product multiplies: rows and weights of 16 bits, both as codes (scaled_traits.cuh), or
/// rows of bfloat16 and nibbles (expert_traits.cuh).
enum class MoeOperands : int32_t { kHalves, kCodes, kNibbles };

/// Largest tile of products of e4m3 codes.
inline constexpr int32_t kMoeMaxScaledTile = 128;

/// True when this library holds the Hopper products of `dtype` and the device runs them.
[[nodiscard]] bool has_moe_wgmma(DType dtype, int32_t device_index);

/// One product on warpgroup instructions; tile is 16, 32, 64, 96, 128, 160 or kMoePairTile, depth
/// and width are multiples of 64, every row is aligned to 16 bytes; tiles above kMoeMaxGatherTile
/// take no gather. With e4m3 codes: tile is at most kMoeMaxScaledTile, depth and width are
/// multiples of 16, gate-up gathers rows of a matrix and writes float32 by position, down reads
/// those of its positions and writes bfloat16. kU8 are nibbles in tiles, with rows of bfloat16:
/// tile is kMoeTiledTile, depth and width are multiples of 128. May start before the launch in
/// front of it has ended.
[[nodiscard]] Status launch_moe_wgmma(const ExpertGemm& gemm, DType dtype,
                                      const ExecContext& context);

/// Rows of x in the order of the positions, for tiles too large to gather on the way.
struct GatherRows {
  const void* rows;         // [T, H], 16-byte aligned rows
  const int32_t* slots;     // by position
  const int32_t* counters;  // [1] = number of active positions
  void* out;                // [num_positions, H], dense
  int64_t stride_bytes;     // of rows
  int64_t row_bytes;        // a multiple of 16
  int64_t num_positions;
  int32_t top_k;
};
[[nodiscard]] Status launch_gather_rows(const GatherRows& gather, const ExecContext& context);
[[nodiscard]] Status prepare_gather_rows();

/// Loads the kernels and sets their attributes; does nothing on other devices.
[[nodiscard]] Status prepare_moe_wgmma(int32_t device_index);

namespace sm90 {

/// The instances of one element type, of codes, or of nibbles.
[[nodiscard]] Status launch_moe_bf16(const ExpertGemm& gemm, const ExecContext& context);
[[nodiscard]] Status launch_moe_f16(const ExpertGemm& gemm, const ExecContext& context);
[[nodiscard]] Status launch_moe_e4m3(const ExpertGemm& gemm, const ExecContext& context);
[[nodiscard]] Status launch_moe_int4(const ExpertGemm& gemm, const ExecContext& context);
[[nodiscard]] Status prepare_moe_bf16(int32_t device_index);
[[nodiscard]] Status prepare_moe_f16(int32_t device_index);
[[nodiscard]] Status prepare_moe_e4m3(int32_t device_index);
[[nodiscard]] Status prepare_moe_int4(int32_t device_index);

}  // namespace sm90
}  // namespace diffulex::cuda
