// SPDX-License-Identifier: Apache-2.0
//
// quantize_rows and quantize_weight: the same bits as on the CPU, every operation one IEEE
// rounding.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/quant/code_rows.cuh"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarp * kWarps;
/// Lanes that hold a group of 128 columns where rows are aligned.
constexpr int kGroupLanes = static_cast<int>(kQuantGroup) / kCodePiece;
/// Columns of the widest rows with one scale that stay in registers.
constexpr int64_t kMaxHeld = 32768;

struct RowsArgs {
  const void* x;
  void* out;
  float* scale;
  int64_t x_stride;
  int64_t out_stride;
  int64_t scale_stride;
  int64_t num_groups;  // of all rows
  int32_t row_groups;
  int32_t depth;
  int32_t group;
};

/// The largest magnitude of `count` values, which a NaN is not, in every lane.
template <typename T>
__device__ __forceinline__ float largest_of(const T* values, int32_t count, int lane, int lanes) {
  float largest = 0.0F;
  for (int32_t i = lane; i < count; i += lanes) {
    largest = fmaxf(largest, fabsf(to_float(values[i])));
  }
  return warp_max(largest);
}

/// A warp for each group of a row.
template <typename T, typename Code>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ RowsArgs args) {
  pdl_launch_dependents();
  pdl_wait();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (index >= args.num_groups) {
    return;
  }
  const int64_t row = index / args.row_groups;
  const auto group = static_cast<int32_t>(index - row * args.row_groups);
  const int32_t first = group * args.group;
  const int32_t count = min(args.group, args.depth - first);
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride + first;
  auto* out = static_cast<uint8_t*>(args.out) + row * args.out_stride + first;
  float* scale = args.scale + group * args.scale_stride + row;
  const CodeScale code = code_scale(largest_of(x, count, lane, kWarp), Code::kMax);
  if (lane == 0) {
    *scale = code.scale;
  }
  for (int32_t i = lane; i < count; i += kWarp) {
    out[i] = Code::of(to_float(x[i]), code.factor);
  }
}

/// Half a warp for each group of 128 columns of aligned rows.
template <typename T, typename Code>
__global__ void __launch_bounds__(kThreads)
    groups_kernel(const __grid_constant__ RowsArgs args, const __grid_constant__ CodeRows rows) {
  const auto thread = static_cast<int>(threadIdx.x);
  warm_arguments<kWarps>(rows, thread / kWarp);
  const int64_t index = int64_t{blockIdx.x} * (kThreads / kGroupLanes) + thread / kGroupLanes;
  if (index >= args.num_groups) {
    return;
  }
  // 32-bit division where it is enough, which costs a fraction of the other.
  const int64_t row =
      index <= INT32_MAX ? static_cast<int32_t>(index) / args.row_groups : index / args.row_groups;
  const auto group = static_cast<int32_t>(index - row * args.row_groups);
  const int32_t column = group * args.group + thread % kGroupLanes * kCodePiece;
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride + column;
  pdl_launch_dependents();
  pdl_wait();
  CodeSource<T> held = {};
  if (column < args.depth) {
    held = *reinterpret_cast<const CodeSource<T>*>(x);
  }
  const CodeScale code = code_scale(lanes_max<kGroupLanes>(largest_magnitude<T>(held)), Code::kMax);
  if (thread % kGroupLanes == 0) {
    rows.scale[group * rows.scale_stride + row] = code.scale;
  }
  if (column < args.depth) {
    store_codes<Code, T>(rows.codes + row * rows.codes_stride + column, held, code.factor);
  }
}

/// A CTA for each aligned row with one scale.
template <typename T, int kWarpsOfRow, int kHeld>
__global__ void __launch_bounds__(kWarp* kWarpsOfRow)
    whole_kernel(const __grid_constant__ RowsArgs args, const __grid_constant__ CodeRows rows) {
  const auto thread = static_cast<int>(threadIdx.x);
  const T* x = static_cast<const T*>(args.x) + blockIdx.x * args.x_stride;
  pdl_launch_dependents();
  pdl_wait();
  CodeSource<T> held[kHeld] = {};
#pragma unroll
  for (int piece = 0; piece < kHeld; ++piece) {
    const int32_t column = (piece * kWarp * kWarpsOfRow + thread) * kCodePiece;
    if (column < args.depth) {
      held[piece] = *reinterpret_cast<const CodeSource<T>*>(x + column);
    }
  }
  CodeRows whole = rows;
  whole.is_whole = true;  // known to the compiler
  write_codes<kWarpsOfRow>(whole, blockIdx.x, thread, args.depth, held);
}

struct WeightArgs {
  const void* w;
  void* out;
  void* scale;
  int64_t w_stride;
  int64_t out_stride;
  int64_t scale_stride;
  int64_t rows;
  int32_t depth;
  int32_t group;  // of int4
};

/// The largest of what every warp of a CTA holds, in all threads.
__device__ __forceinline__ float largest_of_cta(float largest) {
  __shared__ float parts[kWarps];
  largest = warp_max(largest);
  if (threadIdx.x % kWarp == 0) {
    parts[threadIdx.x / kWarp] = largest;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    largest = fmaxf(largest, parts[warp]);
  }
  return largest;
}

/// A CTA for each row: one scale.
template <typename T, typename Code>
__global__ void __launch_bounds__(kThreads)
    channels_kernel(const __grid_constant__ WeightArgs args) {
  const int64_t row = blockIdx.x;
  const T* w = static_cast<const T*>(args.w) + row * args.w_stride;
  auto* out = static_cast<uint8_t*>(args.out) + row * args.out_stride;
  const auto thread = static_cast<int>(threadIdx.x);
  const CodeScale code =
      code_scale(largest_of_cta(largest_of(w, args.depth, thread, kThreads)), Code::kMax);
  if (thread == 0) {
    static_cast<float*>(args.scale)[row * args.scale_stride] = code.scale;
  }
  for (int32_t i = thread; i < args.depth; i += kThreads) {
    out[i] = Code::of(to_float(w[i]), code.factor);
  }
}

/// A CTA for each block of 128 x 128.
template <typename T>
__global__ void __launch_bounds__(kThreads) blocks_kernel(const __grid_constant__ WeightArgs args) {
  constexpr auto kBlock = static_cast<int32_t>(kQuantBlock);
  const int64_t first = int64_t{blockIdx.y} * kBlock;
  const auto rows = static_cast<int32_t>(args.rows - first < kBlock ? args.rows - first : kBlock);
  const int32_t column = static_cast<int32_t>(blockIdx.x) * kBlock;
  const int32_t columns = min(kBlock, args.depth - column);
  const T* w = static_cast<const T*>(args.w) + first * args.w_stride + column;
  auto* out = static_cast<uint8_t*>(args.out) + first * args.out_stride + column;
  const int lane = static_cast<int>(threadIdx.x) % kBlock;
  const int line = static_cast<int>(threadIdx.x) / kBlock;
  constexpr int kLines = kThreads / kBlock;
  float largest = 0.0F;
  for (int32_t row = line; row < rows && lane < columns; row += kLines) {
    largest = fmaxf(largest, fabsf(to_float(w[row * args.w_stride + lane])));
  }
  const CodeScale code = code_scale(largest_of_cta(largest), kE4m3Max);
  if (threadIdx.x == 0) {
    static_cast<float*>(args.scale)[blockIdx.y * args.scale_stride + blockIdx.x] = code.scale;
  }
  for (int32_t row = line; row < rows && lane < columns; row += kLines) {
    out[row * args.out_stride + lane] =
        E4m3Code::of(to_float(w[row * args.w_stride + lane]), code.factor);
  }
}

/// clamp(rint(value), -8, 7); NaN 0.
__device__ __forceinline__ int32_t nibble_of(float value) {
  return value == value ? static_cast<int32_t>(rintf(fminf(fmaxf(value, -8.0F), 7.0F))) : 0;
}

/// The sum of squares in the order of the columns, as on the CPU.
template <typename T>
__device__ __forceinline__ float squared_error(const T* values, int32_t count, float scale) {
  float sum = 0.0F;
  for (int32_t i = 0; i < count; ++i) {
    const float value = to_float(values[i]);
    const auto nibble = static_cast<float>(nibble_of(__fdiv_rn(value, scale)));
    const float error = __fsub_rn(value, __fmul_rn(nibble, scale));
    sum = __fadd_rn(sum, __fmul_rn(error, error));
  }
  return sum;
}

/// The scale of a group as bfloat16 bits; 0 where all nibbles are those of 0.
template <typename T>
__device__ __forceinline__ uint16_t int4_scale(const T* values, int32_t count) {
  float largest = 0.0F;
  for (int32_t i = 0; i < count; ++i) {
    largest = fmaxf(largest, fabsf(to_float(values[i])));
  }
  if (isinf(largest)) {
    return float_to_bf16(1.0F);
  }
  constexpr float kFactors[] = {1.0F, 0.95F, 0.9F, 0.85F};
  uint16_t best = 0;
  float least = 0.0F;
  for (const float factor : kFactors) {
    const uint16_t bits = float_to_bf16(__fdiv_rn(__fmul_rn(factor, largest), 7.0F));
    if (bf16_to_float(bits) == 0.0F) {
      return 0;
    }
    const float error = squared_error(values, count, bf16_to_float(bits));
    if (best == 0 || error < least) {
      best = bits;
      least = error;
    }
  }
  return best;
}

/// A thread for each group of a row, or for a row whose groups share bytes.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    nibbles_kernel(const __grid_constant__ WeightArgs args) {
  const int32_t num_groups = args.depth / args.group;
  const bool shares_bytes = args.group % 2 != 0;
  const int32_t items = shares_bytes ? 1 : num_groups;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= args.rows * items) {
    return;
  }
  const int64_t row = index / items;
  const auto item = static_cast<int32_t>(index - row * items);
  const T* w = static_cast<const T*>(args.w) + row * args.w_stride;
  auto* out = static_cast<uint8_t*>(args.out) + row * args.out_stride;
  uint32_t byte = 0;
  for (int32_t group = item; group < (shares_bytes ? num_groups : item + 1); ++group) {
    const int32_t first = group * args.group;
    const uint16_t bits = int4_scale(w + first, args.group);
    static_cast<uint16_t*>(args.scale)[group * args.scale_stride + row] =
        bits == 0 ? float_to_bf16(1.0F) : bits;
    for (int32_t k = first; k < first + args.group; ++k) {
      const int32_t nibble =
          bits == 0 ? 0 : nibble_of(__fdiv_rn(to_float(w[k]), bf16_to_float(bits)));
      const auto stored = static_cast<uint32_t>(nibble + kInt4Zero);
      if (k % 2 == 0) {
        byte = stored | (kInt4Zero << 4U);
        if (k + 1 < args.depth) {
          continue;
        }
      } else {
        byte = (byte & 0xFU) | (stored << 4U);
      }
      out[k / 2] = static_cast<uint8_t>(byte);
    }
  }
}

template <typename T, typename Code>
Status launch_rows(const char* where, const QuantizeRowsParams& params,
                   const ExecContext& context) {
  RowsArgs args{};
  args.x = params.x.data;
  args.out = params.out.data;
  args.scale = params.scale.as<float>();
  args.x_stride = params.x.stride[0];
  args.out_stride = params.out.stride[0];
  args.scale_stride = params.scale.stride[0];
  args.depth = static_cast<int32_t>(params.x.size[1]);
  args.group = static_cast<int32_t>(params.group < args.depth ? params.group : args.depth);
  args.row_groups = static_cast<int32_t>(ceil_div(args.depth, args.group));
  args.num_groups = params.x.size[0] * args.row_groups;
  CodeRows rows = CodeRows::of(params.out, params.scale);
  rows.is_whole = args.row_groups == 1;
  const bool is_wide =
      rows.has_pieces(args.depth) && is_aligned16(args.x) && args.x_stride % kCodePiece == 0;
  LaunchShape shape{static_cast<unsigned>(ceil_div(args.num_groups, kWarps)), kThreads, 0,
                    stream_of(context)};
  const bool is_dependent = can_launch_dependent(context.device_index);
  if (is_wide && params.group == kQuantGroup) {
    shape.grid = static_cast<unsigned>(ceil_div(args.num_groups, kThreads / kGroupLanes));
    return cuda_status(where,
                       launch_dependent(groups_kernel<T, Code>, shape, is_dependent, args, rows));
  }
  if (!is_wide || !rows.is_whole || args.depth > kMaxHeld) {
    return cuda_status(where, launch_dependent(rows_kernel<T, Code>, shape, is_dependent, args));
  }
  shape.grid = static_cast<unsigned>(params.x.size[0]);
  shape.block = kWarp * (args.depth <= kMaxHeld / 4 ? 8 : 16);
  return cuda_status(
      where, args.depth <= kMaxHeld / 4
                 ? launch_dependent(whole_kernel<T, 8, 4>, shape, is_dependent, args, rows)
                 : launch_dependent(whole_kernel<T, 16, 8>, shape, is_dependent, args, rows));
}

template <typename T>
void launch_weight(const QuantizeWeightParams& params, const WeightArgs& args,
                   cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(args.rows);
  switch (params.scheme) {
    case WeightScheme::kFp8:
      channels_kernel<T, E4m3Code><<<rows, kThreads, 0, stream>>>(args);
      return;
    case WeightScheme::kInt8:
      channels_kernel<T, Int8Code><<<rows, kThreads, 0, stream>>>(args);
      return;
    case WeightScheme::kFp8Block: {
      const dim3 grid(static_cast<unsigned>(ceil_div(args.depth, kQuantBlock)),
                      static_cast<unsigned>(ceil_div(args.rows, kQuantBlock)));
      blocks_kernel<T><<<grid, kThreads, 0, stream>>>(args);
      return;
    }
    case WeightScheme::kInt4: {
      const int64_t items = args.rows * (args.group % 2 != 0 ? 1 : args.depth / args.group);
      nibbles_kernel<T>
          <<<static_cast<unsigned>(ceil_div(items, kThreads)), kThreads, 0, stream>>>(args);
      return;
    }
  }
}

}  // namespace

Status quantize_rows(const QuantizeRowsParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::quantize_rows";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  return dispatch_dtype(kWhere, params.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return params.out.dtype == DType::kI8 ? launch_rows<T, Int8Code>(kWhere, params, context)
                                          : launch_rows<T, E4m3Code>(kWhere, params, context);
  });
}

Status quantize_weight(const QuantizeWeightParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::quantize_weight";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  WeightArgs args{};
  args.w = params.w.data;
  args.out = params.out.data;
  args.scale = params.scale.data;
  args.w_stride = params.w.stride[0];
  args.out_stride = params.out.stride[0];
  args.scale_stride = params.scale.stride[0];
  args.rows = params.w.size[0];
  args.depth = static_cast<int32_t>(params.w.size[1]);
  args.group = params.group == 0 ? args.depth : params.group;
  return dispatch_dtype(kWhere, params.w.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_weight<T>(params, args, stream_of(context));
    return check_launch(kWhere);
  });
}

Status prepare_quantize(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::quantize_rows";
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, rows_kernel<T, E4m3Code>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, rows_kernel<T, Int8Code>));
    DIFFULEX_RETURN_IF_ERROR((touch_kernel(kWhere, groups_kernel<T, E4m3Code>)));
    DIFFULEX_RETURN_IF_ERROR((touch_kernel(kWhere, groups_kernel<T, Int8Code>)));
    DIFFULEX_RETURN_IF_ERROR((touch_kernel(kWhere, whole_kernel<T, 8, 4>)));
    return touch_kernel(kWhere, whole_kernel<T, 16, 8>);
  });
}

}  // namespace diffulex::cuda
