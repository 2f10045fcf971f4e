// SPDX-License-Identifier: Apache-2.0
//
// Merges P vocabulary-shard records of token_stats per row, in rank order, in fp64. R rows, Kt
// top-k columns. A thread owns a row: the records are a few dozen bytes.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/log_sum.h"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 64;
constexpr int32_t kMaxParts = 64;

struct MergeArgs {
  const int64_t* part_ids;       // [P, R]
  const float* part_stats;       // [P, R, 8]
  const int64_t* part_topk_ids;  // [P, R, Kt] or null
  const float* part_topk_vals;   // [P, R, Kt]
  int64_t ids_stride;            // between parts
  int64_t stats_stride[2];       // part, row
  int64_t topk_ids_stride[2];
  int64_t topk_vals_stride[2];
  int64_t* ids;  // [R]
  float* stats;  // [R, 8]
  int64_t stats_out_stride;
  int64_t* topk_ids;  // [R, Kt] or null
  float* topk_probs;  // [R, Kt]
  int64_t topk_ids_out_stride;
  int64_t topk_probs_out_stride;
  int64_t num_rows;
  int32_t num_parts;
  int32_t top_k;
};

/// A candidate of some shard: larger z first, then the lower id.
__device__ __forceinline__ bool is_better(float z, int64_t id, float best_z, int64_t best_id) {
  return id >= 0 && (best_id < 0 || z > best_z || (z == best_z && id < best_id));
}

struct MergedRow {
  LogSum log_sum;
  double entropy;
  int64_t best_id;
  float best_z;
  float second_z;
  float best_logit;
  float bad_count;
};

__device__ MergedRow merge_row(const MergeArgs& args, int64_t row) {
  MergedRow merged{LogSum{}, 0.0, -1, -INFINITY, -INFINITY, -INFINITY, 0.0F};
  double maximum = -INFINITY;
  for (int32_t part = 0; part < args.num_parts; ++part) {
    const float* stats = args.part_stats + part * args.stats_stride[0] + row * args.stats_stride[1];
    maximum = fmax(maximum, static_cast<double>(stats[0]));
    merged.bad_count += stats[7];
  }
  double sum = 0.0;
  double weighted = 0.0;
  for (int32_t part = 0; part < args.num_parts; ++part) {
    const float* stats = args.part_stats + part * args.stats_stride[0] + row * args.stats_stride[1];
    if (stats[0] != -INFINITY) {
      const double shift = static_cast<double>(stats[0]) - maximum;
      const double scale = exp(shift);
      sum += scale * stats[1];
      weighted += scale * (scale == 0.0 ? 0.0 : stats[2] + shift * stats[1]);
    }
    const int64_t id = args.part_ids[part * args.ids_stride + row];
    if (is_better(stats[3], id, merged.best_z, merged.best_id)) {
      merged.second_z = fmaxf(merged.best_z, fmaxf(merged.second_z, stats[4]));
      merged.best_z = stats[3];
      merged.best_id = id;
      merged.best_logit = stats[5];
    } else if (id >= 0) {
      merged.second_z = fmaxf(merged.second_z, stats[3]);
    }
  }
  if (sum > 0.0) {
    merged.log_sum = LogSum{maximum, log(sum)};
    merged.entropy = fmax(log(sum) - weighted / sum, 0.0);
  }
  return merged;
}

/// P-way merge of the shards' descending lists.
__device__ void merge_top_k(const MergeArgs& args, int64_t row, const LogSum& log_sum) {
  uint8_t next[kMaxParts] = {};
  for (int32_t place = 0; place < args.top_k; ++place) {
    int32_t best_part = -1;
    int64_t best_id = -1;
    float best_z = -INFINITY;
    for (int32_t part = 0; part < args.num_parts; ++part) {
      if (next[part] >= args.top_k) {
        continue;
      }
      const int64_t id = args.part_topk_ids[part * args.topk_ids_stride[0] +
                                            row * args.topk_ids_stride[1] + next[part]];
      const float z = args.part_topk_vals[part * args.topk_vals_stride[0] +
                                          row * args.topk_vals_stride[1] + next[part]];
      if (is_better(z, id, best_z, best_id)) {
        best_part = part;
        best_id = id;
        best_z = z;
      }
    }
    if (best_part >= 0) {
      ++next[best_part];
    }
    args.topk_ids[row * args.topk_ids_out_stride + place] = best_id;
    args.topk_probs[row * args.topk_probs_out_stride + place] =
        best_part < 0 ? 0.0F : static_cast<float>(exp(log_sum.log_probability(best_z)));
  }
}

__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeArgs args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= args.num_rows) {
    return;
  }
  const MergedRow merged = merge_row(args, row);
  float* stats = args.stats + row * args.stats_out_stride;
  args.ids[row] = merged.best_id;
  const bool is_empty = merged.best_id < 0;
  const float confidence =
      is_empty ? 0.0F : static_cast<float>(exp(merged.log_sum.log_probability(merged.best_z)));
  stats[kStatsConfidence] = confidence;
  stats[kStatsMaxProb] = confidence;
  stats[kStatsSecondProb] =
      is_empty || merged.second_z == -INFINITY
          ? 0.0F
          : static_cast<float>(exp(merged.log_sum.log_probability(merged.second_z)));
  stats[kStatsEntropy] = is_empty ? 0.0F : static_cast<float>(merged.entropy);
  stats[kStatsLogSumExp] = is_empty ? 0.0F : static_cast<float>(merged.log_sum.value());
  stats[kStatsMaxLogit] = is_empty ? 0.0F : merged.best_logit;
  stats[kStatsRawConfidence] = confidence;
  stats[kStatsBadCount] = merged.bad_count;
  if (args.top_k > 0) {
    merge_top_k(args, row, merged.log_sum);
  }
}

}  // namespace

Status merge_token_stats(const MergeTokenStatsParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::merge_token_stats";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  MergeArgs args{};
  args.part_ids = params.part_ids.as<const int64_t>();
  args.ids_stride = params.part_ids.stride[0];
  args.part_stats = params.part_stats.as<const float>();
  args.ids = params.ids.as<int64_t>();
  args.stats = params.stats.as<float>();
  args.stats_out_stride = params.stats.stride[0];
  args.num_rows = params.ids.size[0];
  args.num_parts = static_cast<int32_t>(params.part_ids.size[0]);
  for (int dim = 0; dim < 2; ++dim) {
    args.stats_stride[dim] = params.part_stats.stride[dim];
  }
  if (params.topk_ids.present()) {
    args.part_topk_ids = params.part_topk_ids.as<const int64_t>();
    args.part_topk_vals = params.part_topk_vals.as<const float>();
    for (int dim = 0; dim < 2; ++dim) {
      args.topk_ids_stride[dim] = params.part_topk_ids.stride[dim];
      args.topk_vals_stride[dim] = params.part_topk_vals.stride[dim];
    }
    args.topk_ids = params.topk_ids.as<int64_t>();
    args.topk_probs = params.topk_probs.as<float>();
    args.topk_ids_out_stride = params.topk_ids.stride[0];
    args.topk_probs_out_stride = params.topk_probs.stride[0];
    args.top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  }
  if (args.num_parts > kMaxParts) {
    return make_error(StatusCode::kUnsupported, kWhere, ": part_ids: expected at most ", kMaxParts,
                      " parts, got ", args.num_parts);
  }
  merge_kernel<<<static_cast<unsigned>(ceil_div(args.num_rows, kThreads)), kThreads, 0,
                 stream_of(context)>>>(args);
  return check_launch(kWhere);
}

Status prepare_merge_token_stats(const ExecContext& /*context*/) {
  return touch_kernel("diffulex::merge_token_stats", merge_kernel);
}

}  // namespace diffulex::cuda
