// SPDX-License-Identifier: Apache-2.0

// accept_edit: masks take proposals by the gated threshold rule, decoded positions those that
// differ and pass their own threshold; all writes are simultaneous.

#include <algorithm>
#include <vector>

#include "ops/accept/block_cpu.h"
#include "ops/cpu_ops.h"

namespace diffulex::cpu {
namespace {

constexpr const char* kOp = "accept_edit";

/// An editable position.
struct EditPosition {
  int64_t index = 0;
  int64_t token = 0;
  int64_t id = -1;  // -1 = no proposal
  float p = 0.0F;
  float rank = 0.0F;
  bool is_open = false;
  bool is_accepted = false;
};

/// The editable positions of one block and what is counted on them before the writes.
struct EditBlock {
  std::vector<EditPosition> positions;
  int32_t num_open = 0;
  int32_t num_decoded = 0;
  int32_t num_same = 0;
  bool bad_logits = false;
  bool skipped = false;
};

Status check_block(const AcceptEditParams& params, int64_t block) {
  DIFFULEX_RETURN_IF_ERROR(check_editable_block(kOp, params, block));
  DIFFULEX_RETURN_IF_ERROR(
      check_block_value(kOp, "open_steps", params.open_steps, block, 0, INT32_MAX));
  return check_block_value(kOp, "post_edit_steps", params.post_edit_steps, block, 0, INT32_MAX);
}

/// Reads the proposal of a position and writes its confidence output.
void read_proposal(const AcceptEditParams& params, int32_t row, float* confidence,
                   EditBlock* content, EditPosition* position) {
  if (row < 0) {
    content->skipped = true;
    return;
  }
  position->id = value_at<int64_t>(params.ids, row);
  if (position->id < 0) {
    content->bad_logits = true;
    return;
  }
  const float* stats = row_of<const float>(params.stats, row);
  position->p = stats[params.raw_confidence ? kStatsRawConfidence : kStatsConfidence];
  position->rank = ranking_confidence(params.confidence_kind, stats, position->p);
  confidence[position->index] = position->p;
}

void collect(const AcceptEditParams& params, int64_t block, EditBlock* content) {
  content->positions.clear();
  content->num_open = 0;
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
    EditPosition position;
    position.index = index;
    position.token = tokens[index];
    position.is_open = position.token == params.mask_token_id;
    read_proposal(params, rows[index], confidence, content, &position);
    content->num_open += position.is_open ? 1 : 0;
    content->num_decoded += position.is_open ? 0 : 1;
    content->num_same += !position.is_open && position.id == position.token ? 1 : 0;
    content->positions.push_back(position);
  }
}

/// The threshold rule on the open positions: those above, else the best one if the gate is open.
void accept_masks(float threshold, bool gate, std::vector<EditPosition>* positions) {
  EditPosition* best = nullptr;
  bool any = false;
  for (EditPosition& position : *positions) {
    if (!position.is_open || position.id < 0) {
      continue;
    }
    position.is_accepted = position.p > threshold;
    any = any || position.is_accepted;
    if (best == nullptr || position.rank > best->rank) {
      best = &position;
    }
  }
  if (!any && gate && best != nullptr) {
    best->is_accepted = true;
  }
}

void accept_edits(float threshold, std::vector<EditPosition>* positions) {
  for (EditPosition& position : *positions) {
    if (!position.is_open && position.id >= 0) {
      position.is_accepted = position.id != position.token && position.p > threshold;
    }
  }
}

/// Where the block stands in its life.
struct EditPhase {
  bool timed_out = false;
  bool over = false;     // more steps without an open position than allowed
  bool is_last = false;  // the last step without an open position that is allowed, or a later one
};

EditPhase edit_phase(const AcceptEditParams& params, int64_t block, const EditBlock& content) {
  const bool gate = value_at<uint8_t>(params.gate, block) != 0;
  const int64_t limit = params.max_post_edit_steps;
  const int64_t open_steps = index_at(params.open_steps, block) + (gate ? 1 : 0);
  const bool has_open = content.num_open > 0;
  const int64_t post_edit_steps = index_at(params.post_edit_steps, block) + (has_open ? 0 : 1);
  EditPhase phase;
  phase.timed_out = !content.skipped && open_steps >= params.tokens.size[1] + limit;
  phase.over = !has_open && post_edit_steps > limit;
  phase.is_last = !has_open && post_edit_steps >= limit;
  return phase;
}

void write_block(const AcceptEditParams& params, int64_t block, const EditBlock& content) {
  const EditPhase phase = edit_phase(params, block, content);
  const float threshold = value_at<float>(params.accept_threshold, block);
  auto* write_ids = row_of<int64_t>(params.write_ids, block);
  std::fill_n(write_ids, params.tokens.size[1], int64_t{-1});
  bool none_accepted = true;
  bool all_confident = !content.bad_logits && !content.skipped;
  int32_t changed = 0;
  int32_t filled = 0;
  int32_t left = 0;
  for (const EditPosition& position : content.positions) {
    none_accepted = none_accepted && !position.is_accepted;
    all_confident = all_confident && (!position.is_open || position.p > threshold);
    bool is_written = position.is_accepted && !phase.over;
    if (phase.timed_out) {
      is_written = position.is_accepted || (position.is_open && position.id >= 0);
    }
    const bool is_changed = is_written && !content.skipped && position.id != position.token;
    if (is_changed) {
      write_ids[position.index] = position.id;
      ++changed;
      filled += position.is_open ? 1 : 0;
    }
    left += (is_changed ? position.id : position.token) == params.mask_token_id ? 1 : 0;
  }
  const bool is_settled =
      none_accepted || phase.timed_out || params.max_post_edit_steps == 0 || phase.is_last;
  int32_t flags = 0;
  flags |= left == 0 && is_settled && !content.skipped ? kAcceptCommittable : 0;
  flags |= changed == 0 ? kAcceptSameAsPrevious : 0;
  flags |= all_confident ? kAcceptAllConfident : 0;
  flags |= filled > 0 ? kAcceptProgressed : 0;
  flags |= phase.timed_out ? kAcceptTimedOut : 0;
  flags |= content.bad_logits ? kAcceptBadLogits : 0;
  flags |= content.skipped ? kAcceptSkipped : 0;
  *row_of<int32_t>(params.masks_left, block) = left;
  *row_of<int32_t>(params.flags, block) = flags;
  *row_of<float>(params.same_token_ratio, block) =
      content.num_decoded == 0
          ? 1.0F
          : static_cast<float>(content.num_same) / static_cast<float>(content.num_decoded);
}

}  // namespace

Status accept_edit(const AcceptEditParams& params, const ExecContext& context) {
  const int64_t num_blocks = params.tokens.size[0];
  for (int64_t block = 0; block < num_blocks; ++block) {
    DIFFULEX_RETURN_IF_ERROR(check_block(params, block));
  }
  parallel_ranges(context, num_blocks, kAcceptBlockGrain, [&](int64_t begin, int64_t end) {
    thread_local EditBlock content;
    for (int64_t block = begin; block < end; ++block) {
      collect(params, block, &content);
      if (!content.skipped) {
        accept_masks(value_at<float>(params.accept_threshold, block),
                     value_at<uint8_t>(params.gate, block) != 0, &content.positions);
        accept_edits(value_at<float>(params.edit_threshold, block), &content.positions);
      }
      write_block(params, block, content);
    }
  });
  return {};
}

}  // namespace diffulex::cpu
