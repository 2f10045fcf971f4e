// SPDX-License-Identifier: Apache-2.0
//
// token_stats: two launches, one warp per 2,048-column chunk and one CTA per row.
#include <climits>
#include <cstdint>

#include "kernels/common/token_stats_config.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/portable/check_data.h"
#include "kernels/cuda/portable/prepare.h"
#include "kernels/cuda/portable/token_stats.cuh"
#include "kernels/cuda/portable/token_stats_chunks.cuh"
#include "kernels/cuda/portable/token_stats_finish.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::token_stats";

template <typename T>
__device__ void write_top_k(const TokenStatsArgs& args, const T* source,
                            const RowTransform& transform, int64_t row, const LogSum& log_sum,
                            const FinishShared& shared) {
  for (int32_t i = threadIdx.x; i < args.top_k; i += kFinishThreads) {
    const uint64_t entry = shared.top[i];
    int64_t id = -1;
    float value = args.is_partial ? -INFINITY : 0.0F;
    if (entry != 0) {
      const int64_t column = ranked_index(entry);
      id = args.vocab_start + column;
      const float z = transform.tempered(transform.logit(value_at(args, source, column), column));
      value = args.is_partial ? z : static_cast<float>(exp(log_sum.log_probability(z)));
    }
    args.topk_ids[row * args.topk_ids_stride + i] = id;
    args.topk_probs[row * args.topk_probs_stride + i] = value;
  }
}

/// The unnormalised record of a vocabulary shard; the row may lack candidates.
__device__ void write_partial(const TokenStatsArgs& args, const ChunkRecord* records, int64_t row,
                              int64_t id, float logit, const RowSummary& summary,
                              const FinishShared& shared) {
  if (threadIdx.x != 0) {
    return;
  }
  float* stats = args.stats + row * args.stats_stride;
  const bool has_mass = args.num_chunks > 0 && shared.totals[0] > 0.0;
  stats[0] = has_mass ? static_cast<float>(shared.maximum) : -INFINITY;
  stats[1] = has_mass ? static_cast<float>(shared.totals[0]) : 0.0F;
  stats[2] = has_mass ? static_cast<float>(shared.totals[1]) : 0.0F;
  stats[3] = id < 0 ? -INFINITY : summary.best_z;
  stats[4] = summary.second_z;
  stats[5] = logit;
  stats[6] = 0.0F;
  stats[7] = static_cast<float>(summary.bad_count);
  args.ids[row] = id;
}

template <typename T>
__global__ void __launch_bounds__(kFinishThreads, 2)
    finish_kernel(const __grid_constant__ TokenStatsArgs args) {
  __shared__ FinishShared shared;
  const int64_t row = blockIdx.x;
  const T* source = source_row<T>(args, row);
  if (source == nullptr) {
    write_empty(args, row, 0);
    return;
  }
  const ChunkRecord* records = args.records + row * args.num_chunks;
  const RowTransform transform = row_transform(args, row);
  const RowSummary summary = summarize(args, records, shared);
  if (summary.best_chunk < 0 && !args.is_partial) {
    write_empty(args, row, summary.bad_count);
    return;
  }
  int32_t greedy = -1;
  if (summary.best_chunk >= 0) {
    greedy = greedy_column(args, source, transform, summary, shared);
  }
  int32_t chosen = greedy;
  if (transform.is_tempered && args.uniforms != nullptr && summary.candidates > 0.0) {
    const int32_t drawn = drawn_column(args, source, transform, records,
                                       args.uniforms[row] * summary.candidates, shared);
    chosen = drawn >= 0 ? drawn : greedy;
  }
  if (args.top_k > 0) {
    collect_top_k(args, source, transform, records, shared);
    write_top_k(args, source, transform, row, summary.log_sum, shared);
  }
  const float best_logit =
      greedy < 0 ? -INFINITY : transform.logit(value_at(args, source, greedy), greedy);
  if (args.is_partial) {
    write_partial(args, records, row, greedy < 0 ? -1 : args.vocab_start + greedy, best_logit,
                  summary, shared);
    return;
  }
  if (threadIdx.x != 0) {
    return;
  }
  const float logit = transform.logit(value_at(args, source, chosen), chosen);
  float* stats = args.stats + row * args.stats_stride;
  const double confidence = exp(summary.log_sum.log_probability(transform.tempered(logit)));
  args.ids[row] = args.vocab_start + chosen;
  stats[kStatsConfidence] = static_cast<float>(confidence);
  stats[kStatsMaxProb] = static_cast<float>(exp(summary.log_sum.log_probability(summary.best_z)));
  stats[kStatsSecondProb] =
      summary.second_z == -INFINITY
          ? 0.0F
          : static_cast<float>(exp(summary.log_sum.log_probability(summary.second_z)));
  stats[kStatsEntropy] = static_cast<float>(summary.entropy > 0.0 ? summary.entropy : 0.0);
  stats[kStatsLogSumExp] = static_cast<float>(summary.log_sum.value());
  stats[kStatsMaxLogit] = best_logit;
  stats[kStatsRawConfidence] = static_cast<float>(
      transform.is_tempered ? exp(summary.raw_log_sum.log_probability(logit)) : confidence);
  stats[kStatsBadCount] = static_cast<float>(summary.bad_count);
}

TokenStatsArgs make_args(const TokenStatsParams& params, const ExecContext& context) {
  TokenStatsArgs args{};
  args.logits = params.logits.data;
  args.logits_stride = params.logits.stride[0];
  args.num_stored = params.logits.size[0];
  const int64_t bytes = dtype_bytes(params.logits.dtype);
  args.is_vec = is_aligned16(args.logits) && args.logits_stride * bytes % 16 == 0;
  if (params.extra_logits.present()) {
    args.extra_logits = params.extra_logits.data;
    args.extra_stride = params.extra_logits.stride[0];
    args.num_extra = params.extra_logits.size[0];
    args.is_vec =
        args.is_vec && is_aligned16(args.extra_logits) && args.extra_stride * bytes % 16 == 0;
  }
  if (params.row_index.present()) {
    args.row_index = params.row_index.data;
    args.is_row_int64 = params.row_index.dtype == DType::kI64;
  }
  if (params.inv_temperature.present()) {
    args.inv_temperature = params.inv_temperature.as<const float>();
  }
  if (params.uniforms.present()) {
    args.uniforms = params.uniforms.as<const double>();
  }
  if (params.forbidden_ids.present()) {
    args.forbidden_ids = params.forbidden_ids.as<const int64_t>();
    args.num_forbidden = static_cast<int32_t>(params.forbidden_ids.size[0]);
  }
  if (params.penalty_ids.present()) {
    args.penalty_ids = params.penalty_ids.as<const int64_t>();
  }
  args.ids = params.ids.as<int64_t>();
  args.stats = params.stats.as<float>();
  args.stats_stride = params.stats.stride[0];
  if (params.topk_ids.present()) {
    args.topk_ids = params.topk_ids.as<int64_t>();
    args.topk_probs = params.topk_probs.as<float>();
    args.topk_ids_stride = params.topk_ids.stride[0];
    args.topk_probs_stride = params.topk_probs.stride[0];
    args.top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  }
  args.records = static_cast<ChunkRecord*>(context.workspace);
  args.num_rows = params.ids.size[0];
  args.num_columns = params.logits.size[1];
  args.num_chunks = stats_chunks(args.num_columns);
  args.vocab_start = params.vocab_start;
  args.vocab_limit = params.vocab_limit < 0 ? INT64_MAX : params.vocab_limit;
  args.softcap = params.softcap;
  args.penalty = params.penalty;
  args.exclusion = static_cast<int32_t>(params.exclusion);
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
  if (args.top_k > 0 && args.num_chunks > kMaxTopKChunks) {
    return make_error(StatusCode::kUnsupported, kWhere, ": logits: expected at most ",
                      kMaxTopKChunks * kStatsChunkColumns, " columns with top-k, got ",
                      args.num_columns);
  }
  if (args.num_columns > INT32_MAX) {
    return make_error(StatusCode::kUnsupported, kWhere, ": logits: expected at most ", INT32_MAX,
                      " columns, got ", args.num_columns);
  }
  return Status::ok_status();
}

}  // namespace

Status token_stats(const TokenStatsParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const TokenStatsArgs args = make_args(params, context);
  DIFFULEX_RETURN_IF_ERROR(check_shape(args, context));
  DIFFULEX_RETURN_IF_ERROR(check_range(kWhere, "row_index", params.row_index, -1,
                                       args.num_stored + args.num_extra, context));
  DIFFULEX_RETURN_IF_ERROR(dispatch_dtype(kWhere, params.logits.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (args.num_chunks > 0) {
      const int64_t blocks = ceil_div(args.num_rows * args.num_chunks, kChunkWarps);
      chunk_kernel<T>
          <<<static_cast<unsigned>(blocks), kChunkThreads, 0, stream_of(context)>>>(args);
      DIFFULEX_RETURN_IF_ERROR(check_launch(kWhere));
    }
    finish_kernel<T>
        <<<static_cast<unsigned>(args.num_rows), kFinishThreads, 0, stream_of(context)>>>(args);
    return check_launch(kWhere);
  }));
  return Status::ok_status();
}

Status prepare_token_stats() {
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, chunk_kernel<T>));
    return touch_kernel(kWhere, finish_kernel<T>);
  });
}

}  // namespace diffulex::cuda
