// SPDX-License-Identifier: Apache-2.0
//
// Gated activation over rows x[..., 2 I] -> out[..., I]: out = act(gate) * up in fp32, one
// rounding.
#include <cstdint>

#include "ops/activation/gate.cuh"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/row_layout.cuh"
#include "ops/shared/cuda/vec.cuh"
#include "ops/shared/fast_div.h"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 256;
/// Columns of a piece where rows are aligned; one elsewhere.
constexpr int kWide = 8;

struct ActArgs {
  const void* x;  // [rows, 2 I], gate first
  void* out;      // [rows, I]
  RowLayout x_rows;
  RowLayout out_rows;
  int64_t num_pieces;  // of all rows
  FastDiv row_pieces;  // of one row
  int32_t width;       // I
};

/// One piece of kCount columns per thread: with few registers, many threads hide each other's
/// loads, and no loop stands before the first of them.
template <typename T, Activation kAct, int kCount>
__global__ void __launch_bounds__(kThreads) act_kernel(const __grid_constant__ ActArgs args) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (piece >= args.num_pieces) {
    return;
  }
  // 32-bit division where it is enough: the 64-bit one costs more than the activation.
  const int64_t row = piece <= INT32_MAX ? args.row_pieces.divide(static_cast<int32_t>(piece))
                                         : piece / args.row_pieces.divisor;
  const int64_t column = (piece - row * args.row_pieces.divisor) * kCount;
  const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row) + column;
  float gate[kCount];
  float up[kCount];
  load_floats<kCount, true>(x, gate);
  load_floats<kCount, true>(x + args.width, up);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    gate[i] = activate<kAct>(gate[i]) * up[i];
  }
  store_floats<kCount, true>(static_cast<T*>(args.out) + args.out_rows.offset(row) + column, gate);
}

template <typename T, Activation kAct, int kCount>
cudaError_t launch_pieces(ActArgs args, int64_t num_rows, const ExecContext& context) {
  const int64_t row_pieces = args.width / kCount;
  args.num_pieces = num_rows * row_pieces;
  args.row_pieces = FastDiv::of(static_cast<uint32_t>(row_pieces));
  const LaunchShape shape{static_cast<unsigned>(ceil_div(args.num_pieces, kThreads)), kThreads, 0,
                          stream_of(context)};
  return launch_dependent(act_kernel<T, kAct, kCount>, shape,
                          can_launch_dependent(context.device_index), args);
}

template <typename T, Activation kAct>
cudaError_t launch_act(const ActArgs& args, int64_t num_rows, bool is_wide,
                       const ExecContext& context) {
  return is_wide ? launch_pieces<T, kAct, kWide>(args, num_rows, context)
                 : launch_pieces<T, kAct, 1>(args, num_rows, context);
}

}  // namespace

Status act_and_mul(const ActAndMulParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::act_and_mul";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  ActArgs args{};
  args.x = params.x.data;
  args.out = params.out.data;
  args.x_rows = RowLayout::of(params.x);
  args.out_rows = RowLayout::of(params.out);
  args.width = static_cast<int32_t>(params.out.last());
  const int64_t bytes = dtype_bytes(params.x.dtype);
  const int64_t rows = num_rows(params.out);
  const bool is_wide = args.width % kWide == 0 && is_aligned16(args.x) && is_aligned16(args.out) &&
                       args.x_rows.is_aligned16(bytes) && args.out_rows.is_aligned16(bytes);
  return dispatch_dtype(kWhere, params.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (params.act) {
      case Activation::kSilu:
        return cuda_status(kWhere, launch_act<T, Activation::kSilu>(args, rows, is_wide, context));
      case Activation::kGeluTanh:
        return cuda_status(kWhere,
                           launch_act<T, Activation::kGeluTanh>(args, rows, is_wide, context));
      case Activation::kGeluErf:
        return cuda_status(kWhere,
                           launch_act<T, Activation::kGeluErf>(args, rows, is_wide, context));
    }
    return make_error(StatusCode::kInvalidArgument, kWhere, ": act: expected 0, 1 or 2, got ",
                      static_cast<int32_t>(params.act));
  });
}

namespace {

template <typename T, Activation kAct>
Status touch_both(const char* where) {
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, act_kernel<T, kAct, kWide>));
  return touch_kernel(where, act_kernel<T, kAct, 1>);
}

}  // namespace

Status prepare_activation(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::act_and_mul";
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR((touch_both<T, Activation::kSilu>(kWhere)));
    DIFFULEX_RETURN_IF_ERROR((touch_both<T, Activation::kGeluTanh>(kWhere)));
    return touch_both<T, Activation::kGeluErf>(kWhere);
  });
}

}  // namespace diffulex::cuda
