// SPDX-License-Identifier: Apache-2.0
//
// Gated activation over rows x[..., 2 I] -> out[..., I]: out = act(gate) * up in fp32, one
// rounding.
#include <cstdint>
#include <utility>

#include "ops/activation/gate.cuh"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/quant/code_rows.cuh"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/row_layout.cuh"
#include "ops/shared/cuda/vec.cuh"
#include "ops/shared/fast_div.h"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 256;
/// Columns of a piece where rows are aligned; one elsewhere.
constexpr int kWide = kCodePiece;
/// Columns of the widest rows that become codes in the same launch.
constexpr int64_t kMaxHeld = 16384;
/// Threads of a row of codes, and the numbers of rows above and up to which a loop is faster: with
/// fewer each thread has little to wait for, with more memory is what takes the time.
constexpr int kGroupThreads = 512;
constexpr int kGroupWarps = kGroupThreads / 32;
constexpr std::pair<int64_t, int64_t> kLoopRows = {64, 512};

struct ActArgs {
  const void* x;  // [rows, 2 I], gate first
  void* out;      // [rows, I]
  RowLayout x_rows;
  RowLayout out_rows;
  CodeRows code_rows;
  int64_t num_pieces;  // of all rows
  FastDiv row_pieces;  // of one row
  int32_t width;       // I
  bool is_codes_only;  // out is not written
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

/// A CTA for each row, whose values stay in registers until they are codes. Of 16-bit values two
/// CTAs of many threads share a multiprocessor, so that 256 rows are one wave.
template <typename T, Activation kAct, int kWarps, int kHeld>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 16 && sizeof(T) == 2 ? 2 : 1)
    act_codes_kernel(const __grid_constant__ ActArgs args) {
  const int64_t row = blockIdx.x;
  const auto thread = static_cast<int>(threadIdx.x);
  // Rows with codes have one leading dimension.
  const T* x = static_cast<const T*>(args.x) + row * args.x_rows.stride[0];
  T* out = static_cast<T*>(args.out) + row * args.out_rows.stride[0];
  pdl_launch_dependents();
  pdl_wait();
  CodeSource<T> held[kHeld] = {};
  CodeSource<T> up[kHeld];
#pragma unroll
  for (int piece = 0; piece < kHeld; ++piece) {
    const int32_t column = (piece * 32 * kWarps + thread) * kWide;
    if (column < args.width) {
      held[piece] = *reinterpret_cast<const CodeSource<T>*>(x + column);
      up[piece] = *reinterpret_cast<const CodeSource<T>*>(x + args.width + column);
    }
  }
#pragma unroll
  for (int piece = 0; piece < kHeld; ++piece) {
    const int32_t column = (piece * 32 * kWarps + thread) * kWide;
    if (column < args.width) {
      float values[kWide];
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        values[i] = activate<kAct>(to_float(held[piece].values[i])) * to_float(up[piece].values[i]);
      }
      held[piece] = round_floats<T>(values);
      if (!args.is_codes_only) {
        *reinterpret_cast<CodeSource<T>*>(out + column) = held[piece];
      }
    }
  }
  write_codes<kWarps>(args.code_rows, row, thread, args.width, held);
}

/// The same where groups have a scale each, piece after piece: between the products of a step the
/// code is not at hand, and a loop is fetched once.
template <typename T, Activation kAct>
__global__ void __launch_bounds__(kGroupThreads, sizeof(T) == 2 ? 2 : 1)
    act_groups_kernel(const __grid_constant__ ActArgs args) {
  constexpr int32_t kStep = kGroupThreads * kWide;
  constexpr int kLanes = static_cast<int>(kQuantGroup) / kWide;
  const int64_t row = blockIdx.x;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const T* x = static_cast<const T*>(args.x) + row * args.x_rows.stride[0];
  T* out = static_cast<T*>(args.out) + row * args.out_rows.stride[0];
  pdl_launch_dependents();
  pdl_wait();
  CodeSource<T> gate;
  CodeSource<T> up;
  const auto load = [&](int32_t column) {
    gate = {};
    up = {};
    if (column < args.width) {
      gate = *reinterpret_cast<const CodeSource<T>*>(x + column);
      up = *reinterpret_cast<const CodeSource<T>*>(x + args.width + column);
    }
  };
  load(thread * kWide);
  // Whole warps, for lanes find the scale of a group together.
#pragma unroll 1
  for (int32_t first = thread / 32 * 32 * kWide; first < args.width; first += kStep) {
    const int32_t column = first + thread % 32 * kWide;
    const CodeSource<T> now[2] = {gate, up};
    load(column + kStep);
    float values[kWide];
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      values[i] = activate<kAct>(to_float(now[0].values[i])) * to_float(now[1].values[i]);
    }
    const CodeSource<T> held[1] = {round_floats<T>(values)};
    const bool is_real = column < args.width;
    if (is_real && !args.is_codes_only) {
      *reinterpret_cast<CodeSource<T>*>(out + column) = held[0];
    }
    if (args.code_rows.is_int8) {
      write_group<Int8Code, kLanes>(args.code_rows, row, column, is_real, held);
    } else {
      write_group<E4m3Code, kLanes>(args.code_rows, row, column, is_real, held);
    }
  }
}

/// A CTA for each row.
cudaError_t launch_rows(void (*kernel)(ActArgs), int threads, const ActArgs& args, int64_t num_rows,
                        const ExecContext& context) {
  const LaunchShape shape{static_cast<unsigned>(num_rows), static_cast<unsigned>(threads), 0,
                          stream_of(context)};
  return launch_dependent(kernel, shape, can_launch_dependent(context.device_index), args);
}

template <typename T, Activation kAct>
cudaError_t launch_act(const ActArgs& args, int64_t num_rows, bool is_wide,
                       const ExecContext& context) {
  if (args.code_rows.codes != nullptr) {
    if (args.width <= kMaxHeld / 8) {
      return launch_rows(act_codes_kernel<T, kAct, 4, 2>, 32 * 4, args, num_rows, context);
    }
    const bool is_loop = num_rows > kLoopRows.first && num_rows <= kLoopRows.second;
    const auto kernel = is_loop && !args.code_rows.is_whole
                            ? act_groups_kernel<T, kAct>
                            : act_codes_kernel<T, kAct, kGroupWarps, 4>;
    return launch_rows(kernel, kGroupThreads, args, num_rows, context);
  }
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
  args.is_codes_only = params.codes_only;
  const int64_t bytes = dtype_bytes(params.x.dtype);
  const int64_t rows = num_rows(params.out);
  const bool is_wide = args.width % kWide == 0 && is_aligned16(args.x) && is_aligned16(args.out) &&
                       args.x_rows.is_aligned16(bytes) && args.out_rows.is_aligned16(bytes);
  const bool has_codes = params.codes.present();
  const CodeRows code_rows = has_codes ? CodeRows::of(params.codes, params.scale) : CodeRows{};
  if (is_wide && args.width <= kMaxHeld && has_codes && code_rows.has_pieces(args.width)) {
    args.code_rows = code_rows;
  }
  DIFFULEX_RETURN_IF_ERROR(dispatch_dtype(kWhere, params.x.dtype, [&](auto tag) {
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
  }));
  return !has_codes || args.code_rows.codes != nullptr
             ? Status{}
             : cuda::quantize_rows(code_rows_of(params.out, params.codes, params.scale), context);
}

namespace {

template <typename T, Activation kAct>
Status touch_both(const char* where) {
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, act_kernel<T, kAct, kWide>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, act_codes_kernel<T, kAct, 4, 2>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, act_codes_kernel<T, kAct, kGroupWarps, 4>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, act_groups_kernel<T, kAct>));
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
