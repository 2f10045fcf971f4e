// SPDX-License-Identifier: Apache-2.0
//
// soft_probabilities, and soft_embedding in three kernels per call (see soft_embedding_config.h):
// probabilities of a chunk of columns in the dtype of the table, their product with the table rows
// of the chunk added to fp32 sums (tensor cores for 16-bit tables, plain tiles otherwise), and the
// sum over splits.
#include <algorithm>
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/merge/soft_embedding_config.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::soft_embedding";
constexpr float kMaxFloat = 3.402823466e+38F;

struct ProbabilityArgs {
  const void* logits;  // [R, V], at the first column of the chunk
  int64_t logits_stride;
  const float* lse;  // [R]
  int64_t lse_stride;
  const float* inv_temperature;  // [R] or null
  const uint8_t* row_valid;      // [R] or null
  void* out;                     // [R, chunk_columns]
  int64_t chunk_columns;         // row stride of `out`
  int64_t columns;               // to write
  int64_t num_columns;           // of them that exist and are below the vocabulary limit
  uint32_t row_ctas;             // CTAs of a row
  float softcap;
};

constexpr int kProbabilityThreads = 256;
constexpr int kPerThread = 8;

/// One element: sanitised, capped, tempered, normalised.
__device__ __forceinline__ float probability_of(float logit, float softcap, float factor,
                                                float lse) {
  if (!(fabsf(logit) <= kMaxFloat)) {
    if (!(logit > 0.0F)) {
      return 0.0F;  // NaN or -inf
    }
    logit = kMaxFloat;
  }
  float z = softcap > 0.0F ? softcap * tanhf(logit / softcap) : logit;
  z = fminf(fmaxf(z * factor, -kMaxFloat), kMaxFloat);
  return expf(z - lse);
}

/// kPerThread neighbours a thread where rows are aligned, kPerThread strides apart elsewhere.
template <typename Logit, typename T, bool kIsWide>
__global__ void __launch_bounds__(kProbabilityThreads)
    probability_kernel(const __grid_constant__ ProbabilityArgs args) {
  constexpr int kStep = kIsWide ? 1 : kProbabilityThreads;
  const int64_t row = blockIdx.x / args.row_ctas;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x % args.row_ctas) * kProbabilityThreads * kPerThread +
      threadIdx.x * (kIsWide ? kPerThread : 1);
  if (first >= args.columns) {
    return;
  }
  T* out = static_cast<T*>(args.out) + row * args.chunk_columns + first;
  const bool is_valid = args.row_valid == nullptr || args.row_valid[row] != 0;
  float factor = args.inv_temperature == nullptr ? 1.0F : args.inv_temperature[row];
  factor = factor == 0.0F ? 1.0F : factor;
  const float lse = args.lse[row * args.lse_stride];
  const Logit* logits = static_cast<const Logit*>(args.logits) + row * args.logits_stride + first;
  const int64_t count = is_valid ? args.num_columns - first : 0;
  float values[kPerThread] = {};
  if (kIsWide && count >= kPerThread) {
    load_floats<kPerThread, true>(logits, values);
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      values[i] = i * kStep < count ? to_float(logits[i * kStep]) : 0.0F;
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    values[i] = i * kStep < count ? probability_of(values[i], args.softcap, factor, lse) : 0.0F;
  }
  if constexpr (kIsWide) {
    store_floats<kPerThread, true>(out, values);
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (first + i * kStep < args.columns) {
        out[i * kStep] = from_float<T>(values[i]);
      }
    }
  }
}

struct ProductArgs {
  const void* probabilities;  // [R, chunk_columns]
  const void* table;          // [columns, H], at the first row of the chunk
  float* sums;                // [splits, R, H]
  int64_t chunk_columns;
  int64_t table_stride;
  int64_t num_table_rows;  // rows of the chunk that exist
  int32_t num_rows;        // R
  int32_t width;           // H
  int32_t stages_per_split;
  int32_t num_stages;
  bool accumulate;
};

constexpr int kTileRows = static_cast<int>(kSoftTileRows);
constexpr int kTileColumns = static_cast<int>(kSoftTileColumns);
constexpr int kTileDepth = static_cast<int>(kSoftTileDepth);
constexpr int kPipeline = 3;
constexpr int kProductThreads = 256;
constexpr int kStageBytes = (kTileRows + kTileColumns) * kTileDepth * 2;

/// 16-byte chunk of a probability tile row (4 per row): eight rows of one chunk hit all banks.
__device__ __forceinline__ int probability_offset(int row, int chunk) {
  return (row * 4 + (chunk ^ ((row >> 1) & 3))) * 16;
}

/// 16-byte chunk of a table tile row (16 per row).
__device__ __forceinline__ int table_offset(int row, int chunk) {
  return (row * 16 + (chunk ^ (row & 7))) * 16;
}

/// Starts the copies of one stage; what lies outside the matrices becomes 0.
template <typename T>
__device__ __forceinline__ void load_stage(const ProductArgs& args, uint32_t shared, int32_t row0,
                                           int32_t column0, int64_t depth0) {
  const T* probabilities = static_cast<const T*>(args.probabilities);
  const T* table = static_cast<const T*>(args.table);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int index = part * kProductThreads + static_cast<int>(threadIdx.x);
    const int row = index >> 2;
    const int chunk = index & 3;
    const bool is_read = row0 + row < args.num_rows;
    const int64_t offset =
        is_read ? static_cast<int64_t>(row0 + row) * args.chunk_columns + depth0 + chunk * 8 : 0;
    ptx::cp_async16(shared + probability_offset(row, chunk), probabilities + offset, is_read);
  }
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int index = part * kProductThreads + static_cast<int>(threadIdx.x);
    const int row = index >> 4;
    const int chunk = index & 15;
    const bool is_read = depth0 + row < args.num_table_rows && column0 + chunk * 8 < args.width;
    const int64_t offset = is_read ? (depth0 + row) * args.table_stride + column0 + chunk * 8 : 0;
    ptx::cp_async16(shared + kTileRows * kTileDepth * 2 + table_offset(row, chunk), table + offset,
                    is_read);
  }
}

/// 16-bit tables with 16-byte aligned rows and H % 8 == 0. Eight warps, each 64 rows x 32 columns.
template <typename T>
__global__ void __launch_bounds__(kProductThreads, 2)
    product_mma_kernel(const __grid_constant__ ProductArgs args) {
  __shared__ __align__(128) unsigned char stages[kPipeline * kStageBytes];
  const uint32_t shared = ptx::smem_address(stages);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int warp_row = (warp & 1) * 64;
  const int warp_column = (warp >> 1) * 32;
  const int32_t row0 = static_cast<int32_t>(blockIdx.y) * kTileRows;
  const int32_t column0 = static_cast<int32_t>(blockIdx.x) * kTileColumns;
  const int32_t first_stage = static_cast<int32_t>(blockIdx.z) * args.stages_per_split;
  const int32_t last_stage = min(first_stage + args.stages_per_split, args.num_stages);
  float sums[4][4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sums[i][j][k] = 0.0F;
      }
    }
  }
#pragma unroll
  for (int ahead = 0; ahead < kPipeline - 1; ++ahead) {
    if (first_stage + ahead < last_stage) {
      load_stage<T>(args, shared + ahead * kStageBytes, row0, column0,
                    static_cast<int64_t>(first_stage + ahead) * kTileDepth);
    }
    ptx::cp_async_commit();
  }
  for (int32_t stage = first_stage; stage < last_stage; ++stage) {
    ptx::cp_async_wait<kPipeline - 2>();
    __syncthreads();
    // Overwrites the stage that every warp has left before the barrier.
    const int32_t next = stage + kPipeline - 1;
    if (next < last_stage) {
      load_stage<T>(args, shared + (next - first_stage) % kPipeline * kStageBytes, row0, column0,
                    static_cast<int64_t>(next) * kTileDepth);
    }
    ptx::cp_async_commit();
    const uint32_t rows = shared + (stage - first_stage) % kPipeline * kStageBytes;
    const uint32_t table = rows + kTileRows * kTileDepth * 2;
#pragma unroll
    for (int step = 0; step < kTileDepth / 16; ++step) {
      uint32_t a[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::ldmatrix_x4(a[i], rows + probability_offset(warp_row + i * 16 + (lane & 15),
                                                         step * 2 + (lane >> 4)));
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, table + table_offset(step * 16 + (lane & 15),
                                                       warp_column / 8 + pair * 2 + (lane >> 4)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ptx::mma_16816<T>(sums[i][2 * pair], a[i], b[0], b[1]);
          ptx::mma_16816<T>(sums[i][2 * pair + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
  float* out = args.sums + static_cast<int64_t>(blockIdx.z) * args.num_rows * args.width;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = row0 + warp_row + i * 16 + half * 8 + (lane >> 2);
      if (row >= args.num_rows) {
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t column = column0 + warp_column + j * 8 + (lane & 3) * 2;
        if (column < args.width) {  // H % 8 == 0: both columns exist
          auto* target =
              reinterpret_cast<float2*>(out + static_cast<int64_t>(row) * args.width + column);
          float2 value = make_float2(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
          if (args.accumulate) {
            const float2 old = *target;
            value.x += old.x;
            value.y += old.y;
          }
          *target = value;
        }
      }
    }
  }
}

constexpr int kPlainDepth = 16;

/// Copies kPlainDepth columns of probabilities and rows of the table to shared memory, widened;
/// what lies outside the matrices becomes 0.
template <typename T>
__device__ __forceinline__ void load_plain_tiles(const ProductArgs& args, int32_t row0,
                                                 int32_t column0, int64_t depth0,
                                                 float (&rows)[kPlainDepth][kTileRows + 1],
                                                 float (&table)[kPlainDepth][kTileColumns]) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int index = thread; index < kTileRows * kPlainDepth; index += kProductThreads) {
    const int row = index / kPlainDepth;
    const int depth = index % kPlainDepth;
    rows[depth][row] =
        row0 + row < args.num_rows
            ? to_float(static_cast<const T*>(
                  args.probabilities)[(row0 + row) * args.chunk_columns + depth0 + depth])
            : 0.0F;
  }
  for (int index = thread; index < kTileColumns * kPlainDepth; index += kProductThreads) {
    const int depth = index / kTileColumns;
    const int column = index % kTileColumns;
    const bool exists = depth0 + depth < args.num_table_rows && column0 + column < args.width;
    table[depth][column] =
        exists ? to_float(static_cast<const T*>(
                     args.table)[(depth0 + depth) * args.table_stride + column0 + column])
               : 0.0F;
  }
}

/// Any table: 16 x 16 threads, each 8 rows x 8 columns.
template <typename T>
__global__ void __launch_bounds__(kProductThreads)
    product_plain_kernel(const __grid_constant__ ProductArgs args) {
  __shared__ float rows[kPlainDepth][kTileRows + 1];
  __shared__ float table[kPlainDepth][kTileColumns];
  const int thread = static_cast<int>(threadIdx.x);
  const int thread_row = thread >> 4;
  const int thread_column = thread & 15;
  const int32_t row0 = static_cast<int32_t>(blockIdx.y) * kTileRows;
  const int32_t column0 = static_cast<int32_t>(blockIdx.x) * kTileColumns;
  const int64_t first = static_cast<int64_t>(blockIdx.z) * args.stages_per_split * kTileDepth;
  const int64_t last = min(first + static_cast<int64_t>(args.stages_per_split) * kTileDepth,
                           static_cast<int64_t>(args.num_stages) * kTileDepth);
  float sums[8][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sums[i][j] = 0.0F;
    }
  }
  for (int64_t depth0 = first; depth0 < last; depth0 += kPlainDepth) {
    load_plain_tiles<T>(args, row0, column0, depth0, rows, table);
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kPlainDepth; ++depth) {
      float a[8];
      float b[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        a[i] = rows[depth][thread_row + i * 16];
        b[i] = table[depth][thread_column + i * 16];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sums[i][j] += a[i] * b[j];
        }
      }
    }
    __syncthreads();
  }
  float* out = args.sums + static_cast<int64_t>(blockIdx.z) * args.num_rows * args.width;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int32_t row = row0 + thread_row + i * 16;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int32_t column = column0 + thread_column + j * 16;
      if (row < args.num_rows && column < args.width) {
        float* target = out + static_cast<int64_t>(row) * args.width + column;
        *target = args.accumulate ? *target + sums[i][j] : sums[i][j];
      }
    }
  }
}

struct FinishArgs {
  const float* sums;  // [splits, R, H]
  const uint8_t* row_valid;
  float* out;
  int64_t out_stride;
  int64_t num_rows;
  int32_t width;
  int32_t num_splits;
  uint32_t row_ctas;  // CTAs of a row
  float normalizer;
};

__global__ void __launch_bounds__(kProductThreads)
    finish_kernel(const __grid_constant__ FinishArgs args) {
  const int64_t row = blockIdx.x / args.row_ctas;
  const int32_t column =
      static_cast<int32_t>(blockIdx.x % args.row_ctas) * kProductThreads + threadIdx.x;
  if (column >= args.width) {
    return;
  }
  float sum = 0.0F;
  if (args.row_valid == nullptr || args.row_valid[row] != 0) {
    for (int32_t split = 0; split < args.num_splits; ++split) {
      sum += args.sums[(split * args.num_rows + row) * args.width + column];
    }
    sum *= args.normalizer;
  }
  args.out[row * args.out_stride + column] = sum;
}

/// The products count row tiles along y, whose extent is below 2^16; the other kernels have the
/// CTAs of all rows along x, those of a row next to each other.
constexpr int64_t kMaxRows = int64_t{65535} * kTileRows;
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

/// `count` CTAs along x, where a device takes that many.
Status check_grid(int64_t count, const char* where = kWhere) {
  if (count <= kMaxGrid) {
    return Status::ok_status();
  }
  return make_error(StatusCode::kUnsupported, where, ": logits: expected at most ", kMaxGrid,
                    " pieces of rows on cuda, got ", count);
}

template <typename T>
Status launch_probabilities(ProbabilityArgs args, DType logit_dtype, int64_t num_rows,
                            cudaStream_t stream, const char* where = kWhere) {
  const int64_t row_ctas = ceil_div(args.columns, int64_t{kProbabilityThreads} * kPerThread);
  DIFFULEX_RETURN_IF_ERROR(check_grid(num_rows * row_ctas, where));
  args.row_ctas = static_cast<uint32_t>(row_ctas);
  const auto grid = static_cast<unsigned>(num_rows * row_ctas);
  return dispatch_dtype(where, logit_dtype, [&](auto tag) {
    using Logit = typename decltype(tag)::type;
    const bool is_wide = args.columns % kPerThread == 0 && args.chunk_columns % kPerThread == 0 &&
                         args.logits_stride % kPerThread == 0 && is_aligned16(args.logits) &&
                         is_aligned16(args.out);
    auto* kernel =
        is_wide ? probability_kernel<Logit, T, true> : probability_kernel<Logit, T, false>;
    kernel<<<grid, kProbabilityThreads, 0, stream>>>(args);
    return check_launch(where);
  });
}

template <typename T>
Status launch_product(const ProductArgs& args, int32_t num_splits, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(args.width, kTileColumns)),
                  static_cast<unsigned>(ceil_div(args.num_rows, kTileRows)),
                  static_cast<unsigned>(num_splits));
  if constexpr (sizeof(T) == 2) {
    if (args.width % 8 == 0 && is_aligned16(args.table) && args.table_stride % 8 == 0) {
      product_mma_kernel<T><<<grid, kProductThreads, 0, stream>>>(args);
      return check_launch(kWhere);
    }
  }
  product_plain_kernel<T><<<grid, kProductThreads, 0, stream>>>(args);
  return check_launch(kWhere);
}

/// What is the same in every chunk of the vocabulary.
ProbabilityArgs probability_args(const SoftmaxRows& rows) {
  ProbabilityArgs probability{};
  probability.logits = rows.logits.data;
  probability.logits_stride = rows.logits.stride[0];
  probability.lse = rows.lse.as<const float>();
  probability.lse_stride = rows.lse.stride[0];
  probability.inv_temperature =
      rows.inv_temperature.present() ? rows.inv_temperature.as<const float>() : nullptr;
  probability.row_valid = rows.row_valid.present() ? rows.row_valid.as<const uint8_t>() : nullptr;
  probability.softcap = rows.softcap;
  return probability;
}

/// Columns below the vocabulary limit.
int64_t num_limited(const SoftmaxRows& rows) {
  const int64_t vocab = rows.logits.size[1];
  return rows.vocab_limit < 0 ? vocab
                              : std::clamp<int64_t>(rows.vocab_limit - rows.vocab_start, 0, vocab);
}

template <typename T>
Status run_chunks(const SoftEmbeddingParams& params, const SoftEmbeddingPlan& plan,
                  const ExecContext& context) {
  const cudaStream_t stream = stream_of(context);
  const int64_t num_rows = params.out.size[0];
  const int64_t vocab = params.logits.size[1];
  const int64_t limit = num_limited(params);
  auto* workspace = static_cast<char*>(context.workspace);
  ProbabilityArgs probability = probability_args(params);
  probability.out = workspace;
  probability.chunk_columns = plan.chunk_columns;
  ProductArgs product{};
  product.probabilities = workspace;
  product.sums = reinterpret_cast<float*>(workspace + plan.probability_bytes);
  product.chunk_columns = plan.chunk_columns;
  product.table_stride = params.embedding.stride[0];
  product.num_rows = static_cast<int32_t>(num_rows);
  product.width = static_cast<int32_t>(params.out.size[1]);
  for (int64_t start = 0; start < vocab; start += plan.chunk_columns) {
    // The last chunk may be shorter; whole stages are computed, columns past the end are 0.
    const int64_t stages =
        ceil_div(vocab - start < plan.chunk_columns ? vocab - start : plan.chunk_columns,
                 int64_t{kTileDepth});
    probability.columns = stages * kTileDepth;
    product.num_stages = static_cast<int32_t>(stages);
    product.stages_per_split = static_cast<int32_t>(ceil_div(stages, plan.num_splits));
    probability.logits =
        static_cast<const char*>(params.logits.data) + start * dtype_bytes(params.logits.dtype);
    probability.num_columns = limit - start;
    DIFFULEX_RETURN_IF_ERROR(
        launch_probabilities<T>(probability, params.logits.dtype, num_rows, stream));
    product.table = static_cast<const T*>(params.embedding.data) + start * product.table_stride;
    product.num_table_rows = vocab - start;
    product.accumulate = start > 0;
    DIFFULEX_RETURN_IF_ERROR(launch_product<T>(product, plan.num_splits, stream));
  }
  FinishArgs finish{};
  finish.sums = product.sums;
  finish.row_valid = probability.row_valid;
  finish.out = params.out.as<float>();
  finish.out_stride = params.out.stride[0];
  finish.num_rows = num_rows;
  finish.width = product.width;
  finish.num_splits = plan.num_splits;
  finish.normalizer = params.normalizer;
  const int64_t row_ctas = ceil_div(finish.width, kProductThreads);
  DIFFULEX_RETURN_IF_ERROR(check_grid(num_rows * row_ctas));
  finish.row_ctas = static_cast<uint32_t>(row_ctas);
  finish_kernel<<<static_cast<unsigned>(num_rows * row_ctas), kProductThreads, 0, stream>>>(finish);
  return check_launch(kWhere);
}

}  // namespace

Status soft_probabilities(const SoftProbabilitiesParams& params, const ExecContext& context) {
  constexpr const char* kOp = "diffulex::soft_probabilities";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kOp));
  ProbabilityArgs probability = probability_args(params);
  probability.out = params.out.data;
  probability.chunk_columns = params.out.stride[0];
  probability.columns = params.out.size[1];
  probability.num_columns = num_limited(params);
  return dispatch_dtype(kOp, params.out.dtype, [&](auto tag) {
    return launch_probabilities<typename decltype(tag)::type>(
        probability, params.logits.dtype, params.out.size[0], stream_of(context), kOp);
  });
}

Status soft_embedding(const SoftEmbeddingParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const int64_t num_rows = params.out.size[0];
  if (num_rows > kMaxRows) {
    return make_error(StatusCode::kUnsupported, kWhere, ": logits: expected at most ", kMaxRows,
                      " rows on cuda, got ", num_rows);
  }
  const SoftEmbeddingPlan plan =
      soft_embedding_plan(num_rows, params.logits.size[1], params.out.size[1],
                          params.embedding.dtype, context.batch_invariant);
  return dispatch_dtype(kWhere, params.embedding.dtype, [&](auto tag) {
    return run_chunks<typename decltype(tag)::type>(params, plan, context);
  });
}

Status prepare_soft_embedding(const ExecContext& /*context*/) {
  DIFFULEX_RETURN_IF_ERROR(for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(for_each_dtype(kWhere, [](auto logit) {
      using Logit = typename decltype(logit)::type;
      DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, probability_kernel<Logit, T, true>));
      return touch_kernel(kWhere, probability_kernel<Logit, T, false>);
    }));
    if constexpr (sizeof(T) == 2) {
      DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, product_mma_kernel<T>));
    }
    return touch_kernel(kWhere, product_plain_kernel<T>);
  }));
  return touch_kernel(kWhere, finish_kernel);
}

}  // namespace diffulex::cuda
