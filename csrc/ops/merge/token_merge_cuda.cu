// SPDX-License-Identifier: Apache-2.0
//
// token_merge_embed and its two halves for vocabulary shards. One CTA per row; rows without a
// descriptor return at once. Every table row is read once: sums stay in registers, norms are
// reduced per table row in a tree that depends on the CTA size alone.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr float kNormEpsilon = 1e-6F;
constexpr int kMaxTerms = static_cast<int>(kMergeMaxTopK) + 1;  // and the mask token

struct MergeArgs {
  const void* embedding;  // [rows, H]
  int64_t embedding_stride;
  int64_t table_rows;
  int64_t vocab_start;
  const uint8_t* merge_mask;  // [T]
  const int64_t* ids;         // [T, K]
  int64_t ids_stride;
  const float* probs;  // [T, K]
  int64_t probs_stride;
  const float* residual;  // [T]
  void* hidden;           // [T, H]; null: write `partial` instead
  int64_t hidden_stride;
  float* partial;  // [T, H + 1]
  int64_t partial_stride;
  int64_t mask_token_id;
  int32_t top_k;
  int32_t width;  // H
  bool is_smooth;
  bool renormalize;
  float weight;
};

template <typename T, int kWarps, int kCount, int kHeld>
struct MergeRow final {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kVec = kCount > 1;
  float held[kHeld][kCount];

  /// Runs body(piece, column) for the pieces of this thread.
  template <typename Body>
  static __device__ __forceinline__ void for_pieces(int32_t width, Body&& body) {
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      const int32_t column =
          (piece * kThreads + static_cast<int32_t>(threadIdx.x)) * static_cast<int32_t>(kCount);
      if (column < width) {
        body(piece, column);
      }
    }
  }

  /// held += probability * row; returns this thread's part of the squared norm of the row.
  __device__ __forceinline__ float add(const T* row, float probability, int32_t width) {
    float squares = 0.0F;
    for_pieces(width, [&](int piece, int32_t column) {
      float values[kCount];
      load_floats<kCount, kVec>(row + column, values);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        held[piece][i] += probability * values[i];
        squares += values[i] * values[i];
      }
    });
    return squares;
  }

  /// Writes the row into row `row` of the hidden states, or adds it; `scratch` has an entry a warp.
  __device__ __forceinline__ void finish(const MergeArgs& args, int64_t row, float norm_sum,
                                         float* scratch) {
    float scale = 1.0F;
    if (args.renormalize && !args.is_smooth) {
      float squares = 0.0F;
      for_pieces(args.width, [&](int piece, int32_t /*column*/) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          squares += held[piece][i] * held[piece][i];
        }
      });
      scale = norm_sum / (sqrtf(block_sum<kWarps>(squares, scratch)) + kNormEpsilon);
    }
    T* hidden = static_cast<T*>(args.hidden) + row * args.hidden_stride;
    for_pieces(args.width, [&](int piece, int32_t column) {
      float values[kCount];
      if (args.is_smooth) {
        load_floats<kCount, kVec>(hidden + column, values);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] =
            args.is_smooth ? values[i] + args.weight * held[piece][i] : held[piece][i] * scale;
      }
      store_floats<kCount, kVec>(hidden + column, values);
    });
  }
};

/// sum p_k |E[i_k]| + r |E[M]| from the squared norms of the terms, a part for each warp.
template <int kWarps, typename Probability>
__device__ __forceinline__ float sum_norms(const float (&norms)[kMaxTerms][kWarps], int terms,
                                           const Probability& probability_of) {
  float norm_sum = 0.0F;
  for (int term = 0; term < terms; ++term) {
    float squares = 0.0F;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      squares += norms[term][warp];
    }
    // Skipped terms have left 0 here; their probability must not be looked at.
    norm_sum += squares == 0.0F ? 0.0F : probability_of(term) * sqrtf(squares);
  }
  return norm_sum;
}

/// kWarps warps share a row; a thread holds kHeld pieces of kCount columns.
template <typename T, int kWarps, int kCount, int kHeld>
__global__ void __launch_bounds__(32 * kWarps)
    merge_kernel(const __grid_constant__ MergeArgs args) {
  using Row = MergeRow<T, kWarps, kCount, kHeld>;
  const int64_t row = blockIdx.x;
  float* partial = args.partial == nullptr ? nullptr : args.partial + row * args.partial_stride;
  if (args.merge_mask[row] == 0) {
    if (partial != nullptr) {
      for (int32_t column = threadIdx.x; column <= args.width; column += Row::kThreads) {
        partial[column] = 0.0F;
      }
    }
    return;
  }
  __shared__ float norms[kMaxTerms][kWarps];
  __shared__ float scratch[kWarps];
  Row sums{};
  const int terms = args.top_k + (args.is_smooth ? 0 : 1);
  const auto probability_of = [&](int term) {
    return term < args.top_k ? args.probs[row * args.probs_stride + term] : args.residual[row];
  };
  const auto table_row_of = [&](int term) -> int64_t {
    const int64_t id =
        term < args.top_k ? args.ids[row * args.ids_stride + term] : args.mask_token_id;
    const int64_t local = id - args.vocab_start;
    return id < 0 || local < 0 || local >= args.table_rows ? -1 : local;
  };
  for (int term = 0; term < terms; ++term) {
    const float probability = probability_of(term);
    const int64_t local = table_row_of(term);
    float squares = 0.0F;
    if (local >= 0 && probability != 0.0F) {
      squares = sums.add(static_cast<const T*>(args.embedding) + local * args.embedding_stride,
                         probability, args.width);
    }
    squares = warp_sum(squares);
    if ((threadIdx.x & 31) == 0) {
      norms[term][threadIdx.x >> 5] = squares;
    }
  }
  __syncthreads();
  const float norm_sum = sum_norms(norms, terms, probability_of);
  if (partial != nullptr) {
    Row::for_pieces(args.width, [&](int piece, int32_t column) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        partial[column + i] = sums.held[piece][i];
      }
    });
    if (threadIdx.x == 0) {
      partial[args.width] = norm_sum;
    }
    return;
  }
  sums.finish(args, row, norm_sum, scratch);
}

struct FinalizeArgs {
  const float* partial;  // [T, H + 1]
  int64_t partial_stride;
  const uint8_t* merge_mask;  // [T]
  void* hidden;               // [T, H]
  int64_t hidden_stride;
  int32_t width;
  bool is_smooth;
  bool renormalize;
  float weight;
};

constexpr int kFinalizeWarps = 8;

template <typename T>
__global__ void __launch_bounds__(32 * kFinalizeWarps)
    finalize_kernel(const __grid_constant__ FinalizeArgs args) {
  constexpr int kThreads = 32 * kFinalizeWarps;
  const int64_t row = blockIdx.x;
  if (args.merge_mask[row] == 0) {
    return;
  }
  __shared__ float scratch[kFinalizeWarps];
  const float* partial = args.partial + row * args.partial_stride;
  T* hidden = static_cast<T*>(args.hidden) + row * args.hidden_stride;
  float scale = 1.0F;
  if (args.renormalize && !args.is_smooth) {
    float squares = 0.0F;
    for (int32_t column = threadIdx.x; column < args.width; column += kThreads) {
      squares += partial[column] * partial[column];
    }
    scale =
        partial[args.width] / (sqrtf(block_sum<kFinalizeWarps>(squares, scratch)) + kNormEpsilon);
  }
  for (int32_t column = threadIdx.x; column < args.width; column += kThreads) {
    const float value = args.is_smooth ? to_float(hidden[column]) + args.weight * partial[column]
                                       : partial[column] * scale;
    hidden[column] = from_float<T>(value);
  }
}

constexpr int kVecElems = 8;
constexpr int32_t kVecWidth = 256 * kVecElems * 4;  // columns the vector kernel holds
constexpr int32_t kMaxWidth = 1024 * 32;            // columns the element-wise kernel holds

template <typename T>
void launch_merge(const MergeArgs& args, int64_t num_rows, bool is_vec, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(num_rows);
  if (is_vec && args.width <= kVecWidth) {
    merge_kernel<T, 8, kVecElems, 4><<<blocks, 256, 0, stream>>>(args);
  } else {
    merge_kernel<T, 32, 1, 32><<<blocks, 1024, 0, stream>>>(args);
  }
}

/// Fills the descriptor part shared by both callers.
template <typename Params>
MergeArgs merge_args(const Params& params) {
  MergeArgs args{};
  args.embedding = params.embedding.data;
  args.embedding_stride = params.embedding.stride[0];
  args.table_rows = params.embedding.size[0];
  args.merge_mask = params.merge_mask.template as<const uint8_t>();
  args.ids = params.topk_ids.template as<const int64_t>();
  args.ids_stride = params.topk_ids.stride[0];
  args.probs = params.topk_probs.template as<const float>();
  args.probs_stride = params.topk_probs.stride[0];
  args.residual = params.residual_probs.template as<const float>();
  args.mask_token_id = params.mask_token_id;
  args.top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  args.width = static_cast<int32_t>(params.embedding.size[1]);
  args.is_smooth = params.merge_kind == MergeKind::kIterSmoothTopk;
  return args;
}

Status check_width(const char* where, const char* argument, int64_t width) {
  if (width > kMaxWidth) {
    return make_error(StatusCode::kUnsupported, where, ": ", argument, ": expected at most ",
                      kMaxWidth, " columns on cuda, got ", width);
  }
  return Status::ok_status();
}

bool are_rows_aligned(const TensorRef& tensor) {
  return is_aligned16(tensor.data) && tensor.stride[0] * dtype_bytes(tensor.dtype) % 16 == 0;
}

Status run_merge(const char* where, const MergeArgs& args, DType dtype, int64_t num_rows,
                 bool is_vec, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(dispatch_dtype(where, dtype, [&](auto tag) {
    launch_merge<typename decltype(tag)::type>(args, num_rows, is_vec, stream_of(context));
    return Status::ok_status();
  }));
  return check_launch(where);
}

}  // namespace

Status token_merge_embed(const TokenMergeEmbedParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::token_merge_embed";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  DIFFULEX_RETURN_IF_ERROR(check_width(kWhere, "hidden", params.hidden.size[1]));
  // Ids of rows without a descriptor are checked too: the engine fills them with the mask token.
  DIFFULEX_RETURN_IF_ERROR(check_range(kWhere, "topk_ids", params.topk_ids, INT64_MIN,
                                       params.embedding.size[0], context));
  MergeArgs args = merge_args(params);
  args.hidden = params.hidden.data;
  args.hidden_stride = params.hidden.stride[0];
  args.renormalize = params.renormalize;
  args.weight = params.weight;
  const bool is_vec = args.width % kVecElems == 0 && are_rows_aligned(params.embedding) &&
                      are_rows_aligned(params.hidden);
  return run_merge(kWhere, args, params.hidden.dtype, params.hidden.size[0], is_vec, context);
}

Status token_merge_partial(const TokenMergePartialParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::token_merge_partial";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  DIFFULEX_RETURN_IF_ERROR(check_width(kWhere, "embedding", params.embedding.size[1]));
  MergeArgs args = merge_args(params);
  args.vocab_start = params.vocab_start;
  args.partial = params.partial.as<float>();
  args.partial_stride = params.partial.stride[0];
  const bool is_vec = args.width % kVecElems == 0 && are_rows_aligned(params.embedding);
  return run_merge(kWhere, args, params.embedding.dtype, params.partial.size[0], is_vec, context);
}

Status token_merge_finalize(const TokenMergeFinalizeParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::token_merge_finalize";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  FinalizeArgs args{};
  args.partial = params.partial.as<const float>();
  args.partial_stride = params.partial.stride[0];
  args.merge_mask = params.merge_mask.as<const uint8_t>();
  args.hidden = params.hidden.data;
  args.hidden_stride = params.hidden.stride[0];
  args.width = static_cast<int32_t>(params.hidden.size[1]);
  args.is_smooth = params.merge_kind == MergeKind::kIterSmoothTopk;
  args.renormalize = params.renormalize;
  args.weight = params.weight;
  DIFFULEX_RETURN_IF_ERROR(dispatch_dtype(kWhere, params.hidden.dtype, [&](auto tag) {
    finalize_kernel<typename decltype(tag)::type>
        <<<static_cast<unsigned>(params.hidden.size[0]), 32 * kFinalizeWarps, 0,
           stream_of(context)>>>(args);
    return Status::ok_status();
  }));
  return check_launch(kWhere);
}

Status prepare_token_merge(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::token_merge_embed";
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, merge_kernel<T, 8, kVecElems, 4>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, merge_kernel<T, 32, 1, 32>));
    return touch_kernel(kWhere, finalize_kernel<T>);
  });
}

}  // namespace diffulex::cuda
