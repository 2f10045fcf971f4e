// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "diffulex/core/acceptance.h"

namespace diffulex {
namespace {

/// An editable position.
struct RefreshPosition {
  int32_t index = 0;
  int32_t row = -1;
  int64_t token = 0;
  int64_t id = -1;  // -1 = no proposal
  float p = 0.0F;   // of the proposal
  float q = 0.0F;   // of the argmax
  bool is_open = false;
  bool is_certain = false;
  bool has_descriptor = false;

  [[nodiscard]] bool is_ready() const { return id >= 0; }
};

/// What is counted on the editable positions of one block before the writes.
struct RefreshCounts {
  int32_t num_decoded = 0;
  int32_t num_same = 0;
  uint32_t first_open = UINT32_MAX;
  uint32_t first_failing = UINT32_MAX;
  bool all_confident = true;
  bool has_bad = false;
  bool is_skipped = false;
};

void read_row(const DmaxStep& step, const AcceptBlock& block, RefreshPosition& position,
              RefreshCounts& counts) {
  position.row = block.row_index[position.index];
  if (position.row < 0) {
    counts.is_skipped = true;
    return;
  }
  position.id = block.id_of(position.row);
  if (!position.is_ready()) {
    counts.has_bad = true;
    return;
  }
  const float* listed = nullptr;
  if (step.topk_probs != nullptr) {
    listed = step.topk_probs + position.row * step.topk_probs_stride;
  }
  const DmaxProbabilities probabilities =
      dmax_probabilities(block.stats_of(position.row), listed, position.is_certain);
  position.p = probabilities.proposal;
  position.q = probabilities.argmax;
}

/// Reads the editable positions and writes the confidence output.
RefreshCounts collect(const DmaxRules& rules, const DmaxStep& step, const AcceptBlock& block,
                      std::vector<RefreshPosition>& positions) {
  positions.clear();
  std::fill_n(block.confidence, block.block_size, 0.0F);
  RefreshCounts counts;
  for (int32_t index = block.editable_start; index < block.editable_end; ++index) {
    const auto place = static_cast<uint32_t>(index);
    RefreshPosition position;
    position.index = index;
    position.token = block.tokens[index];
    position.is_open = position.token == rules.mask_token_id;
    position.is_certain = rules.fast_path && !position.is_open;
    read_row(step, block, position, counts);
    block.confidence[index] = position.p;
    if (position.is_open) {
      counts.first_open = std::min(counts.first_open, place);
      if (!position.is_ready() || !passes_dmax(position.p, step.threshold)) {
        counts.first_failing = std::min(counts.first_failing, place);
      }
    } else {
      ++counts.num_decoded;
      counts.num_same += position.id == position.token ? 1 : 0;
    }
    counts.all_confident = counts.all_confident && is_dmax_confident(position.q);
    positions.push_back(position);
  }
  counts.all_confident = counts.all_confident && !counts.has_bad && !counts.is_skipped;
  return counts;
}

/// Writes the descriptor of one position; an empty one where it has none.
void write_descriptor(const DmaxRules& rules, const DmaxStep& step, int32_t index,
                      const RefreshPosition* position) {
  MergeSource source;
  if (position != nullptr) {
    source.is_valid = true;
    source.is_certain = position->is_certain;
    source.id = position->id;
    source.argmax_probability = position->q;
    source.has_list = step.topk_ids != nullptr;
    source.has_argmax = step.argmax_ids != nullptr;
    if (source.has_list) {
      source.topk_ids = step.topk_ids + position->row * step.topk_ids_stride;
      source.topk_probs = step.topk_probs + position->row * step.topk_probs_stride;
    }
    if (source.has_argmax) {
      source.argmax_id = step.argmax_ids + position->row * step.argmax_stride;
    }
  }
  step.merge_valid[index] = source.is_valid ? 1 : 0;
  step.merge_residual[index] = write_merge_descriptor(
      rules, source, step.merge_count, step.merge_ids + index * step.merge_ids_stride,
      step.merge_probs + index * step.merge_probs_stride);
}

void write_descriptors(const DmaxRules& rules, const DmaxStep& step, int32_t block_size,
                       const std::vector<RefreshPosition>& positions) {
  for (int32_t index = 0; index < block_size; ++index) {
    write_descriptor(rules, step, index, nullptr);
  }
  for (const RefreshPosition& position : positions) {
    if (position.has_descriptor) {
      write_descriptor(rules, step, position.index, &position);
    }
  }
}

}  // namespace

AcceptOutcome accept_dmax_block(const DmaxRules& rules, const DmaxStep& step,
                                const AcceptBlock& block) {
  thread_local std::vector<RefreshPosition> positions;
  const RefreshCounts counts = collect(rules, step, block, positions);
  AcceptSummary summary;
  summary.timed_out =
      dmax_timed_out(block.block_size, step.open_steps, step.gate, counts.is_skipped);
  std::fill_n(block.write_ids, block.block_size, int64_t{-1});
  for (RefreshPosition& position : positions) {
    const bool is_written =
        position.is_ready() && !counts.is_skipped &&
        writes_dmax(!position.is_open, summary.timed_out, step.gate,
                    static_cast<uint32_t>(position.index), counts.first_open, counts.first_failing);
    const bool is_changed = is_written && position.id != position.token;
    const bool is_mask = (is_changed ? position.id : position.token) == rules.mask_token_id;
    if (is_changed) {
      block.write_ids[position.index] = position.id;
      summary.has_changed = true;
      summary.has_filled = summary.has_filled || position.is_open;
    }
    summary.masks_left += is_mask ? 1 : 0;
    position.has_descriptor = position.is_ready() && !counts.is_skipped && !is_mask;
  }
  if (step.merge_valid != nullptr) {
    write_descriptors(rules, step, block.block_size, positions);
  }
  summary.is_settled =
      is_dmax_settled(counts.all_confident, summary.has_changed, summary.timed_out);
  summary.all_confident = counts.all_confident;
  summary.has_bad = counts.has_bad;
  summary.is_skipped = counts.is_skipped;
  return {accept_flags(summary), summary.masks_left,
          same_token_share(counts.num_same, counts.num_decoded)};
}

}  // namespace diffulex
