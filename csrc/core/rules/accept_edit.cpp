// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "diffulex/core/acceptance.h"

namespace diffulex {
namespace {

/// An editable position.
struct EditPosition {
  int32_t index = 0;
  int64_t token = 0;
  int64_t id = -1;  // -1 = no proposal
  float p = 0.0F;
  float rank = 0.0F;
  bool is_open = false;
  bool is_accepted = false;

  [[nodiscard]] bool is_ready() const { return id >= 0; }
};

/// What is counted on the editable positions of one block before the writes.
struct EditCounts {
  int32_t num_open = 0;
  int32_t num_passing = 0;
  int32_t num_decoded = 0;
  int32_t num_same = 0;
  bool has_bad = false;
  bool is_skipped = false;
};

/// Reads the row of a position and writes its confidence output.
void read_row(const EditRules& rules, const AcceptBlock& block, EditPosition& position,
              EditCounts& counts) {
  const int32_t row = block.row_index[position.index];
  if (row < 0) {
    counts.is_skipped = true;
    return;
  }
  position.id = block.id_of(row);
  if (!position.is_ready()) {
    counts.has_bad = true;
    return;
  }
  const float* stats = block.stats_of(row);
  position.p = proposal_probability(stats, rules.raw_confidence);
  position.rank = ranking_confidence(rules.confidence_kind, stats, position.p);
  block.confidence[position.index] = position.p;
}

/// Reads the editable positions; accepts what passes on its own and the edits.
EditCounts collect(const EditRules& rules, const EditStep& step, const AcceptBlock& block,
                   std::vector<EditPosition>& positions) {
  positions.clear();
  std::fill_n(block.confidence, block.block_size, 0.0F);
  EditCounts counts;
  for (int32_t index = block.editable_start; index < block.editable_end; ++index) {
    EditPosition position;
    position.index = index;
    position.token = block.tokens[index];
    position.is_open = position.token == rules.mask_token_id;
    read_row(rules, block, position, counts);
    if (position.is_open) {
      position.is_accepted =
          position.is_ready() && passes_edit_mask(position.p, step.accept_threshold);
      ++counts.num_open;
      counts.num_passing += position.is_accepted ? 1 : 0;
    } else {
      position.is_accepted = position.is_ready() && accepts_edit(position.token, position.id,
                                                                 position.p, step.edit_threshold);
      ++counts.num_decoded;
      counts.num_same += position.id == position.token ? 1 : 0;
    }
    positions.push_back(position);
  }
  return counts;
}

/// Accepts the open position that ranks first.
void force_best(std::vector<EditPosition>& positions) {
  EditPosition* best = nullptr;
  for (EditPosition& position : positions) {
    if (position.is_open && position.is_ready() &&
        (best == nullptr || ranks_before(position.rank, position.index, best->rank, best->index))) {
      best = &position;
    }
  }
  if (best != nullptr) {
    best->is_accepted = true;
  }
}

}  // namespace

AcceptOutcome accept_edit_block(const EditRules& rules, const EditStep& step,
                                const AcceptBlock& block) {
  thread_local std::vector<EditPosition> positions;
  const EditCounts counts = collect(rules, step, block, positions);
  if (counts.num_passing == 0 && step.gate) {
    force_best(positions);
  }
  const EditPhase phase =
      edit_phase(step.max_post_edit_steps, block.block_size, step.open_steps, step.post_edit_steps,
                 step.gate, counts.num_open > 0, counts.is_skipped);
  std::fill_n(block.write_ids, block.block_size, int64_t{-1});
  AcceptSummary summary;
  bool none_accepted = true;
  for (const EditPosition& position : positions) {
    const bool is_accepted = position.is_accepted && !counts.is_skipped;
    none_accepted = none_accepted && !is_accepted;
    const bool is_changed =
        writes_edit(phase, is_accepted, position.is_open, position.is_ready()) &&
        position.id != position.token;
    if (is_changed) {
      block.write_ids[position.index] = position.id;
      summary.has_changed = true;
      summary.has_filled = summary.has_filled || position.is_open;
    }
    const int64_t next = is_changed ? position.id : position.token;
    summary.masks_left += next == rules.mask_token_id ? 1 : 0;
  }
  summary.is_settled = is_edit_settled(step.max_post_edit_steps, phase, none_accepted);
  summary.all_confident =
      counts.num_passing == counts.num_open && !counts.has_bad && !counts.is_skipped;
  summary.timed_out = phase.timed_out;
  summary.has_bad = counts.has_bad;
  summary.is_skipped = counts.is_skipped;
  return {accept_flags(summary), summary.masks_left,
          same_token_share(counts.num_same, counts.num_decoded)};
}

}  // namespace diffulex
