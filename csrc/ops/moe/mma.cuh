// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tensor-core kernel of the grouped expert products. A CTA computes kTileRows positions of one
// expert times 128 weight rows: 64 gate and the 64 matching up rows, or 128 rows of the second
// weight. Both operands are K-major and stream through kStages of shared memory with cp.async; the
// positions' rows are gathered. A warp owns 32 of the 128 weight rows, ordered so that it holds the
// gate and the up sum of a column in the same lane. Every sum runs over ascending k in one order,
// so that it depends neither on the tile height nor on the other rows.

#include <cstdint>

#include "ops/activation/gate.cuh"
#include "ops/moe/gemm.h"
#include "ops/moe/tiles.cuh"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/shared_memory.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {

template <typename Traits>
struct MoeProduct;

template <typename T, int kRows, bool kIsGateUp>
struct MoeMmaTraits {
  using Element = T;
  using Weight = T;
  using Product = MoeProduct<MoeMmaTraits>;
  static constexpr bool kGateUp = kIsGateUp;
  static constexpr int kTileRows = kRows;
  static constexpr int kWeightRows = 128;
  /// Columns of the result: a gate and an up row make one.
  static constexpr int kOutColumns = kGateUp ? 64 : 128;
  static constexpr int kDepth = 64;  // elements per step: one 128-byte line of each row
  static constexpr int kChunks = 8;  // 16-byte pieces of that line
  static constexpr int kWarpRows = kRows > 64 ? 64 : kRows;
  static constexpr int kWarpsM = kRows / kWarpRows;
  static constexpr int kWarpsN = 4;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kMTiles = kWarpRows / 16;
  static constexpr int kNTiles = kWeightRows / kWarpsN / 8;
  // Small tiles wait for the memory: more bytes in flight.
  static constexpr int kStages = kRows <= 32 ? 4 : 3;
  static constexpr int kRowBytes = kDepth * 2;
  static constexpr int kLines = 1;  // of kRowBytes, of each of the positions' rows in a step
  static constexpr int kWeightBytes = kRowBytes;  // of a weight row in a step
  static constexpr int kStageBytes = (kRows + kWeightRows) * kRowBytes;
  static constexpr int kSmemBytes = kStages * kStageBytes;
  static constexpr int kRowsPerPass = kThreads / kChunks;
  static constexpr int kRowPasses = kRows / kRowsPerPass;

  /// Where piece `piece` of the weight row `row` lies.
  __device__ __forceinline__ static int swizzle(int piece, int row) { return piece ^ (row & 7); }
  static_assert(sizeof(T) == 2, "the line of a row is 64 elements of 16 bits");
  static_assert(kSmemBytes <= 99 * 1024, "sm_86 has 99 KiB of shared memory for one CTA");
  static_assert(kRowPasses >= 1 && kRows % kRowsPerPass == 0, "a pass copies whole rows");
};

/// Weight row, relative to the expert, of row `row` of the weight tile that starts at column
/// `first`; -1 past the end.
template <typename Traits>
__device__ __forceinline__ int32_t weight_row(const ExpertGemm& gemm, int32_t first, int32_t row) {
  if constexpr (Traits::kGateUp) {
    // 32 rows of a warp: 16 gate rows, then their 16 up rows.
    const int32_t column = first + row / 32 * 16 + row % 16;
    const int32_t half = row % 32 < 16 ? 0 : gemm.width;
    return column < gemm.width ? half + column : -1;
  } else {
    return first + row < gemm.width ? first + row : -1;
  }
}

/// Copies depth steps of both operands to shared memory, chunks of rows and pieces of weight rows
/// of 16 bytes each.
template <typename Traits>
class MoeLoader final {
 public:
  using T = typename Traits::Element;
  using W = typename Traits::Weight;

  __device__ __forceinline__ MoeLoader(const ExpertGemm& gemm, const MoeTile& tile, int32_t first)
      : depth_(gemm.depth), chunk_(threadIdx.x % Traits::kChunks), piece_(threadIdx.x % kPieces) {
    const int row = threadIdx.x / Traits::kChunks;
    const T* rows = static_cast<const T*>(gemm.rows);
    const W* weights = static_cast<const W*>(gemm.weight) + tile.expert * gemm.expert_stride;
#pragma unroll
    for (int pass = 0; pass < Traits::kRowPasses; ++pass) {
      const int index = row + pass * Traits::kRowsPerPass;
      const bool is_real = index < tile.count;
      const int64_t source =
          is_real ? moe_target(gemm.gather, int64_t{tile.start} + index) / gemm.top_k : 0;
      rows_[pass] = rows + gemm.row_map.offset(source) + chunk_ * 8;
      row_mask_ |= is_real ? 1U << pass : 0U;
    }
    const int weight = threadIdx.x / kPieces;
#pragma unroll
    for (int pass = 0; pass < kWeightPasses; ++pass) {
      const int32_t index = weight_row<Traits>(gemm, first, weight + pass * kWeightsPerPass);
      weights_[pass] =
          weights + (index < 0 ? 0 : index) * gemm.weight_stride + piece_ * kPieceWidth;
      weight_mask_ |= index < 0 ? 0U : 1U << pass;
    }
    const int line = row * Traits::kRowBytes;
    // Rows of a pass are a multiple of 8 apart, so the swizzle of a thread never changes.
    offset_ = static_cast<uint32_t>(line + ((chunk_ ^ (row & 7)) * 16));
    weight_offset_ =
        static_cast<uint32_t>(Traits::kLines * Traits::kTileRows * Traits::kRowBytes +
                              weight * Traits::kWeightBytes + Traits::swizzle(piece_, weight) * 16);
  }

  /// Enqueues step `step` into the stage at shared address `stage`.
  __device__ __forceinline__ void load(uint32_t stage, int step) const {
#pragma unroll
    for (int i = 0; i < Traits::kLines * Traits::kRowPasses; ++i) {
      const int pass = i % Traits::kRowPasses;
      const int line = i / Traits::kRowPasses;
      const int column = step * Traits::kDepth + line * (Traits::kDepth / Traits::kLines);
      const bool is_read = column + chunk_ * 8 < depth_ && (row_mask_ >> pass & 1U) != 0;
      ptx::cp_async16(stage + offset_ + pass * Traits::kRowsPerPass * Traits::kRowBytes +
                          line * Traits::kTileRows * Traits::kRowBytes,
                      is_read ? rows_[pass] + column : rows_[pass] - chunk_ * 8, is_read);
    }
    const int column = step * Traits::kDepth;
    const bool is_inside = column + piece_ * (Traits::kDepth / kPieces) < depth_;
#pragma unroll
    for (int pass = 0; pass < kWeightPasses; ++pass) {
      const bool is_read = is_inside && (weight_mask_ >> pass & 1U) != 0;
      ptx::cp_async16(stage + weight_offset_ + pass * kWeightsPerPass * Traits::kWeightBytes,
                      is_read ? weights_[pass] + step * (kPieces * kPieceWidth)
                              : weights_[pass] - piece_ * kPieceWidth,
                      is_read);
    }
  }

 private:
  static constexpr int kPieces = Traits::kWeightBytes / 16;
  static constexpr int kPieceWidth = 16 / sizeof(W);
  static constexpr int kWeightsPerPass = Traits::kThreads / kPieces;
  static constexpr int kWeightPasses = Traits::kWeightRows / kWeightsPerPass;
  static_assert(kWeightsPerPass % 8 == 0, "the swizzle of a thread never changes");

  const T* rows_[Traits::kRowPasses];
  const W* weights_[kWeightPasses];
  uint32_t row_mask_ = 0;
  uint32_t weight_mask_ = 0;
  uint32_t offset_;
  uint32_t weight_offset_;
  int32_t depth_;
  int32_t chunk_;
  int32_t piece_;
};

/// What a kernel multiplies by.
template <typename Traits>
struct MoeProduct final {
  __device__ __forceinline__ MoeProduct(const ExpertGemm& /*gemm*/, const MoeTile& /*tile*/,
                                        int32_t /*first*/, int /*warp_n*/) {}

  /// Adds the products of one stage.
  __device__ __forceinline__ void add(uint32_t stage, int /*step*/, int warp_m, int warp_n,
                                      float (&sums)[Traits::kMTiles][Traits::kNTiles][4]) {
    using T = typename Traits::Element;
    const int lane = threadIdx.x & 31;
    const uint32_t weights = stage + Traits::kTileRows * Traits::kRowBytes;
#pragma unroll
    for (int k = 0; k < Traits::kDepth / 16; ++k) {
      uint32_t right[Traits::kNTiles / 2][4];
#pragma unroll
      for (int pair = 0; pair < Traits::kNTiles / 2; ++pair) {
        const int row = warp_n * 32 + pair * 16 + lane / 16 * 8 + lane % 8;
        const int chunk = k * 2 + lane / 8 % 2;
        ptx::ldmatrix_x4(right[pair],
                         weights + row * Traits::kRowBytes + ((chunk ^ (row & 7)) * 16));
      }
#pragma unroll
      for (int m = 0; m < Traits::kMTiles; ++m) {
        uint32_t left[4];
        const int row = warp_m * Traits::kWarpRows + m * 16 + lane % 16;
        const int chunk = k * 2 + lane / 16;
        ptx::ldmatrix_x4(left, stage + row * Traits::kRowBytes + ((chunk ^ (row & 7)) * 16));
#pragma unroll
        for (int n = 0; n < Traits::kNTiles; ++n) {
          ptx::mma_16816<T>(sums[m][n], left, right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
};

/// Writes the results of a warp; activates them after the gate-up product.
template <typename Traits>
__device__ __forceinline__ void write_tile(const ExpertGemm& gemm, const MoeTile& tile,
                                           int32_t first, int warp_m, int warp_n,
                                           float (&sums)[Traits::kMTiles][Traits::kNTiles][4]) {
  using T = typename Traits::Element;
  constexpr int kResults = Traits::kGateUp ? Traits::kNTiles / 2 : Traits::kNTiles;
  const int lane = threadIdx.x & 31;
  T* out = static_cast<T*>(gemm.out);
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_m * Traits::kWarpRows + m * 16 + half * 8 + lane / 4;
      if (row >= tile.count) {
        continue;
      }
      const int64_t position = int64_t{tile.start} + row;
      const int64_t slot = moe_target(gemm.weight_slots, position);
      const float factor =
          gemm.row_weights == nullptr ? 1.0F : gemm.row_weights[slot * gemm.row_weight_stride];
      T* target = out + gemm.out_map.offset(moe_target(gemm.scatter, position));
#pragma unroll
      for (int n = 0; n < kResults; ++n) {
        const int32_t column = first + warp_n * (kResults * 8) + n * 8 + lane % 4 * 2;
        float values[2] = {sums[m][n][half * 2] * factor, sums[m][n][half * 2 + 1] * factor};
        if constexpr (Traits::kGateUp) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            values[i] = activate(gemm.act, values[i]) * (sums[m][n + 2][half * 2 + i] * factor);
          }
        }
        if (column < gemm.width) {
          store_floats<2, true>(target + column, values);
        }
      }
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    moe_mma_kernel(const __grid_constant__ ExpertGemm gemm) {
  extern __shared__ __align__(128) uint8_t smem[];
  // Tiles of one expert are neighbours, so that they find its weights in the L2 cache.
  const auto index = static_cast<int32_t>(blockIdx.x % static_cast<unsigned>(gemm.max_tiles));
  const int32_t first = static_cast<int32_t>(blockIdx.x / static_cast<unsigned>(gemm.max_tiles)) *
                        Traits::kOutColumns;
  const MoeTile tile = moe_tile(gemm, index, Traits::kTileRows);
  if (tile.count == 0) {
    return;
  }
  const int warp_m = (threadIdx.x >> 5) / Traits::kWarpsN;
  const int warp_n = (threadIdx.x >> 5) % Traits::kWarpsN;
  const uint32_t base = ptx::smem_address(smem);
  const MoeLoader<Traits> loader(gemm, tile, first);
  const int num_steps = (gemm.depth + Traits::kDepth - 1) / Traits::kDepth;
  float sums[Traits::kMTiles][Traits::kNTiles][4] = {};
#pragma unroll
  for (int stage = 0; stage < Traits::kStages - 1; ++stage) {
    if (stage < num_steps) {
      loader.load(base + stage * Traits::kStageBytes, stage);
    }
    ptx::cp_async_commit();
  }
  typename Traits::Product product(gemm, tile, first, warp_n);
  for (int step = 0; step < num_steps; ++step) {
    ptx::cp_async_wait<Traits::kStages - 2>();
    // It also means that no warp still reads the stage that is filled next.
    __syncthreads();
    const int next = step + Traits::kStages - 1;
    if (next < num_steps) {
      loader.load(base + next % Traits::kStages * Traits::kStageBytes, next);
    }
    ptx::cp_async_commit();
    product.add(base + step % Traits::kStages * Traits::kStageBytes, step, warp_m, warp_n, sums);
  }
  ptx::cp_async_wait<0>();
  write_tile<Traits>(gemm, tile, first, warp_m, warp_n, sums);
}

inline constexpr const char* kMoeWhere = "diffulex::fused_moe";

/// Allows the kernel its shared memory, once per device.
template <typename Traits>
Status prepare_moe_mma(int32_t device_index) {
  return allow_shared_memory<moe_mma_kernel<Traits>>(kMoeWhere, device_index, Traits::kSmemBytes);
}

template <typename Traits>
Status launch_moe_mma_tile(const ExpertGemm& gemm, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(prepare_moe_mma<Traits>(context.device_index));
  const int64_t grid = ceil_div(gemm.width, Traits::kOutColumns) * gemm.max_tiles;
  constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;
  if (grid > kMaxGrid) {
    return make_error(StatusCode::kUnsupported, kMoeWhere, ": x: expected at most ", kMaxGrid,
                      " tiles of work, got ", grid);
  }
  moe_mma_kernel<Traits>
      <<<static_cast<unsigned>(grid), Traits::kThreads, Traits::kSmemBytes, stream_of(context)>>>(
          gemm);
  return check_launch(kMoeWhere);
}

template <template <typename, int, bool> typename Traits, typename T, bool kGateUp>
Status launch_moe_mma_kind(const ExpertGemm& gemm, const ExecContext& context) {
  switch (gemm.tile) {
    case 16:
      return launch_moe_mma_tile<Traits<T, 16, kGateUp>>(gemm, context);
    case 32:
      return launch_moe_mma_tile<Traits<T, 32, kGateUp>>(gemm, context);
    case 64:
      return launch_moe_mma_tile<Traits<T, 64, kGateUp>>(gemm, context);
    case 128:
      return launch_moe_mma_tile<Traits<T, 128, kGateUp>>(gemm, context);
    default:
      return make_error(StatusCode::kNoKernel, kMoeWhere,
                        ": tile: expected 16, 32, 64 or 128, got ", gemm.tile);
  }
}

template <template <typename, int, bool> typename Traits, typename T>
Status launch_moe_mma(const ExpertGemm& gemm, const ExecContext& context) {
  return gemm.is_gate_up ? launch_moe_mma_kind<Traits, T, true>(gemm, context)
                         : launch_moe_mma_kind<Traits, T, false>(gemm, context);
}

template <template <typename, int, bool> typename Traits, typename T, bool kGateUp>
Status prepare_moe_mma_kind(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((prepare_moe_mma<Traits<T, 16, kGateUp>>(device_index)));
  DIFFULEX_RETURN_IF_ERROR((prepare_moe_mma<Traits<T, 32, kGateUp>>(device_index)));
  DIFFULEX_RETURN_IF_ERROR((prepare_moe_mma<Traits<T, 64, kGateUp>>(device_index)));
  return prepare_moe_mma<Traits<T, 128, kGateUp>>(device_index);
}

template <template <typename, int, bool> typename Traits, typename T>
Status prepare_moe_mma_dtype(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((prepare_moe_mma_kind<Traits, T, true>(device_index)));
  return prepare_moe_mma_kind<Traits, T, false>(device_index);
}

}  // namespace diffulex::cuda
