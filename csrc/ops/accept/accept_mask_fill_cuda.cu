// SPDX-License-Identifier: Apache-2.0
//
// accept_mask_fill: one CTA per block, one thread per position. Nb blocks, B positions. Every rule
// of accept_rules.h takes either the positions that pass or the first n of an order, so that one
// ranking serves all of them.
#include <cstdint>

#include "ops/accept/block.cuh"
#include "ops/accept/config.h"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr int32_t kMaxBlock = kMaxAcceptThreads;

struct AcceptArgs {
  const int64_t* tokens;          // [Nb, B]
  const int32_t* row_index;       // [Nb, B]
  const int32_t* editable_start;  // [Nb]
  const int32_t* valid_len;       // [Nb] or null
  const uint8_t* gate;            // [Nb]
  const float* accept_threshold;  // [Nb]
  const int32_t* open_steps;      // [Nb]
  const int64_t* ids;             // [R]
  const float* stats;             // [R, 8]
  int64_t* write_ids;             // [Nb, B]
  float* confidence;              // [Nb, B]
  int32_t* masks_left;            // [Nb]
  int32_t* flags;                 // [Nb]
  int64_t tokens_stride;
  int64_t row_index_stride;
  int64_t stats_stride;
  int64_t write_ids_stride;
  int64_t confidence_stride;
  int64_t num_rows;  // R
  MaskFillRules rules;
  int32_t block_size;  // B
};

/// What a thread knows about its position.
struct Position {
  bool is_open = false;
  bool is_ready = false;    // open, with a proposal that may be accepted
  bool is_passing = false;  // p above the threshold
  int64_t id = -1;
  float probability = 0.0F;
  float key = 0.0F;  // larger ranks first
};

struct AcceptShared {
  float keys[kMaxBlock];    // of ready positions
  float sorted[kMaxBlock];  // p or entropy in rank order
  uint8_t ready[kMaxBlock];
  uint8_t open[kMaxBlock];
  uint32_t first_open[kMaxBlock / 32];     // per warp
  uint32_t first_failing[kMaxBlock / 32];  // per warp
};

/// Ready positions ahead of this one; ties go to the lower position.
__device__ int32_t rank_of(const AcceptShared& shared, int32_t block_size, int32_t index) {
  int32_t rank = 0;
  for (int32_t other = 0; other < block_size; ++other) {
    const bool is_ahead = ranks_before(shared.keys[other], other, shared.keys[index], index);
    rank += shared.ready[other] != 0 && is_ahead ? 1 : 0;
  }
  return rank;
}

/// True when no ready position of the same run of open positions is ahead of this one.
__device__ bool is_best_of_run(const AcceptShared& shared, int32_t block_size, int32_t index) {
  bool is_best = true;
  for (int32_t other = index - 1; other >= 0 && shared.open[other] != 0; --other) {
    is_best = is_best && (shared.ready[other] == 0 || shared.keys[other] < shared.keys[index]);
  }
  for (int32_t other = index + 1; other < block_size && shared.open[other] != 0; ++other) {
    is_best = is_best && (shared.ready[other] == 0 || shared.keys[other] <= shared.keys[index]);
  }
  return is_best;
}

__device__ Position read_position(const AcceptArgs& args, int64_t block, int32_t index,
                                  float threshold, bool& is_missing) {
  Position position;
  is_missing = false;
  const int32_t end = args.valid_len == nullptr ? args.block_size : args.valid_len[block];
  position.is_open = index < args.block_size && index < end &&
                     index >= args.editable_start[block] &&
                     args.tokens[block * args.tokens_stride + index] == args.rules.mask_token_id;
  if (!position.is_open) {
    return position;
  }
  const int32_t row = args.row_index[block * args.row_index_stride + index];
  if (row < 0 || row >= args.num_rows) {
    is_missing = true;
    return position;
  }
  const float* stats = args.stats + row * args.stats_stride;
  position.id = args.ids[row];
  if (position.id < 0) {
    return position;  // a row without a finite candidate proposes nothing
  }
  position.probability = proposal_probability(stats, args.rules.raw_confidence);
  position.is_ready = true;
  position.is_passing = passes_threshold(args.rules.rule, position.probability, threshold);
  position.key = ranking_key(args.rules, stats, position.probability, index);
  return position;
}

__global__ void __launch_bounds__(kMaxBlock)
    accept_kernel(const __grid_constant__ AcceptArgs args) {
  __shared__ AcceptShared shared;
  const int64_t block = blockIdx.x;
  const int32_t index = threadIdx.x;
  bool is_missing = false;
  const Position position =
      read_position(args, block, index, args.accept_threshold[block], is_missing);
  shared.keys[index] = position.key;
  shared.ready[index] = position.is_ready ? 1 : 0;
  shared.open[index] = position.is_open ? 1 : 0;
  const int32_t num_open = __syncthreads_count(position.is_open);
  const int32_t num_ready = __syncthreads_count(position.is_ready);
  const int32_t num_passing = __syncthreads_count(position.is_passing);
  const bool is_skipped = __syncthreads_or(is_missing) != 0;
  const bool has_bad = __syncthreads_or(position.is_open && !is_missing && !position.is_ready) != 0;
  int32_t rank = 0;
  if (position.is_ready) {
    rank = rank_of(shared, args.block_size, index);
    shared.sorted[rank] = ordered_value_of(args.rules.rule, position.key, position.probability);
  }
  __syncthreads();
  bool by_threshold = false;
  const int32_t limit = rank_limit(args.rules, args.block_size, shared.sorted, num_ready,
                                   num_passing, args.open_steps[block], by_threshold);
  uint32_t first_open = UINT32_MAX;
  uint32_t first_failing = 0;
  const auto place = static_cast<uint32_t>(index);
  if (args.rules.rule == AcceptRule::kLeftmostPrefix) {
    first_open = cta_min(position.is_open ? place : UINT32_MAX, shared.first_open);
    first_failing = cta_min(position.is_open && !position.is_passing ? place : UINT32_MAX,
                            shared.first_failing);
  }
  const auto best_of_run = [&] { return is_best_of_run(shared, args.block_size, index); };
  bool is_accepted = position.is_ready && !is_skipped &&
                     ((by_threshold ? position.is_passing : rank < limit) ||
                      accepts_by_place(args.rules, place, position.is_passing, position.probability,
                                       first_open, first_failing, best_of_run));
  is_accepted = is_accepted && writes_mask_fill(args.rules, args.gate[block] != 0,
                                                position.is_passing, position.id);
  const int32_t num_accepted = __syncthreads_count(is_accepted);
  if (index < args.block_size) {
    args.write_ids[block * args.write_ids_stride + index] = is_accepted ? position.id : -1;
    args.confidence[block * args.confidence_stride + index] = position.probability;
  }
  if (index == 0) {
    AcceptSummary summary;
    summary.masks_left = num_open - num_accepted;
    summary.has_changed = num_accepted > 0;
    summary.has_filled = num_accepted > 0;
    summary.all_confident = num_passing == num_open;
    summary.has_bad = has_bad;
    summary.is_skipped = is_skipped;
    args.masks_left[block] = summary.masks_left;
    args.flags[block] = accept_flags(summary);
  }
}

AcceptArgs make_args(const AcceptMaskFillParams& params) {
  AcceptArgs args{};
  args.tokens = params.tokens.as<const int64_t>();
  args.tokens_stride = params.tokens.stride[0];
  args.row_index = params.row_index.as<const int32_t>();
  args.row_index_stride = params.row_index.stride[0];
  args.editable_start = params.editable_start.as<const int32_t>();
  args.valid_len = params.valid_len.present() ? params.valid_len.as<const int32_t>() : nullptr;
  args.gate = params.gate.as<const uint8_t>();
  args.accept_threshold = params.accept_threshold.as<const float>();
  args.open_steps = params.open_steps.as<const int32_t>();
  args.ids = params.ids.as<const int64_t>();
  args.stats = params.stats.as<const float>();
  args.stats_stride = params.stats.stride[0];
  args.num_rows = params.ids.size[0];
  args.write_ids = params.write_ids.as<int64_t>();
  args.write_ids_stride = params.write_ids.stride[0];
  args.confidence = params.confidence.as<float>();
  args.confidence_stride = params.confidence.stride[0];
  args.masks_left = params.masks_left.as<int32_t>();
  args.flags = params.flags.as<int32_t>();
  args.rules = mask_fill_rules(params);
  args.block_size = static_cast<int32_t>(params.tokens.size[1]);
  return args;
}

}  // namespace

Status accept_mask_fill(const AcceptMaskFillParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::accept_mask_fill";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const AcceptArgs args = make_args(params);
  if (args.block_size > kMaxBlock) {
    return make_error(StatusCode::kUnsupported, kWhere, ": tokens: expected blocks of at most ",
                      kMaxBlock, " positions, got ", args.block_size);
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_range(kWhere, "row_index", params.row_index, -1, args.num_rows, context));
  const auto threads = static_cast<unsigned>(ceil_div(args.block_size, 32) * 32);
  accept_kernel<<<static_cast<unsigned>(params.tokens.size[0]), threads, 0, stream_of(context)>>>(
      args);
  return check_launch(kWhere);
}

Status prepare_accept_mask_fill(const ExecContext& /*context*/) {
  return touch_kernel("diffulex::accept_mask_fill", accept_kernel);
}

}  // namespace diffulex::cuda
