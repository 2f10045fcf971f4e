// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tensor maps, attributes and launches of the Hopper expert products.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ops/moe/config.h"
#include "ops/moe/sm90/kernel.cuh"
#include "ops/moe/sm90/launch.h"
#include "ops/shared/cuda/shared_memory.cuh"
#include "ops/shared/cuda/tensor_map.h"

namespace diffulex::cuda::sm90 {

inline constexpr const char* kMoeWhere = "diffulex::fused_moe";

/// The weights: rows as they are, or gate and up rows alternating in groups of eight.
template <typename Traits>
TensorMapShape weight_shape(const ExpertGemm& gemm) {
  TensorMapShape shape;
  shape.data = gemm.weight;
  const int64_t row = gemm.weight_stride;
  if constexpr (kHasNibbles<Traits>) {
    return nibble_shape<Traits>(gemm);
  } else if constexpr (Traits::kWarpsWrite && Traits::kGateUp) {
    shape.rank = 5;
    const int64_t sizes[] = {gemm.depth, 16, 2, gemm.width / 16, gemm.num_experts};
    const int64_t strides[] = {1, row, gemm.width * row, 16 * row, gemm.expert_stride};
    const int32_t boxes[] = {Traits::kDepth, 8, 2, 4, 1};
    std::copy_n(sizes, 5, shape.size);
    std::copy_n(strides, 5, shape.stride);
    std::copy_n(boxes, 5, shape.box);
  } else if constexpr (Traits::kWarpsWrite) {
    shape.rank = 5;
    const int64_t sizes[] = {gemm.depth, 16, gemm.width / 32, 2, gemm.num_experts};
    const int64_t strides[] = {1, row, 32 * row, 16 * row, gemm.expert_stride};
    const int32_t boxes[] = {Traits::kDepth, 16, 4, 2, 1};
    std::copy_n(sizes, 5, shape.size);
    std::copy_n(strides, 5, shape.stride);
    std::copy_n(boxes, 5, shape.box);
  } else if constexpr (Traits::kGateUp) {
    shape.rank = 5;
    const int64_t sizes[] = {gemm.depth, 8, 2, gemm.width / 8, gemm.num_experts};
    const int64_t strides[] = {1, row, gemm.width * row, 8 * row, gemm.expert_stride};
    const int32_t boxes[] = {Traits::kDepth, 8, 2, Traits::kWeightRows / 16, 1};
    std::copy_n(sizes, 5, shape.size);
    std::copy_n(strides, 5, shape.stride);
    std::copy_n(boxes, 5, shape.box);
  } else {
    shape.rank = 3;
    const int64_t sizes[] = {gemm.depth, gemm.width, gemm.num_experts};
    const int64_t strides[] = {1, row, gemm.expert_stride};
    const int32_t boxes[] = {Traits::kDepth, Traits::kWeightRows, 1};
    std::copy_n(sizes, 3, shape.size);
    std::copy_n(strides, 3, shape.stride);
    std::copy_n(boxes, 3, shape.box);
  }
  return shape;
}

/// The rows of the positions, in boxes of kBoxRows.
template <typename Traits>
TensorMapShape row_shape(const ExpertGemm& gemm) {
  TensorMapShape shape;
  shape.data = gemm.rows;
  shape.rank = 3;
  const RowMap& map = gemm.row_map;
  const bool is_matrix = map.outer_stride == 0;
  const int64_t sizes[] = {gemm.depth, map.inner, is_matrix ? 1 : gemm.num_positions / map.inner};
  const int64_t strides[] = {1, map.inner_stride,
                             is_matrix ? map.inner * map.inner_stride : map.outer_stride};
  const int32_t boxes[] = {Traits::kDepth / Traits::kLines, Traits::kBoxRows, 1};
  std::copy_n(sizes, 3, shape.size);
  std::copy_n(strides, 3, shape.stride);
  std::copy_n(boxes, 3, shape.box);
  return shape;
}

/// Allows the kernel its shared memory, once per device.
template <typename Traits>
Status prepare_moe_tile(int32_t device_index) {
  return allow_shared_memory<moe_kernel<Traits>>(kMoeWhere, device_index, Traits::kSmemBytes);
}

template <typename Traits>
Status launch_moe_tile(const ExpertGemm& gemm, const ExecContext& context) {
  constexpr DType kRows = kHasCodes<Traits>                                  ? DType::kF8E4M3
                          : std::is_same_v<typename Traits::Element, __half> ? DType::kF16
                                                                             : DType::kBF16;
  constexpr DType kWeights = kHasNibbles<Traits> ? DType::kF8E4M3 : kRows;  // bytes
  if (Traits::kGateUp && !Traits::kGathers && gemm.gather != nullptr) {
    return make_error(StatusCode::kNoKernel, kMoeWhere, ": tile: expected at most ",
                      kMoeMaxGatherTile, " with gathered rows, got ", gemm.tile);
  }
  DIFFULEX_RETURN_IF_ERROR(prepare_moe_tile<Traits>(context.device_index));
  MoeMaps maps;
  DIFFULEX_RETURN_IF_ERROR(
      encode_tensor_map(kMoeWhere, weight_shape<Traits>(gemm), kWeights, &maps.weight));
  DIFFULEX_RETURN_IF_ERROR(
      encode_tensor_map(kMoeWhere, row_shape<Traits>(gemm), kRows, &maps.rows));
  int processors = 0;
  DIFFULEX_RETURN_IF_ERROR(cuda_status(
      kMoeWhere,
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, context.device_index)));
  const int64_t items = ceil_div(gemm.width, Traits::kOutColumns) * gemm.max_tiles;
  const int64_t places = int64_t{processors} * Traits::kCtasPerSm / Traits::kCtas;
  const LaunchShape shape{dim3(static_cast<unsigned>(std::min(items, places) * Traits::kCtas)),
                          dim3(Traits::kThreads), Traits::kSmemBytes, stream_of(context),
                          Traits::kCtas};
  return cuda_status(kMoeWhere, launch_dependent(moe_kernel<Traits>, shape, true, maps, gemm));
}

/// The products of one kind: of TraitsOf<kTile>, and of those of more tiles.
template <template <int> typename TraitsOf, int kTile, int... kMore>
struct MoeKind final {
  static Status launch(const ExpertGemm& gemm, const ExecContext& context) {
    if (gemm.tile == kTile) {
      return launch_moe_tile<TraitsOf<kTile>>(gemm, context);
    }
    if constexpr (sizeof...(kMore) > 0) {
      return MoeKind<TraitsOf, kMore...>::launch(gemm, context);
    }
    return make_error(StatusCode::kNoKernel, kMoeWhere,
                      ": tile: expected one for which there are kernels, got ", gemm.tile);
  }
  static Status prepare(int32_t device_index) {
    DIFFULEX_RETURN_IF_ERROR(prepare_moe_tile<TraitsOf<kTile>>(device_index));
    if constexpr (sizeof...(kMore) > 0) {
      return MoeKind<TraitsOf, kMore...>::prepare(device_index);
    }
    return Status::ok_status();
  }
};

/// Of an element type; the largest tile has clusters.
template <typename T, bool kGateUp>
struct HalfTraits final {
  template <int kTile>
  using Of = std::conditional_t<kTile == kMoePairTile, MoePairTraits<T, kGateUp>,
                                MoeTraits<T, kTile, kGateUp>>;
  using Kind = MoeKind<Of, 16, 32, 64, 96, 128, 160, kMoePairTile>;
};

template <typename T>
Status launch_moe(const ExpertGemm& gemm, const ExecContext& context) {
  return gemm.is_gate_up ? HalfTraits<T, true>::Kind::launch(gemm, context)
                         : HalfTraits<T, false>::Kind::launch(gemm, context);
}

template <typename T>
Status prepare_moe(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((HalfTraits<T, true>::Kind::prepare(device_index)));
  return HalfTraits<T, false>::Kind::prepare(device_index);
}

}  // namespace diffulex::cuda::sm90
