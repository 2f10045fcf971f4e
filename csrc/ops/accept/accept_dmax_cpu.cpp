// SPDX-License-Identifier: Apache-2.0

// accept_dmax: masks are decoded as the leftmost prefix of confident positions, decoded positions
// take their new proposal, and what is decoded after the writes gets a merge descriptor.

#include <algorithm>
#include <vector>

#include "ops/accept/block_cpu.h"
#include "ops/accept/config.h"
#include "ops/cpu_ops.h"

namespace diffulex::cpu {
namespace {

constexpr const char* kOp = "accept_dmax";

/// An editable position.
struct RefreshPosition {
  int64_t index = 0;
  int64_t token = 0;
  int64_t next = 0;  // token after the writes
  int64_t id = -1;   // -1 = no proposal
  int32_t row = -1;
  float p = 0.0F;  // of the proposal
  float q = 0.0F;  // of the argmax
  bool is_open = false;
};

/// The editable positions of one block and what is counted on them before the writes.
struct RefreshBlock {
  std::vector<RefreshPosition> positions;
  int32_t num_decoded = 0;
  int32_t num_same = 0;
  bool bad_logits = false;
  bool skipped = false;
};

Status check_block(const AcceptDmaxParams& params, int64_t block) {
  DIFFULEX_RETURN_IF_ERROR(check_editable_block(kOp, params, block));
  return check_block_value(kOp, "open_steps", params.open_steps, block, 0, INT32_MAX);
}

void read_proposal(const AcceptDmaxParams& params, RefreshBlock* content,
                   RefreshPosition* position) {
  if (position->row < 0) {
    content->skipped = true;
    return;
  }
  position->id = value_at<int64_t>(params.ids, position->row);
  if (position->id < 0) {
    content->bad_logits = true;
    return;
  }
  const float* stats = row_of<const float>(params.stats, position->row);
  const bool is_certain = params.fast_path && !position->is_open;
  position->p = is_certain ? 1.0F : stats[kStatsRawConfidence];
  position->q = stats[kStatsMaxProb];
  if (params.topk_ids.present()) {
    position->q = row_of<const float>(params.topk_probs, position->row)[0];
  }
  position->q = is_certain ? 1.0F : position->q;
}

void collect(const AcceptDmaxParams& params, int64_t block, RefreshBlock* content) {
  content->positions.clear();
  content->num_decoded = 0;
  content->num_same = 0;
  content->bad_logits = false;
  content->skipped = false;
  const auto* tokens = row_of<const int64_t>(params.tokens, block);
  const auto* rows = row_of<const int32_t>(params.row_index, block);
  auto* confidence = row_of<float>(params.confidence, block);
  std::fill_n(confidence, params.tokens.size[1], 0.0F);
  const int64_t end = valid_end(params, block);
  for (int64_t index = index_at(params.editable_start, block); index < end; ++index) {
    RefreshPosition position;
    position.index = index;
    position.token = tokens[index];
    position.next = position.token;
    position.row = rows[index];
    position.is_open = position.token == params.mask_token_id;
    read_proposal(params, content, &position);
    confidence[index] = position.p;
    content->num_decoded += position.is_open ? 0 : 1;
    content->num_same += !position.is_open && position.id == position.token ? 1 : 0;
    content->positions.push_back(position);
  }
}

/// Sets the tokens after the writes.
void decide(float threshold, bool gate, bool fill_all, RefreshBlock* content) {
  bool in_prefix = true;
  bool is_first = true;
  for (RefreshPosition& position : content->positions) {
    bool is_written = !position.is_open || fill_all;
    if (position.is_open) {
      in_prefix = in_prefix && position.id >= 0 && position.p >= threshold;
      is_written = is_written || in_prefix || (is_first && gate);
      is_first = false;
    }
    if (is_written && position.id >= 0) {
      position.next = position.id;
    }
  }
}

/// The K entries of the descriptor of a decoded position.
void write_descriptor(const AcceptDmaxParams& params, const RefreshPosition& position, int64_t* ids,
                      float* probs, float* residual) {
  const int64_t count = params.merge_ids.size[2];
  if (params.fast_path && !position.is_open) {
    ids[0] = position.next;
    probs[0] = 1.0F;
    *residual = 0.0F;
    return;
  }
  if (!params.topk_ids.present()) {
    ids[0] = position.id;
    probs[0] = position.q;
  } else {
    const auto* top_ids = row_of<const int64_t>(params.topk_ids, position.row);
    const auto* top_probs = row_of<const float>(params.topk_probs, position.row);
    for (int64_t k = 0; k < count && top_ids[k] >= 0; ++k) {
      ids[k] = top_ids[k];
      probs[k] = top_probs[k];
    }
    if (params.argmax_ids.present()) {
      ids[0] = value_at<int64_t>(params.argmax_ids, position.row);
    }
  }
  float total = 0.0F;
  for (int64_t k = 0; k < count; ++k) {
    total += probs[k];
  }
  *residual = std::max(0.0F, 1.0F - total);
}

void write_descriptors(const AcceptDmaxParams& params, int64_t block, const RefreshBlock& content) {
  const int64_t count = params.merge_ids.size[2];
  auto* valid = row_of<uint8_t>(params.merge_valid, block);
  auto* residual = row_of<float>(params.merge_residual, block);
  const auto ids_at = [&](int64_t index) {
    return row_of<int64_t>(params.merge_ids, block) + index * params.merge_ids.stride[1];
  };
  const auto probs_at = [&](int64_t index) {
    return row_of<float>(params.merge_probs, block) + index * params.merge_probs.stride[1];
  };
  for (int64_t index = 0; index < params.tokens.size[1]; ++index) {
    valid[index] = 0;
    residual[index] = 0.0F;
    std::fill_n(ids_at(index), count, params.mask_token_id);
    std::fill_n(probs_at(index), count, 0.0F);
  }
  if (content.skipped) {
    return;
  }
  for (const RefreshPosition& position : content.positions) {
    if (position.next != params.mask_token_id && position.id >= 0) {
      valid[position.index] = 1;
      write_descriptor(params, position, ids_at(position.index), probs_at(position.index),
                       &residual[position.index]);
    }
  }
}

void write_block(const AcceptDmaxParams& params, int64_t block, bool timed_out,
                 const RefreshBlock& content) {
  auto* write_ids = row_of<int64_t>(params.write_ids, block);
  std::fill_n(write_ids, params.tokens.size[1], int64_t{-1});
  bool all_confident = !content.bad_logits && !content.skipped;
  int32_t changed = 0;
  int32_t filled = 0;
  int32_t left = 0;
  for (const RefreshPosition& position : content.positions) {
    all_confident = all_confident && position.q >= kDmaxConfident;
    left += position.next == params.mask_token_id ? 1 : 0;
    if (position.next != position.token) {
      write_ids[position.index] = position.next;
      ++changed;
      filled += position.is_open ? 1 : 0;
    }
  }
  const bool is_settled = all_confident || changed == 0 || timed_out;
  int32_t flags = 0;
  flags |= left == 0 && is_settled && !content.skipped ? kAcceptCommittable : 0;
  flags |= changed == 0 ? kAcceptSameAsPrevious : 0;
  flags |= all_confident ? kAcceptAllConfident : 0;
  flags |= filled > 0 ? kAcceptProgressed : 0;
  flags |= timed_out ? kAcceptTimedOut : 0;
  flags |= content.bad_logits ? kAcceptBadLogits : 0;
  flags |= content.skipped ? kAcceptSkipped : 0;
  *row_of<int32_t>(params.masks_left, block) = left;
  *row_of<int32_t>(params.flags, block) = flags;
  *row_of<float>(params.same_token_ratio, block) =
      content.num_decoded == 0
          ? 1.0F
          : static_cast<float>(content.num_same) / static_cast<float>(content.num_decoded);
}

void run_block(const AcceptDmaxParams& params, int64_t block, RefreshBlock* content) {
  collect(params, block, content);
  const bool gate = value_at<uint8_t>(params.gate, block) != 0;
  const int64_t open_steps = index_at(params.open_steps, block) + (gate ? 1 : 0);
  const bool timed_out = !content->skipped && open_steps >= params.tokens.size[1];
  if (!content->skipped) {
    decide(value_at<float>(params.accept_threshold, block), gate, timed_out, content);
  }
  write_block(params, block, timed_out, *content);
  if (params.merge_valid.present()) {
    write_descriptors(params, block, *content);
  }
}

}  // namespace

Status accept_dmax(const AcceptDmaxParams& params, const ExecContext& context) {
  const int64_t num_blocks = params.tokens.size[0];
  for (int64_t block = 0; block < num_blocks; ++block) {
    DIFFULEX_RETURN_IF_ERROR(check_block(params, block));
  }
  parallel_ranges(context, num_blocks, kAcceptBlockGrain, [&](int64_t begin, int64_t end) {
    thread_local RefreshBlock content;
    for (int64_t block = begin; block < end; ++block) {
      run_block(params, block, &content);
    }
  });
  return {};
}

}  // namespace diffulex::cpu
