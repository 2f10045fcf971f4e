// SPDX-License-Identifier: Apache-2.0
#pragma once

// One product of every expert over the work tiles of moe_permute: the arguments and the launchers,
// one per element type and kernel family.

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/moe.h"
#include "diffulex/ops/tensor_ref.h"
#include "ops/moe/config.h"

namespace diffulex::cuda {

/// Where the rows of a tensor [R, n] or [A, B, n] begin, in elements.
struct RowMap {
  int64_t inner = 1;  // B; rows of a matrix are all inner
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;

  [[nodiscard]] static RowMap of(const TensorRef& tensor) {
    if (tensor.rank == 2) {
      return {tensor.size[0], 0, tensor.stride[0]};
    }
    return {tensor.size[1], tensor.stride[0], tensor.stride[1]};
  }
  [[nodiscard]] static RowMap dense(int64_t rows, int64_t width) { return {rows, 0, width}; }

  DIFFULEX_HOST_DEVICE int64_t offset(int64_t row) const {
    return row < inner ? row * inner_stride
                       : row / inner * outer_stride + row % inner * inner_stride;
  }
};

/// Most slots and experts that a product sorts itself.
inline constexpr int32_t kMoeMaxSortedSlots = 1024;
inline constexpr int32_t kMoeMaxSortedExperts = 512;

/// The routed pairs, slot = token * top_k + k, and who holds their experts.
struct SlotRoutes {
  const int32_t* ids;         // [T, K]
  const int32_t* expert_map;  // [E] or null
  int64_t ids_stride;
  int32_t num_slots;
  int32_t top_k;
  int32_t num_experts;  // ids from here on are none
  int32_t num_local;    // map entries from here on are none
};

/// Scales of a product of codes, a line being 128 columns.
struct ExpertScales {
  const float* rows;    // [lines, rows of the operand], padded
  const float* weight;  // [L, N], or in blocks [L, blocks of rows, lines]; null: no codes
  int64_t row_stride;   // between lines
  int64_t expert_stride;
  int64_t block_stride;  // between rows of blocks; 0: one scale a row of W
  int32_t up_blocks;     // rows of blocks before those of up
};

/// Scales of weights of 4 bits; null: they have none.
struct NibbleScales {
  const void* values;  // [L, depth / group, N] bfloat16 or float32
  int64_t expert_stride;
  int64_t group_stride;
  int32_t group;
  bool are_floats;
};

/// A grouped product out[row] = rows[row] weight[expert]^T, with the activation of the gate-up
/// product. Positions are those of the tile list.
struct ExpertGemm {
  const void* rows;            // what the product reads, row = gather[position] / top_k
  const void* weight;          // [L, N, depth]; N = 2 width (gate, up) or width
  void* out;                   // [*, width], row = scatter[position]
  const int32_t* gather;       // slots by position; null: row = position
  const int32_t* scatter;      // slots by position; null: row = position
  const int32_t* tile_expert;  // [max_tiles]
  const int32_t* tile_start;   // [max_tiles]
  const int32_t* counters;     // [0] = number of tiles
  /// [0] = begin of the first expert, then the end of each; or the number of rows of each.
  const int32_t* ends;
  const float* row_weights;     // factor of the sums of a slot; null = 1
  const int32_t* weight_slots;  // slots by position of row_weights; null: slot = position
  /// With ids, the product sorts the slots itself: of gather and scatter it reads only whether they
  /// are null, and tile_expert, tile_start, counters and ends not at all.
  SlotRoutes routes;
  RowMap row_map;
  RowMap out_map;
  int64_t expert_stride;  // of weight
  int64_t weight_stride;  // between rows of weight
  int64_t row_weight_stride;
  int64_t num_positions;    // positions from here on do not exist
  int32_t rows_per_expert;  // > 0: expert e owns the positions from e rows_per_expert on
  int32_t num_experts;      // of weight
  int32_t top_k;
  int32_t depth;
  int32_t width;
  int32_t max_tiles;
  int32_t tile;  // positions per tile
  Activation act;
  bool is_gate_up;
  bool is_streamed;     // every weight is read about once: keep it out of the way in the L2 cache
  ExpertScales scales;  // of codes
  NibbleScales nibbles;
};

/// Base address and leading strides are multiples of 16 bytes.
[[nodiscard]] inline bool is_row_aligned(const TensorRef& tensor) {
  bool is_aligned = reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
  for (int32_t dim = 0; dim + 1 < tensor.rank; ++dim) {
    is_aligned = is_aligned && tensor.stride[dim] * dtype_bytes(tensor.dtype) % 16 == 0;
  }
  return is_aligned;
}

/// The routes of a call, and the check of their ids and map in debug mode.
[[nodiscard]] SlotRoutes slot_routes(const TensorRef& topk_ids, const TensorRef& expert_map,
                                     int32_t num_local_experts);
[[nodiscard]] Status check_routes(const char* where, const TensorRef& topk_ids,
                                  const TensorRef& expert_map, int32_t num_local_experts,
                                  const ExecContext& context);

/// The kernels of one call.
struct MoeKernels {
  MoePath path;
  int32_t tile;
  bool is_streamed;  // nearly every weight is read once
};

/// A tensor [rows, width] in the scratch of a call, without a width [rows].
[[nodiscard]] TensorRef scratch_tensor(const ExecContext& context, size_t offset, DType dtype,
                                       int64_t rows, int64_t width);

/// The grouping of the slots, in the scratch of the call.
[[nodiscard]] MoePermuteParams permute_into_scratch(const FusedMoeParams& params,
                                                    const MoeScratch& scratch, int64_t max_tiles,
                                                    int32_t tile, const ExecContext& context);

/// What both products of fused_moe share: positions sorted by expert, cut into tiles. Sorts them,
/// unless the products of Hopper are to do it themselves.
[[nodiscard]] Status sort_for_products(const FusedMoeParams& params,
                                       const MoePermuteParams& permute, const MoeKernels& kernels,
                                       int64_t max_tiles, ExpertGemm* gemm,
                                       const ExecContext& context);

/// fused_moe of experts in codes of 8 bits, or in tiles of 4.
[[nodiscard]] Status fused_moe_scaled(const FusedMoeParams& params, const ExecContext& context);

using LaunchExpertGemm = Status (*)(const ExpertGemm& gemm, const ExecContext& context);

[[nodiscard]] Status launch_moe_generic(const ExpertGemm& gemm, DType dtype,
                                        const ExecContext& context);
[[nodiscard]] Status launch_moe_mma_bf16(const ExpertGemm& gemm, const ExecContext& context);
[[nodiscard]] Status launch_moe_mma_f16(const ExpertGemm& gemm, const ExecContext& context);

/// Loads the kernels of the launchers above and sets their attributes on the current device.
[[nodiscard]] Status prepare_moe_generic();
[[nodiscard]] Status prepare_moe_mma_bf16(int32_t device_index);
[[nodiscard]] Status prepare_moe_mma_f16(int32_t device_index);

}  // namespace diffulex::cuda
