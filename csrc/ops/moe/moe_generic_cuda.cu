// SPDX-License-Identifier: Apache-2.0
//
// The grouped expert products without tensor cores: float32, 16-bit operands whose rows are not
// 16-byte aligned, and weights of 4 bits in other groups or with float32 scales. A CTA computes 32
// positions of one expert times 64 weight rows (32 gate and the 32 matching up rows, or 64 rows of
// the second weight) in float32, over ascending k.
#include <cstdint>
#include <type_traits>

#include "ops/activation/gate.cuh"
#include "ops/moe/config.h"
#include "ops/moe/gemm.h"
#include "ops/moe/tiles.cuh"
#include "ops/prepare.h"
#include "ops/quant/code.cuh"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::fused_moe";
constexpr int kTileRows = kMoeGenericTile;
constexpr int kWeightRows = 64;
constexpr int kDepth = 32;
constexpr int kThreads = 256;
constexpr int kLanes = 16;   // threads across the weight rows, each with kColumns of them
constexpr int kColumns = 4;  // weight rows kLanes apart
constexpr int kRows = 2;     // positions of a thread, kTileRows / 2 apart
static_assert(kTileRows == 32, "16 threads with two positions each");

/// Weight row of row `row` of the tile at column `first`; -1 past the end.
template <bool kGateUp>
__device__ __forceinline__ int32_t weight_row(const ExpertGemm& gemm, int32_t first, int32_t row) {
  if constexpr (kGateUp) {
    const int32_t column = first + row % 32;
    return column < gemm.width ? (row < 32 ? 0 : gemm.width) + column : -1;
  } else {
    return first + row < gemm.width ? first + row : -1;
  }
}

/// A column of W of an expert, whose elements have the dtype of the rows or are nibbles.
template <typename W>
struct WeightColumn final {
  static constexpr bool kAreNibbles = std::is_same_v<W, uint8_t>;
  const W* values;
  int64_t scales = 0;
  int32_t shift = 0;

  __device__ __forceinline__ WeightColumn(const ExpertGemm& gemm, int32_t expert, int32_t column)
      : values(static_cast<const W*>(gemm.weight) + expert * gemm.expert_stride) {
    if constexpr (kAreNibbles) {
      scales = expert * gemm.nibbles.expert_stride +
               column / gemm.nibbles.group * gemm.nibbles.group_stride;
      shift = column % 2 * 4;
    }
    values += kAreNibbles ? column / 2 : column;
  }
  __device__ __forceinline__ float at(const ExpertGemm& gemm, int32_t row) const {
    const W value = values[row * gemm.weight_stride];
    if constexpr (kAreNibbles) {
      const float scale = scale_at(gemm.nibbles.values, gemm.nibbles.are_floats, scales + row);
      return __bfloat162float(nibble_value(value >> shift, scale));
    } else {
      return to_float(value);
    }
  }
};

/// Writes the results of a thread: of `count` rows at `start`, those at its place.
template <typename T, bool kGateUp>
__device__ __forceinline__ void store_results(const ExpertGemm& gemm, int32_t start, int32_t count,
                                              int32_t first, const float (&sums)[kRows][kColumns]) {
  const int lane_n = threadIdx.x % kLanes;
  const int lane_m = threadIdx.x / kLanes;
  T* out = static_cast<T*>(gemm.out);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = lane_m + r * (kTileRows / 2);
    if (row >= count) {
      continue;
    }
    const int64_t position = int64_t{start} + row;
    const int64_t slot = moe_target(gemm.weight_slots, position);
    const float factor =
        gemm.row_weights == nullptr ? 1.0F : gemm.row_weights[slot * gemm.row_weight_stride];
    T* target = out + gemm.out_map.offset(moe_target(gemm.scatter, position));
    // Of the gate-up product a thread holds two gate columns and then their two up columns.
    constexpr int kResults = kGateUp ? kColumns / 2 : kColumns;
#pragma unroll
    for (int c = 0; c < kResults; ++c) {
      const int32_t column = first + lane_n + c * kLanes;
      float value = sums[r][c] * factor;
      if constexpr (kGateUp) {
        value = activate(gemm.act, value) * (sums[r][c + 2] * factor);
      }
      if (column < gemm.width) {
        target[column] = from_float<T>(value);
      }
    }
  }
}

template <typename T, typename W, bool kGateUp>
__global__ void __launch_bounds__(kThreads)
    generic_kernel(const __grid_constant__ ExpertGemm gemm) {
  __shared__ float left[kDepth][kTileRows + 1];
  __shared__ float right[kDepth][kWeightRows + 1];
  constexpr int kOutColumns = kGateUp ? kWeightRows / 2 : kWeightRows;
  const auto index = static_cast<int32_t>(blockIdx.x % static_cast<unsigned>(gemm.max_tiles));
  const int32_t first =
      static_cast<int32_t>(blockIdx.x / static_cast<unsigned>(gemm.max_tiles)) * kOutColumns;
  const auto [expert, start, count] = moe_tile(gemm, index, kTileRows);
  if (count == 0) {
    return;
  }
  const int lane = threadIdx.x % kDepth;  // column of the depth step a thread copies
  const int line = threadIdx.x / kDepth;  // first row it copies
  constexpr int kLines = kThreads / kDepth;
  const T* rows = static_cast<const T*>(gemm.rows);
  const int lane_n = threadIdx.x % kLanes;
  const int lane_m = threadIdx.x / kLanes;
  float sums[kRows][kColumns] = {};
  for (int32_t base = 0; base < gemm.depth; base += kDepth) {
    const int32_t column = base + lane;
    const bool is_inside = column < gemm.depth;
    const WeightColumn<W> weights(gemm, expert, column);
    for (int row = line; row < kTileRows; row += kLines) {
      float value = 0.0F;
      if (is_inside && row < count) {
        const int64_t source = moe_target(gemm.gather, int64_t{start} + row) / gemm.top_k;
        value = to_float(rows[gemm.row_map.offset(source) + column]);
      }
      left[lane][row] = value;
    }
    for (int row = line; row < kWeightRows; row += kLines) {
      const int32_t source = weight_row<kGateUp>(gemm, first, row);
      right[lane][row] = is_inside && source >= 0 ? weights.at(gemm, source) : 0.0F;
    }
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kDepth; ++k) {
      float factors[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        factors[c] = right[k][lane_n + c * kLanes];
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float value = left[k][lane_m + r * (kTileRows / 2)];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          sums[r][c] = fmaf(value, factors[c], sums[r][c]);
        }
      }
    }
    __syncthreads();
  }
  store_results<T, kGateUp>(gemm, start, count, first, sums);
}

template <typename T, typename W>
void launch_kernel(const ExpertGemm& gemm, int64_t grid, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(grid);
  if (gemm.is_gate_up) {
    generic_kernel<T, W, true><<<blocks, kThreads, 0, stream>>>(gemm);
  } else {
    generic_kernel<T, W, false><<<blocks, kThreads, 0, stream>>>(gemm);
  }
}

template <typename T, typename W>
Status touch_kernels() {
  DIFFULEX_RETURN_IF_ERROR((touch_kernel(kWhere, generic_kernel<T, W, true>)));
  return touch_kernel(kWhere, generic_kernel<T, W, false>);
}

}  // namespace

Status launch_moe_generic(const ExpertGemm& gemm, DType dtype, const ExecContext& context) {
  const int32_t columns = gemm.is_gate_up ? kWeightRows / 2 : kWeightRows;
  const int64_t grid = ceil_div(gemm.width, columns) * gemm.max_tiles;
  constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;
  if (grid > kMaxGrid) {
    return make_error(StatusCode::kUnsupported, kWhere, ": x: expected at most ", kMaxGrid,
                      " tiles of work, got ", grid);
  }
  DIFFULEX_RETURN_IF_ERROR(dispatch_dtype(kWhere, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    gemm.nibbles.values == nullptr ? launch_kernel<T, T>(gemm, grid, stream_of(context))
                                   : launch_kernel<T, uint8_t>(gemm, grid, stream_of(context));
    return Status::ok_status();
  }));
  return check_launch(kWhere);
}

Status prepare_moe_generic() {
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR((touch_kernels<T, T>()));
    return touch_kernels<T, uint8_t>();
  });
}

}  // namespace diffulex::cuda
