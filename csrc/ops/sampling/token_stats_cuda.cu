// SPDX-License-Identifier: Apache-2.0
//
// token_stats on any architecture: two launches, one warp per 2,048-column chunk and one CTA per
// row. On sm_90 one launch does both (ops/sampling/sm90).
#include <climits>
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/sampling/sm90/token_stats_cluster.h"
#include "ops/sampling/token_stats/chunks.cuh"
#include "ops/sampling/token_stats/finish.cuh"
#include "ops/sampling/token_stats/row.cuh"
#include "ops/sampling/token_stats_config.h"
#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::token_stats";

/// Warps of a CTA: as many chunks as fit 32 KB of shared memory.
template <typename T>
inline constexpr int kChunkWarps = sizeof(T) == 4 ? 4 : 8;

template <typename T, bool kCapped>
__global__ void __launch_bounds__(32 * kChunkWarps<T>, 1)
    chunk_kernel(const __grid_constant__ TokenStatsArgs args) {
  __shared__ alignas(16) uint8_t columns[kChunkWarps<T> * kStatsChunkColumns * sizeof(T)];
  const auto warp = static_cast<int32_t>(threadIdx.x >> 5);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kChunkWarps<T> + warp;
  if (index >= args.num_rows * args.num_chunks) {
    return;
  }
  const int64_t row = index / args.num_chunks;
  const auto first = static_cast<int32_t>(index % args.num_chunks * kStatsChunkColumns);
  const T* source = source_row<T>(args, row);
  if (source == nullptr) {
    return;  // the second pass does not read this row's records
  }
  const LaneChunk<T> chunk{reinterpret_cast<T*>(columns) + warp * kStatsChunkColumns};
  const RowInputs inputs = row_inputs(args, row);
  start_chunk(args, source, first, chunk);
  ptx::cp_async_commit();
  const RowTransform transform = row_transform(args, inputs);
  const Exclusion exclusion = row_exclusion(args, inputs, transform);
  ptx::cp_async_wait<0>();
  const ChunkRecord record =
      chunk_record<T, kCapped>(args, transform, exclusion, source, first, chunk, nullptr);
  if ((threadIdx.x & 31) == 0) {
    args.records[index] = record;
  }
}

/// Warps of a CTA that finishes a row: beside their 24 KB there is the state of the top-k.
template <typename T>
inline constexpr int kFinishWarps = kChunkWarps<T> * 3 / 4;

template <typename T>
__global__ void __launch_bounds__(32 * kFinishWarps<T>, 1)
    finish_kernel(const __grid_constant__ TokenStatsArgs args) {
  __shared__ alignas(16) uint8_t state[sizeof(FinishShared)];
  __shared__ alignas(16) uint8_t columns[kFinishWarps<T> * kStatsChunkColumns * sizeof(T)];
  auto& shared = *reinterpret_cast<FinishShared*>(state);
  const int64_t row = blockIdx.x;
  const T* source = source_row<T>(args, row);
  if (source == nullptr) {
    if (threadIdx.x < 32) {
      write_empty(args, row, 0);
    }
    return;
  }
  const RowInputs inputs = row_inputs(args, row);
  const RowTransform transform = row_transform(args, inputs);
  const LaneChunk<T> chunk{reinterpret_cast<T*>(columns) + (threadIdx.x >> 5) * kStatsChunkColumns};
  const Exclusion exclusion = row_exclusion(args, inputs, transform);
  const ChunkRecord* records = args.records + row * args.num_chunks;
  if (args.top_k > 0) {
    begin_top_k(args, records, shared);
  }
  finish_row(args, source, transform, exclusion, row, records, shared,
             [&] { collect_top_k(args, source, transform, exclusion, records, chunk, shared); });
}

TokenStatsArgs make_args(const TokenStatsParams& params, const ExecContext& context) {
  TokenStatsArgs args = TokenStatsArgs::of(params);
  if (params.penalty_ids.present()) {
    args.penalty_ids = params.penalty_ids.as<const int64_t>();
    args.penalties = params.penalties.as<const float>();
  }
  if (params.topk_ids.present()) {
    args.topk_ids = params.topk_ids.as<int64_t>();
    args.topk_probs = params.topk_probs.as<float>();
    args.topk_ids_stride = params.topk_ids.stride[0];
    args.topk_probs_stride = params.topk_probs.stride[0];
    args.top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  }
  args.records = static_cast<ChunkRecord*>(context.workspace);
  args.num_chunks = stats_chunks(args.num_columns);
  args.vocab_start = params.vocab_start;
  args.is_partial = params.partial;
  return args;
}

Status check_shape(const TokenStatsArgs& args, const ExecContext& context) {
  const size_t needed = static_cast<size_t>(args.num_rows * args.num_chunks) * sizeof(ChunkRecord);
  if (needed > 0 && (context.workspace == nullptr || context.workspace_bytes < needed)) {
    return make_error(StatusCode::kInvalidArgument, kWhere, ": workspace: expected at least ",
                      needed, " bytes, got ",
                      context.workspace == nullptr ? 0 : context.workspace_bytes);
  }
  if (args.num_columns > INT32_MAX) {
    return make_error(StatusCode::kUnsupported, kWhere, ": logits: expected at most ", INT32_MAX,
                      " columns, got ", args.num_columns);
  }
  return Status::ok_status();
}

template <typename T, bool kCapped>
Status launch_chunks(const TokenStatsArgs& args, cudaStream_t stream) {
  const int64_t blocks = ceil_div(args.num_rows * args.num_chunks, kChunkWarps<T>);
  chunk_kernel<T, kCapped><<<static_cast<unsigned>(blocks), 32 * kChunkWarps<T>, 0, stream>>>(args);
  return check_launch(kWhere);
}

}  // namespace

Status token_stats(const TokenStatsParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const TokenStatsArgs args = make_args(params, context);
  DIFFULEX_RETURN_IF_ERROR(check_shape(args, context));
  DIFFULEX_RETURN_IF_ERROR(check_range(kWhere, "row_index", params.row_index, -1,
                                       args.num_stored + args.num_extra, context));
  if (sm90::has_token_stats(args.num_chunks, context)) {
    return sm90::token_stats(args, params.logits.dtype, context);
  }
  return dispatch_dtype(kWhere, params.logits.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const cudaStream_t stream = stream_of(context);
    if (args.num_chunks > 0) {
      DIFFULEX_RETURN_IF_ERROR((args.softcap > 0.0F ? launch_chunks<T, true>(args, stream)
                                                    : launch_chunks<T, false>(args, stream)));
    }
    finish_kernel<T>
        <<<static_cast<unsigned>(args.num_rows), 32 * kFinishWarps<T>, 0, stream>>>(args);
    return check_launch(kWhere);
  });
}

Status prepare_token_stats(const ExecContext& /*context*/) {
  DIFFULEX_RETURN_IF_ERROR(for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, chunk_kernel<T, false>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, chunk_kernel<T, true>));
    return touch_kernel(kWhere, finish_kernel<T>);
  }));
  return sm90::prepare_token_stats();
}

}  // namespace diffulex::cuda
