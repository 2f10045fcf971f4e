// SPDX-License-Identifier: Apache-2.0
//
// accept_dmax: one CTA per block, one thread per position. K merge entries per position, Kt listed
// candidates per row.
#include <cstdint>

#include "ops/accept/block.cuh"
#include "ops/accept/config.h"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/check_data.h"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::accept_dmax";

struct DmaxArgs {
  AcceptInputs inputs;
  const uint8_t* gate;            // [Nb]
  const float* accept_threshold;  // [Nb]
  const int32_t* open_steps;      // [Nb]
  const int64_t* argmax_ids;      // [R] or null
  const int64_t* topk_ids;        // [R, Kt] or null
  const float* topk_probs;        // [R, Kt]
  int32_t* masks_left;            // [Nb]
  float* same_token_ratio;        // [Nb]
  uint8_t* merge_valid;           // [Nb, B] or null
  int64_t* merge_ids;             // [Nb, B, K]
  float* merge_probs;             // [Nb, B, K]
  float* merge_residual;          // [Nb, B]
  int64_t argmax_stride;
  int64_t topk_ids_stride;
  int64_t topk_probs_stride;
  int64_t merge_valid_stride;
  int64_t merge_ids_stride[2];
  int64_t merge_probs_stride[2];
  int64_t merge_residual_stride;
  DmaxRules rules;
  int32_t top_k;  // K
};

/// Writes the K entries of one position and its residual.
__device__ void write_descriptor(const DmaxArgs& args, int64_t block, int32_t index,
                                 const AcceptPosition& position, bool is_valid, bool is_certain,
                                 float argmax_probability) {
  int64_t* ids =
      args.merge_ids + block * args.merge_ids_stride[0] + index * args.merge_ids_stride[1];
  float* probs =
      args.merge_probs + block * args.merge_probs_stride[0] + index * args.merge_probs_stride[1];
  MergeSource source;
  source.has_list = args.topk_ids != nullptr;
  source.has_argmax = args.argmax_ids != nullptr;
  if (is_valid && source.has_list) {
    source.topk_ids = args.topk_ids + position.row * args.topk_ids_stride;
    source.topk_probs = args.topk_probs + position.row * args.topk_probs_stride;
  }
  if (is_valid && source.has_argmax) {
    source.argmax_id = args.argmax_ids + position.row * args.argmax_stride;
  }
  source.id = position.id;
  source.argmax_probability = argmax_probability;
  source.is_valid = is_valid;
  source.is_certain = is_certain;
  const float residual = write_merge_descriptor(args.rules, source, args.top_k, ids, probs);
  args.merge_valid[block * args.merge_valid_stride + index] = is_valid ? 1 : 0;
  args.merge_residual[block * args.merge_residual_stride + index] = residual;
}

/// Probabilities of the proposal and of the most probable token of a position; 0 without a
/// proposal.
__device__ __forceinline__ DmaxProbabilities read_probabilities(const DmaxArgs& args,
                                                                const AcceptPosition& position,
                                                                bool is_certain) {
  if (!position.is_ready) {
    return {};
  }
  const float* listed = nullptr;
  if (args.topk_probs != nullptr) {
    listed = args.topk_probs + position.row * args.topk_probs_stride;
  }
  return dmax_probabilities(position.stats, listed, is_certain);
}

__global__ void __launch_bounds__(kMaxAcceptThreads)
    dmax_kernel(const __grid_constant__ DmaxArgs args) {
  __shared__ uint32_t scratch[2][kMaxAcceptWarps];
  const AcceptInputs& inputs = args.inputs;
  const int64_t block = blockIdx.x;
  const auto index = static_cast<int32_t>(threadIdx.x);
  const AcceptPosition position = read_position(inputs, block, index);
  const bool is_open = position.is_editable && position.token == args.rules.mask_token_id;
  const bool is_decoded = position.is_editable && !is_open;
  const bool is_certain = args.rules.fast_path && is_decoded;
  const bool gate = args.gate[block] != 0;
  const auto [probability, argmax_probability] = read_probabilities(args, position, is_certain);
  const bool is_passing =
      is_open && position.is_ready && passes_dmax(probability, args.accept_threshold[block]);
  const bool is_skipped = __syncthreads_or(position.is_missing) != 0;
  const bool has_bad =
      __syncthreads_or(position.is_editable && !position.is_missing && !position.is_ready) != 0;
  const int32_t num_decoded = __syncthreads_count(is_decoded);
  const int32_t num_same = __syncthreads_count(is_decoded && position.id == position.token);
  const bool all_confident =
      __syncthreads_or(position.is_editable && !is_dmax_confident(argmax_probability)) == 0 &&
      !is_skipped && !has_bad;
  const auto place = static_cast<uint32_t>(index);
  const uint32_t first_open = cta_min(is_open ? place : UINT32_MAX, scratch[0]);
  const uint32_t first_failing = cta_min(is_open && !is_passing ? place : UINT32_MAX, scratch[1]);

  const bool timed_out =
      dmax_timed_out(inputs.block_size, args.open_steps[block], gate, is_skipped);
  const bool is_written =
      position.is_ready && !is_skipped &&
      writes_dmax(is_decoded, timed_out, gate, place, first_open, first_failing);
  const bool is_changed = is_written && position.id != position.token;
  const int64_t next = is_changed ? position.id : position.token;
  const bool is_mask = position.is_editable && next == args.rules.mask_token_id;
  const int32_t left = __syncthreads_count(is_mask);
  const bool has_changed = __syncthreads_or(is_changed) != 0;
  const bool has_filled = __syncthreads_or(is_changed && is_open) != 0;
  if (index < inputs.block_size) {
    write_position(inputs, block, index, is_changed, position.id, probability);
    if (args.merge_valid != nullptr) {
      write_descriptor(args, block, index, position, position.is_ready && !is_skipped && !is_mask,
                       is_certain, argmax_probability);
    }
  }
  if (index == 0) {
    AcceptSummary summary;
    summary.masks_left = left;
    summary.is_settled = is_dmax_settled(all_confident, has_changed, timed_out);
    summary.has_changed = has_changed;
    summary.has_filled = has_filled;
    summary.all_confident = all_confident;
    summary.timed_out = timed_out;
    summary.has_bad = has_bad;
    summary.is_skipped = is_skipped;
    write_summary(args, block, summary, num_same, num_decoded);
  }
}

void set_lists(const AcceptDmaxParams& params, DmaxArgs& args) {
  if (params.argmax_ids.present()) {
    args.argmax_ids = params.argmax_ids.as<const int64_t>();
    args.argmax_stride = params.argmax_ids.stride[0];
  }
  if (params.topk_ids.present()) {
    args.topk_ids = params.topk_ids.as<const int64_t>();
    args.topk_ids_stride = params.topk_ids.stride[0];
    args.topk_probs = params.topk_probs.as<const float>();
    args.topk_probs_stride = params.topk_probs.stride[0];
  }
}

void set_descriptors(const AcceptDmaxParams& params, DmaxArgs& args) {
  if (!params.merge_valid.present()) {
    return;
  }
  args.merge_valid = params.merge_valid.as<uint8_t>();
  args.merge_valid_stride = params.merge_valid.stride[0];
  args.merge_ids = params.merge_ids.as<int64_t>();
  args.merge_probs = params.merge_probs.as<float>();
  for (int dim = 0; dim < 2; ++dim) {
    args.merge_ids_stride[dim] = params.merge_ids.stride[dim];
    args.merge_probs_stride[dim] = params.merge_probs.stride[dim];
  }
  args.merge_residual = params.merge_residual.as<float>();
  args.merge_residual_stride = params.merge_residual.stride[0];
  args.top_k = static_cast<int32_t>(params.merge_ids.size[2]);
}

}  // namespace

Status accept_dmax(const AcceptDmaxParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  DmaxArgs args{};
  args.inputs = accept_inputs(params);
  args.inputs.editable_start = params.editable_start.as<const int32_t>();
  args.gate = params.gate.as<const uint8_t>();
  args.accept_threshold = params.accept_threshold.as<const float>();
  args.open_steps = params.open_steps.as<const int32_t>();
  args.masks_left = params.masks_left.as<int32_t>();
  args.same_token_ratio = params.same_token_ratio.as<float>();
  args.rules = dmax_rules(params);
  set_lists(params, args);
  set_descriptors(params, args);
  DIFFULEX_RETURN_IF_ERROR(
      check_range(kWhere, "row_index", params.row_index, -1, args.inputs.num_rows, context));
  dmax_kernel<<<static_cast<unsigned>(params.tokens.size[0]), accept_threads(args.inputs), 0,
                stream_of(context)>>>(args);
  return check_launch(kWhere);
}

Status prepare_accept_dmax(const ExecContext& /*context*/) {
  return touch_kernel(kWhere, dmax_kernel);
}

}  // namespace diffulex::cuda
