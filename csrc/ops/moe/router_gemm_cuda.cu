// SPDX-License-Identifier: Apache-2.0
//
// logits[T, E] = x[T, H] w[E, H]^T in float32. bfloat16 rows and weights go to the tensor cores
// (router_mma.cuh). Otherwise a warp computes kTokens x kExperts sums; lane l adds the columns
// 256 i + 8 l .. 8 l + 7 in ascending order and the lanes meet in one fixed tree, so that an
// element is the same bits whatever T and E are.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/moe/router_args.cuh"
#include "ops/moe/router_mma.cuh"
#include "ops/prepare.h"
#include "ops/shared/cuda/device_facts.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTokens = 4;
constexpr int kExperts = 4;
constexpr int kPiece = 8;  // columns a lane reads at once

/// Eight columns from `column` on, zeros past the end.
template <bool kVec, typename T>
__device__ __forceinline__ void load_piece(const T* row, int column, int hidden,
                                           float (&values)[kPiece]) {
  if constexpr (kVec) {
    load_floats<kPiece, true>(row + column, values);
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      values[i] = column + i < hidden ? to_float(row[column + i]) : 0.0F;
    }
  }
}

template <typename T, typename W, bool kVec>
__global__ void __launch_bounds__(kThreads) router_kernel(const __grid_constant__ RouterArgs args) {
  const int lane = threadIdx.x & 31;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int first_expert = static_cast<int>(blockIdx.y * kWarps + (threadIdx.x >> 5)) * kExperts;
  pdl_launch_dependents();
  if (first_expert >= args.num_experts) {
    return;
  }
  pdl_wait();
  // Rows past the end repeat the last one and are not written.
  const T* x[kTokens];
  const W* w[kExperts];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int64_t token = first_token + t < args.num_tokens ? first_token + t : args.num_tokens - 1;
    x[t] = static_cast<const T*>(args.x) + token * args.x_stride;
  }
#pragma unroll
  for (int e = 0; e < kExperts; ++e) {
    const int expert = first_expert + e < args.num_experts ? first_expert + e : first_expert;
    w[e] = static_cast<const W*>(args.w) + expert * args.w_stride;
  }
  float sums[kTokens][kExperts] = {};
  for (int column = lane * kPiece; column < args.hidden; column += 32 * kPiece) {
    float left[kTokens][kPiece];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      load_piece<kVec>(x[t], column, args.hidden, left[t]);
    }
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
      float right[kPiece];
      load_piece<kVec>(w[e], column, args.hidden, right);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          sums[t][e] = fmaf(left[t][i], right[i], sums[t][e]);
        }
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
      const float sum = warp_sum(sums[t][e]);
      const bool is_real = first_token + t < args.num_tokens && first_expert + e < args.num_experts;
      if (is_real && lane == t * kExperts + e) {
        args.logits[(first_token + t) * args.logits_stride + first_expert + e] = sum;
      }
    }
  }
}

template <typename T, typename W>
cudaError_t launch_router(const RouterArgs& args, bool is_vec, LaunchShape shape,
                          bool is_dependent) {
  shape.grid = dim3(static_cast<unsigned>(ceil_div(args.num_tokens, kTokens)),
                    static_cast<unsigned>(ceil_div(args.num_experts, kExperts * kWarps)));
  shape.block = dim3(kThreads);
  return launch_dependent(is_vec ? router_kernel<T, W, true> : router_kernel<T, W, false>, shape,
                          is_dependent, args);
}

template <typename Tile>
dim3 router_grid(const RouterArgs& args) {
  return dim3(static_cast<unsigned>(ceil_div(args.num_tokens, int64_t{Tile::kTokens})),
              static_cast<unsigned>(ceil_div(args.num_experts, Tile::kExperts)));
}

template <typename Tile>
cudaError_t launch_router_tile(const RouterArgs& args, LaunchShape shape, bool is_dependent) {
  shape.grid = router_grid<Tile>(args);
  shape.block = dim3(Tile::kThreads);
  return launch_dependent(router_mma_kernel<Tile>, shape, is_dependent, args);
}

/// The smallest tiles that all run at once, so that no CTA reads much; larger tiles read less in
/// all. They add in the same order.
cudaError_t launch_router_mma(const RouterArgs& args, const LaunchShape& shape, bool is_dependent,
                              int32_t num_processors) {
  const auto runs_at_once = [&](const dim3& grid) {
    return int64_t{grid.x} * grid.y <= int64_t{2} * num_processors;
  };
  if (runs_at_once(router_grid<SmallRouterTile>(args))) {
    return launch_router_tile<SmallRouterTile>(args, shape, is_dependent);
  }
  if (runs_at_once(router_grid<MediumRouterTile>(args))) {
    return launch_router_tile<MediumRouterTile>(args, shape, is_dependent);
  }
  return launch_router_tile<LargeRouterTile>(args, shape, is_dependent);
}

}  // namespace

Status router_gemm(const RouterGemmParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::router_gemm";
  constexpr int64_t kMaxGridY = 65535;
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  if (params.w.size[0] > kMaxGridY * kExperts * kWarps) {
    return make_error(StatusCode::kNoKernel, kWhere, ": w: expected at most ",
                      kMaxGridY * kExperts * kWarps, " experts, got ", params.w.size[0]);
  }
  RouterArgs args{};
  args.x = params.x.data;
  args.w = params.w.data;
  args.logits = params.logits.as<float>();
  args.x_stride = params.x.stride[0];
  args.w_stride = params.w.stride[0];
  args.logits_stride = params.logits.stride[0];
  args.num_tokens = params.x.size[0];
  args.num_experts = static_cast<int32_t>(params.w.size[0]);
  args.hidden = static_cast<int32_t>(params.x.size[1]);
  const int64_t x_row = args.x_stride * dtype_bytes(params.x.dtype);
  const int64_t w_row = args.w_stride * dtype_bytes(params.w.dtype);
  const bool is_vec = args.hidden % kPiece == 0 && is_aligned16(args.x) && is_aligned16(args.w) &&
                      x_row % 16 == 0 && w_row % 16 == 0;
  LaunchShape shape;
  shape.stream = stream_of(context);
  const bool is_dependent = can_read_ahead(context);
  if (args.num_tokens == 0 || args.num_experts == 0) {
    return Status::ok_status();
  }
  if (params.x.dtype == DType::kBF16 && params.w.dtype == DType::kBF16 && is_vec &&
      args.hidden % kRouterChunk == 0) {
    return cuda_status(kWhere, launch_router_mma(args, shape, is_dependent,
                                                 device_processors(context.device_index)));
  }
  return dispatch_dtype(kWhere, params.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return cuda_status(kWhere,
                       params.w.dtype == DType::kF32
                           ? launch_router<T, float>(args, is_vec, shape, is_dependent)
                           : launch_router<T, __nv_bfloat16>(args, is_vec, shape, is_dependent));
  });
}

Status prepare_router_gemm(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::router_gemm";
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, router_mma_kernel<SmallRouterTile>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, router_mma_kernel<MediumRouterTile>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, router_mma_kernel<LargeRouterTile>));
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR((touch_kernel(kWhere, router_kernel<T, float, true>)));
    DIFFULEX_RETURN_IF_ERROR((touch_kernel(kWhere, router_kernel<T, float, false>)));
    DIFFULEX_RETURN_IF_ERROR((touch_kernel(kWhere, router_kernel<T, __nv_bfloat16, true>)));
    return touch_kernel(kWhere, router_kernel<T, __nv_bfloat16, false>);
  });
}

}  // namespace diffulex::cuda
