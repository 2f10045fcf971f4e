// SPDX-License-Identifier: Apache-2.0
//
// RMSNorm family over rows x[..., H]: y = x * rsqrt(mean(x^2) + eps) * (weight + offset), fp32,
// one rounding. The reduction tree depends on H alone, never on the number of rows.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/norm/weight.cuh"
#include "ops/prepare.h"
#include "ops/quant/code_rows.cuh"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/row_layout.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

enum class NormKind { kPlain, kAddBefore, kAddAfter };

struct NormArgs {
  const void* x;          // [rows, H]
  void* out;              // [rows, H]; x itself for kAddBefore
  void* residual;         // [rows, H]; written by kAddBefore
  const void* weight;     // [H] or null
  const void* out_scale;  // [1] or null
  RowLayout x_rows;
  RowLayout out_rows;
  RowLayout residual_rows;
  CodeRows code_rows;
  int64_t num_rows;
  int32_t width;  // H
  float eps;
  float weight_offset;
  bool is_weight_float;
  bool is_scale_float;
  bool is_codes_only;  // out is not written
};

constexpr int kElems = kCodePiece;
/// Columns of the widest rows that stay in registers.
constexpr int64_t kMaxHeld = 16384;

template <typename T, bool kVec>
__device__ __forceinline__ void load_weight(const NormArgs& args, int32_t column,
                                            float (&weight)[kVec ? kElems : 1]) {
  load_norm_weight<T, kVec ? kElems : 1, kVec>(args.weight, args.is_weight_float,
                                               args.weight_offset, column, weight);
}

/// The values whose mean square is taken: x, or x + residual before rounding.
template <typename T, NormKind kKind, bool kVec>
__device__ __forceinline__ void load_operand(const T* x, const T* residual,
                                             float (&values)[kVec ? kElems : 1]) {
  constexpr int kCount = kVec ? kElems : 1;
  load_floats<kCount, kVec>(x, values);
  if constexpr (kKind == NormKind::kAddBefore) {
    float addend[kCount];
    load_floats<kCount, kVec>(residual, addend);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] += addend[i];
    }
  }
}

/// One piece of a row once its scale is known; writes that of the residual.
template <typename T, NormKind kKind, bool kVec>
__device__ __forceinline__ Vec<T, kVec ? kElems : 1> finish_piece(
    T* residual, int32_t column, float scale, float out_scale,
    const float (&weight)[kVec ? kElems : 1], float (&values)[kVec ? kElems : 1]) {
  constexpr int kCount = kVec ? kElems : 1;
  if constexpr (kKind == NormKind::kAddBefore) {
    store_floats<kCount, kVec>(residual + column, values);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = values[i] * scale * weight[i];
  }
  if constexpr (kKind == NormKind::kAddAfter) {
    float addend[kCount];
    load_floats<kCount, kVec>(residual + column, addend);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = (values[i] + addend[i]) * out_scale;
    }
  }
  return round_floats<T>(values);
}

/// kWarps warps share a row; kRows rows per CTA (kWarps == 1 only). kHeld pieces per thread stay in
/// registers between the two phases; 0 = the row is read twice (any width, any alignment). kCodes:
/// what is written becomes codes too.
template <typename T, NormKind kKind, int kWarps, int kRows, int kHeld, bool kCodes>
__global__ void __launch_bounds__(32 * kWarps * kRows)
    norm_kernel(const __grid_constant__ NormArgs args) {
  constexpr bool kVec = kHeld > 0;
  constexpr int kCount = kVec ? kElems : 1;
  constexpr int kThreads = 32 * kWarps;
  __shared__ float scratch[kWarps];
  warm_arguments<kWarps * kRows>(args, static_cast<int>(threadIdx.x >> 5));
  const int thread = kRows > 1 ? threadIdx.x & 31 : threadIdx.x;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + (kRows > 1 ? threadIdx.x >> 5 : 0);
  if (row >= args.num_rows) {
    return;  // whole warps, and only when rows do not share barriers
  }
  const auto offset = [row](const RowLayout& rows) {
    return kCodes ? row * rows.stride[0] : rows.offset(row);  // rows with codes have one dimension
  };
  const T* x = static_cast<const T*>(args.x) + offset(args.x_rows);
  T* out = static_cast<T*>(args.out) + offset(args.out_rows);
  T* residual = nullptr;
  if constexpr (kKind != NormKind::kPlain) {
    residual = static_cast<T*>(args.residual) + offset(args.residual_rows);
  }
  float weights[kHeld > 0 ? kHeld : 1][kCount];
  if constexpr (kVec) {
    // Where no kernel in front writes them (can_read_ahead), the way of the weights from memory
    // overlaps the end of the one before.
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      const int32_t column = (piece * kThreads + thread) * kElems;
      if (column < args.width) {
        load_weight<T, kVec>(args, column, weights[piece]);
      }
    }
  }
  pdl_launch_dependents();
  pdl_wait();
  float held[kHeld > 0 ? kHeld : 1][kCount];
  float sum = 0.0F;
  if constexpr (kVec) {
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      const int32_t column = (piece * kThreads + thread) * kElems;
      if (column < args.width) {
        load_operand<T, kKind, kVec>(x + column, residual + column, held[piece]);
#pragma unroll
        for (int i = 0; i < kElems; ++i) {
          sum += held[piece][i] * held[piece][i];
        }
      }
    }
  } else {
    for (int32_t column = thread; column < args.width; column += kThreads) {
      load_operand<T, kKind, kVec>(x + column, residual + column, held[0]);
      sum += held[0][0] * held[0][0];
    }
  }
  if constexpr (kWarps == 1) {
    sum = warp_sum(sum);
  } else {
    sum = block_sum<kWarps>(sum, scratch);
  }
  const float scale = rsqrtf(sum / static_cast<float>(args.width) + args.eps);
  float out_scale = 1.0F;
  if (kKind == NormKind::kAddAfter && args.out_scale != nullptr) {
    out_scale = args.is_scale_float ? *static_cast<const float*>(args.out_scale)
                                    : to_float(*static_cast<const T*>(args.out_scale));
  }
  if constexpr (kVec) {
    CodeSource<T> results[kHeld] = {};
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      const int32_t column = (piece * kThreads + thread) * kElems;
      if (column < args.width) {
        results[piece] = finish_piece<T, kKind, kVec>(residual, column, scale, out_scale,
                                                      weights[piece], held[piece]);
        if (!kCodes || !args.is_codes_only) {
          *reinterpret_cast<CodeSource<T>*>(out + column) = results[piece];
        }
      }
    }
    if constexpr (kCodes) {
      write_codes<kWarps>(args.code_rows, row, thread, args.width, results);
    }
  } else {
    for (int32_t column = thread; column < args.width; column += kThreads) {
      load_operand<T, kKind, kVec>(x + column, residual + column, held[0]);
      load_weight<T, kVec>(args, column, weights[0]);
      out[column] =
          finish_piece<T, kKind, kVec>(residual, column, scale, out_scale, weights[0], held[0])
              .values[0];
    }
  }
}

template <typename T, NormKind kKind, int kWarps, int kRows, int kHeld, bool kCodes>
cudaError_t launch_norm(const NormArgs& args, const ExecContext& context) {
  const auto blocks = static_cast<unsigned>(ceil_div(args.num_rows, kRows));
  return launch_dependent(norm_kernel<T, kKind, kWarps, kRows, kHeld, kCodes>,
                          LaunchShape{blocks, 32 * kWarps * kRows, 0, stream_of(context)},
                          can_read_ahead(context), args);
}

/// Of rows that stay in registers.
template <typename T, NormKind kKind, bool kCodes>
cudaError_t launch_held(const NormArgs& args, const ExecContext& context) {
  if (args.width <= 1024) {
    return launch_norm<T, kKind, 1, 8, 4, kCodes>(args, context);
  }
  if (args.width <= 4096) {
    return launch_norm<T, kKind, 8, 1, 2, kCodes>(args, context);
  }
  return launch_norm<T, kKind, 16, 1, 4, kCodes>(args, context);
}

template <typename T, NormKind kKind>
cudaError_t launch_width(const NormArgs& args, bool is_held, const ExecContext& context) {
  if constexpr (kKind != NormKind::kAddAfter) {
    if (args.code_rows.codes != nullptr) {
      return launch_held<T, kKind, true>(args, context);
    }
  }
  return is_held ? launch_held<T, kKind, false>(args, context)
                 : launch_norm<T, kKind, 8, 1, 0, false>(args, context);
}

template <NormKind kKind>
Status run_norm(const char* where, const RmsNormParams& params, const TensorRef& out,
                const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(where));
  const TensorRef& residual = params.residual;
  NormArgs args{};
  args.x = params.x.data;
  args.out = out.data;
  args.residual = residual.present() ? residual.data : nullptr;
  args.weight = params.weight.present() ? params.weight.data : nullptr;
  args.out_scale = params.out_scale.present() ? params.out_scale.data : nullptr;
  args.x_rows = RowLayout::of(params.x);
  args.out_rows = RowLayout::of(out);
  args.num_rows = num_rows(params.x);
  args.width = static_cast<int32_t>(params.x.last());
  args.eps = params.eps;
  args.weight_offset = params.weight_offset;
  args.is_weight_float = params.weight.dtype == DType::kF32;
  args.is_scale_float = params.out_scale.dtype == DType::kF32;
  args.is_codes_only = params.codes_only;
  const int64_t bytes = dtype_bytes(params.x.dtype);
  bool is_vec = args.width % kElems == 0 && is_aligned16(args.x) && is_aligned16(args.out) &&
                is_aligned16(args.weight) && args.x_rows.is_aligned16(bytes) &&
                args.out_rows.is_aligned16(bytes);
  if (residual.present()) {
    args.residual_rows = RowLayout::of(residual);
    is_vec = is_vec && is_aligned16(residual.data) && args.residual_rows.is_aligned16(bytes);
  }
  const bool is_held = is_vec && args.width <= kMaxHeld;
  const bool has_codes = params.codes.present();
  const CodeRows code_rows = has_codes ? CodeRows::of(params.codes, params.scale) : CodeRows{};
  if (is_held && has_codes && code_rows.has_pieces(args.width)) {
    args.code_rows = code_rows;
  }
  DIFFULEX_RETURN_IF_ERROR(dispatch_dtype(where, params.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return cuda_status(where, launch_width<T, kKind>(args, is_held, context));
  }));
  return !has_codes || args.code_rows.codes != nullptr
             ? Status{}
             : cuda::quantize_rows(code_rows_of(out, params.codes, params.scale), context);
}

}  // namespace

Status rms_norm(const RmsNormParams& params, const ExecContext& context) {
  return run_norm<NormKind::kPlain>("diffulex::rms_norm", params, params.out, context);
}

Status add_rms_norm(const RmsNormParams& params, const ExecContext& context) {
  return run_norm<NormKind::kAddBefore>("diffulex::add_rms_norm", params, params.x, context);
}

Status rms_norm_add(const RmsNormParams& params, const ExecContext& context) {
  return run_norm<NormKind::kAddAfter>("diffulex::rms_norm_add", params, params.out, context);
}

namespace {

template <typename T, NormKind kKind, bool kCodes>
Status touch_held(const char* where) {
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, norm_kernel<T, kKind, 1, 8, 4, kCodes>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, norm_kernel<T, kKind, 8, 1, 2, kCodes>));
  return touch_kernel(where, norm_kernel<T, kKind, 16, 1, 4, kCodes>);
}

template <typename T, NormKind kKind>
Status touch_widths(const char* where) {
  DIFFULEX_RETURN_IF_ERROR((touch_held<T, kKind, false>(where)));
  if constexpr (kKind != NormKind::kAddAfter) {
    DIFFULEX_RETURN_IF_ERROR((touch_held<T, kKind, true>(where)));
  }
  return touch_kernel(where, norm_kernel<T, kKind, 8, 1, 0, false>);
}

}  // namespace

Status prepare_norm(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::rms_norm";
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR((touch_widths<T, NormKind::kPlain>(kWhere)));
    DIFFULEX_RETURN_IF_ERROR((touch_widths<T, NormKind::kAddBefore>(kWhere)));
    return touch_widths<T, NormKind::kAddAfter>(kWhere);
  });
}

}  // namespace diffulex::cuda
