// SPDX-License-Identifier: Apache-2.0
//
// Acceptance rules of the mask-filling samplers: one CTA per diffusion block, one thread per
// position. Nb blocks, B positions. Every rule reduces to "positions that pass the threshold" or
// "the first n of an order", so one ranking serves all.
#include <cstdint>

#include "ops/accept/block.cuh"
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
  int64_t mask_token_id;
  int32_t block_size;  // B
  AcceptRule rule;
  ConfidenceKind confidence_kind;
  int32_t denoising_steps;
  float factor;
  float entropy_bound;
  float low_threshold;
  bool raw_confidence;
  bool force_accept_last_step;
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

/// Positions step `step` of the schedule takes; see the acceptance rules of the sampler
/// specification: B / S, one more in the first B mod S steps, and after the schedule its last
/// count.
__device__ int32_t scheduled_count(int32_t block_size, int32_t num_steps, int32_t step) {
  const int32_t index = step < num_steps ? step : num_steps - 1;
  const int32_t count = block_size / num_steps + (index < block_size % num_steps ? 1 : 0);
  return step >= num_steps && count < 1 ? 1 : count;
}

__device__ float ranking_key(const AcceptArgs& args, const float* stats, float probability,
                             int32_t index) {
  switch (args.rule) {
    case AcceptRule::kSequential:
      return -static_cast<float>(index);
    case AcceptRule::kFactor:
      return probability;
    case AcceptRule::kEntropyBound:
      return -stats[kStatsEntropy];
    default:
      break;
  }
  return ranking_confidence(args.confidence_kind, stats, probability);
}

/// Ready positions ahead of this one; ties go to the lower position.
__device__ int32_t rank_of(const AcceptShared& shared, int32_t block_size, int32_t index) {
  int32_t rank = 0;
  for (int32_t other = 0; other < block_size; ++other) {
    const bool is_ahead = shared.keys[other] > shared.keys[index] ||
                          (shared.keys[other] == shared.keys[index] && other < index);
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

/// What the rules that look at the place of a position accept beyond the ranking.
__device__ bool accepts_by_place(const AcceptArgs& args, const AcceptShared& shared,
                                 const Position& position, int32_t index, uint32_t first_open,
                                 uint32_t first_failing) {
  const auto place = static_cast<uint32_t>(index);
  if (args.rule == AcceptRule::kLeftmostPrefix) {
    return place < first_failing || place == first_open;
  }
  if (args.rule == AcceptRule::kHierarchy) {
    return position.is_passing || (position.probability > args.low_threshold &&
                                   is_best_of_run(shared, args.block_size, index));
  }
  return false;
}

/// How many positions of the order the rule takes when the threshold alone does not decide.
__device__ int32_t rank_limit(const AcceptArgs& args, const AcceptShared& shared, int32_t num_ready,
                              int32_t num_passing, int32_t step, bool& by_threshold) {
  const int32_t num_steps = args.denoising_steps > 0 ? args.denoising_steps : args.block_size;
  const int32_t scheduled = scheduled_count(args.block_size, num_steps, step);
  by_threshold = false;
  if (args.force_accept_last_step && step >= num_steps - 1) {
    return num_ready;
  }
  switch (args.rule) {
    case AcceptRule::kThreshold:
    case AcceptRule::kThresholdNonStrict:
      by_threshold = num_passing > 0;
      return 1;
    case AcceptRule::kStatic:
    case AcceptRule::kSequential:
      return scheduled;
    case AcceptRule::kDynamic:
      by_threshold = num_passing >= scheduled;
      return scheduled;
    case AcceptRule::kFactor: {
      int32_t limit = 1;
      for (int32_t n = 1; n <= num_ready; ++n) {
        if (static_cast<float>(n + 1) * (1.0F - shared.sorted[n - 1]) < args.factor) {
          limit = n;
        }
      }
      return limit;
    }
    case AcceptRule::kEntropyBound: {
      float before = 0.0F;
      int32_t limit = 0;
      while (limit < num_ready && (limit == 0 || before <= args.entropy_bound)) {
        before += shared.sorted[limit];
        ++limit;
      }
      return limit;
    }
    case AcceptRule::kHierarchy:
      return 1;
    case AcceptRule::kLeftmostPrefix:
      break;
  }
  return 0;
}

__device__ Position read_position(const AcceptArgs& args, int64_t block, int32_t index,
                                  float threshold, bool& is_missing) {
  Position position;
  is_missing = false;
  const int32_t end = args.valid_len == nullptr ? args.block_size : args.valid_len[block];
  position.is_open = index < args.block_size && index < end &&
                     index >= args.editable_start[block] &&
                     args.tokens[block * args.tokens_stride + index] == args.mask_token_id;
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
  position.probability = stats[args.raw_confidence ? kStatsRawConfidence : kStatsConfidence];
  position.is_ready = true;
  const bool admits_equal =
      args.rule == AcceptRule::kThresholdNonStrict || args.rule == AcceptRule::kLeftmostPrefix;
  position.is_passing =
      admits_equal ? position.probability >= threshold : position.probability > threshold;
  position.key = ranking_key(args, stats, position.probability, index);
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
    shared.sorted[rank] =
        args.rule == AcceptRule::kEntropyBound ? -position.key : position.probability;
  }
  __syncthreads();
  bool by_threshold = false;
  const int32_t limit =
      rank_limit(args, shared, num_ready, num_passing, args.open_steps[block], by_threshold);
  uint32_t first_open = UINT32_MAX;
  uint32_t first_failing = 0;
  if (args.rule == AcceptRule::kLeftmostPrefix) {
    const auto place = static_cast<uint32_t>(index);
    first_open = cta_min(position.is_open ? place : UINT32_MAX, shared.first_open);
    first_failing = cta_min(position.is_open && !position.is_passing ? place : UINT32_MAX,
                            shared.first_failing);
  }
  bool is_accepted = position.is_ready && !is_skipped &&
                     ((by_threshold ? position.is_passing : rank < limit) ||
                      accepts_by_place(args, shared, position, index, first_open, first_failing));
  // A closed gate leaves only what passes the threshold on its own.
  is_accepted = is_accepted && (args.gate[block] != 0 || position.is_passing);
  // A mask over a mask changes nothing.
  is_accepted = is_accepted && position.id != args.mask_token_id;
  const int32_t num_accepted = __syncthreads_count(is_accepted);
  if (index < args.block_size) {
    args.write_ids[block * args.write_ids_stride + index] = is_accepted ? position.id : -1;
    args.confidence[block * args.confidence_stride + index] = position.probability;
  }
  if (index == 0) {
    const int32_t left = num_open - num_accepted;
    int32_t flags = 0;
    flags |= left == 0 && !is_skipped ? kAcceptCommittable : 0;
    flags |= num_accepted == 0 ? kAcceptSameAsPrevious : 0;
    flags |= num_passing == num_open ? kAcceptAllConfident : 0;
    flags |= num_accepted > 0 ? kAcceptProgressed : 0;
    flags |= has_bad ? kAcceptBadLogits : 0;
    flags |= is_skipped ? kAcceptSkipped : 0;
    args.masks_left[block] = left;
    args.flags[block] = flags;
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
  args.mask_token_id = params.mask_token_id;
  args.block_size = static_cast<int32_t>(params.tokens.size[1]);
  args.rule = params.rule;
  args.confidence_kind = params.confidence_kind;
  args.denoising_steps = params.denoising_steps;
  args.factor = params.factor;
  args.entropy_bound = params.entropy_bound;
  args.low_threshold = params.low_threshold;
  args.raw_confidence = params.raw_confidence;
  args.force_accept_last_step = params.force_accept_last_step;
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

Status prepare_accept_mask_fill() {
  return touch_kernel("diffulex::accept_mask_fill", accept_kernel);
}

}  // namespace diffulex::cuda
