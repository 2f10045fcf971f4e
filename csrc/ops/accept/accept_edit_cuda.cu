// SPDX-License-Identifier: Apache-2.0
//
// accept_edit: one CTA per block, one thread per position; all writes of a step are simultaneous.
#include <cstdint>

#include "ops/accept/block.cuh"
#include "ops/accept/config.h"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/check_data.h"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::accept_edit";

struct EditArgs {
  AcceptInputs inputs;
  const uint8_t* gate;                 // [Nb]
  const float* accept_threshold;       // [Nb]
  const float* edit_threshold;         // [Nb]
  const int32_t* open_steps;           // [Nb]
  const int32_t* post_edit_steps;      // [Nb]
  const int32_t* max_post_edit_steps;  // [Nb]
  int32_t* masks_left;                 // [Nb]
  float* same_token_ratio;             // [Nb]
  EditRules rules;
};

/// How probable the proposal of a position is, and its place among those of open positions; both 0
/// without one.
struct EditProposal {
  float probability = 0.0F;
  uint64_t entry = 0;
};

__device__ __forceinline__ EditProposal read_proposal(const EditRules& rules,
                                                      const AcceptPosition& position, int32_t index,
                                                      bool is_open) {
  EditProposal proposal;
  if (position.is_ready) {
    proposal.probability = proposal_probability(position.stats, rules.raw_confidence);
    if (is_open) {
      proposal.entry = ranked(
          ranking_confidence(rules.confidence_kind, position.stats, proposal.probability), index);
    }
  }
  return proposal;
}

__global__ void __launch_bounds__(kMaxAcceptThreads)
    edit_kernel(const __grid_constant__ EditArgs args) {
  __shared__ uint64_t scratch[kMaxAcceptWarps];
  const AcceptInputs& inputs = args.inputs;
  const int64_t block = blockIdx.x;
  const auto index = static_cast<int32_t>(threadIdx.x);
  const AcceptPosition position = read_position(inputs, block, index);
  const bool is_open = position.is_editable && position.token == args.rules.mask_token_id;
  const bool is_decoded = position.is_editable && !is_open;
  const float accept_threshold = args.accept_threshold[block];
  const bool gate = args.gate[block] != 0;
  const auto [probability, entry] = read_proposal(args.rules, position, index, is_open);
  const bool is_passing =
      is_open && position.is_ready && passes_edit_mask(probability, accept_threshold);
  const int32_t num_open = __syncthreads_count(is_open);
  const int32_t num_passing = __syncthreads_count(is_passing);
  const int32_t num_decoded = __syncthreads_count(is_decoded);
  const int32_t num_same = __syncthreads_count(is_decoded && position.id == position.token);
  const bool is_skipped = __syncthreads_or(position.is_missing) != 0;
  const bool has_bad =
      __syncthreads_or(position.is_editable && !position.is_missing && !position.is_ready) != 0;

  bool is_accepted = is_passing;
  if (num_passing == 0 && gate) {
    const uint64_t best = cta_max(entry, scratch);
    is_accepted = entry != 0 && entry == best;
  }
  if (is_decoded) {
    is_accepted = position.is_ready && accepts_edit(position.token, position.id, probability,
                                                    args.edit_threshold[block]);
  }
  is_accepted = is_accepted && !is_skipped;
  const bool none_accepted = __syncthreads_or(is_accepted) == 0;

  const int32_t limit = args.max_post_edit_steps[block];
  const EditPhase phase = edit_phase(limit, inputs.block_size, args.open_steps[block],
                                     args.post_edit_steps[block], gate, num_open > 0, is_skipped);
  const bool is_written = writes_edit(phase, is_accepted, is_open, position.is_ready);
  const bool is_changed = is_written && position.id != position.token;
  const int64_t next = is_changed ? position.id : position.token;
  const int32_t left =
      __syncthreads_count(position.is_editable && next == args.rules.mask_token_id);
  const bool has_changed = __syncthreads_or(is_changed) != 0;
  const bool has_filled = __syncthreads_or(is_changed && is_open) != 0;
  if (index < inputs.block_size) {
    write_position(inputs, block, index, is_changed, position.id, probability);
  }
  if (index == 0) {
    AcceptSummary summary;
    summary.masks_left = left;
    summary.is_settled = is_edit_settled(limit, phase, none_accepted);
    summary.has_changed = has_changed;
    summary.has_filled = has_filled;
    summary.all_confident = num_passing == num_open && !has_bad && !is_skipped;
    summary.timed_out = phase.timed_out;
    summary.has_bad = has_bad;
    summary.is_skipped = is_skipped;
    write_summary(args, block, summary, num_same, num_decoded);
  }
}

}  // namespace

Status accept_edit(const AcceptEditParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  EditArgs args{};
  args.inputs = accept_inputs(params);
  args.inputs.editable_start = params.editable_start.as<const int32_t>();
  args.gate = params.gate.as<const uint8_t>();
  args.accept_threshold = params.accept_threshold.as<const float>();
  args.edit_threshold = params.edit_threshold.as<const float>();
  args.open_steps = params.open_steps.as<const int32_t>();
  args.post_edit_steps = params.post_edit_steps.as<const int32_t>();
  args.max_post_edit_steps = params.max_post_edit_steps.as<const int32_t>();
  args.masks_left = params.masks_left.as<int32_t>();
  args.same_token_ratio = params.same_token_ratio.as<float>();
  args.rules = edit_rules(params);
  DIFFULEX_RETURN_IF_ERROR(
      check_range(kWhere, "row_index", params.row_index, -1, args.inputs.num_rows, context));
  edit_kernel<<<static_cast<unsigned>(params.tokens.size[0]), accept_threads(args.inputs), 0,
                stream_of(context)>>>(args);
  return check_launch(kWhere);
}

Status prepare_accept_edit(const ExecContext& /*context*/) {
  return touch_kernel(kWhere, edit_kernel);
}

}  // namespace diffulex::cuda
