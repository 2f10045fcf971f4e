// SPDX-License-Identifier: Apache-2.0
//
// Gated activation over rows x[..., 2 I] -> out[..., I]: out = act(gate) * up in fp32, one
// rounding.
#include <cstdint>

#include "kernels/cuda/common/gate.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/pdl.cuh"
#include "kernels/cuda/common/row_layout.cuh"
#include "kernels/cuda/common/vec.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/portable/prepare.h"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 256;

struct ActArgs {
  const void* x;  // [rows, 2 I], gate first
  void* out;      // [rows, I]
  RowLayout x_rows;
  RowLayout out_rows;
  int64_t num_rows;
  int32_t width;  // I
};

template <typename T, Activation kAct, bool kVec>
__global__ void __launch_bounds__(kThreads) act_kernel(const __grid_constant__ ActArgs args) {
  constexpr int kCount = kVec ? 8 : 1;
  pdl_launch_dependents();
  pdl_wait();
  const auto pieces = static_cast<uint32_t>(args.width / kCount);
  const int64_t total = args.num_rows * pieces;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    // 32-bit division where it is enough: the 64-bit one costs more than the activation.
    const int64_t row =
        total <= UINT32_MAX ? static_cast<uint32_t>(i) / pieces : i / static_cast<int64_t>(pieces);
    const int64_t column = (i - row * pieces) * kCount;
    const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row) + column;
    float gate[kCount];
    float up[kCount];
    load_floats<kCount, kVec>(x, gate);
    load_floats<kCount, kVec>(x + args.width, up);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      gate[j] = activate<kAct>(gate[j]) * up[j];
    }
    store_floats<kCount, kVec>(static_cast<T*>(args.out) + args.out_rows.offset(row) + column,
                               gate);
  }
}

template <typename T, Activation kAct>
cudaError_t launch_act(const ActArgs& args, bool is_vec, const ExecContext& context) {
  const int64_t total = args.num_rows * (is_vec ? args.width / 8 : args.width);
  const int64_t blocks = ceil_div(total, kThreads);
  const LaunchShape shape{static_cast<unsigned>(blocks < (1 << 20) ? blocks : 1 << 20), kThreads, 0,
                          stream_of(context)};
  const bool is_dependent = can_launch_dependent(context.device_index);
  return is_vec ? launch_dependent(act_kernel<T, kAct, true>, shape, is_dependent, args)
                : launch_dependent(act_kernel<T, kAct, false>, shape, is_dependent, args);
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
  args.num_rows = num_rows(params.out);
  args.width = static_cast<int32_t>(params.out.last());
  const int64_t bytes = dtype_bytes(params.x.dtype);
  const bool is_vec = args.width % 8 == 0 && is_aligned16(args.x) && is_aligned16(args.out) &&
                      args.x_rows.is_aligned16(bytes) && args.out_rows.is_aligned16(bytes);
  return dispatch_dtype(kWhere, params.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (params.act) {
      case Activation::kSilu:
        return cuda_status(kWhere, launch_act<T, Activation::kSilu>(args, is_vec, context));
      case Activation::kGeluTanh:
        return cuda_status(kWhere, launch_act<T, Activation::kGeluTanh>(args, is_vec, context));
      case Activation::kGeluErf:
        return cuda_status(kWhere, launch_act<T, Activation::kGeluErf>(args, is_vec, context));
    }
    return make_error(StatusCode::kInvalidArgument, kWhere, ": act: expected 0, 1 or 2, got ",
                      static_cast<int32_t>(params.act));
  });
}

namespace {

template <typename T, Activation kAct>
Status touch_both(const char* where) {
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, act_kernel<T, kAct, true>));
  return touch_kernel(where, act_kernel<T, kAct, false>);
}

}  // namespace

Status prepare_activation() {
  constexpr const char* kWhere = "diffulex::act_and_mul";
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR((touch_both<T, Activation::kSilu>(kWhere)));
    DIFFULEX_RETURN_IF_ERROR((touch_both<T, Activation::kGeluTanh>(kWhere)));
    return touch_both<T, Activation::kGeluErf>(kWhere);
  });
}

}  // namespace diffulex::cuda
