// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "diffulex/core/acceptance.h"

namespace diffulex {
namespace {

/// A ready position.
struct Candidate {
  int32_t index = 0;
  int32_t run = 0;  // number of the maximal run of open positions it belongs to
  int64_t id = -1;
  float p = 0.0F;
  float key = 0.0F;
  bool is_passing = false;
  bool is_first_of_order = false;
  bool is_best_of_run = false;
};

/// The open positions of one block.
struct OpenSet {
  std::vector<Candidate> candidates;  // ascending positions
  int32_t num_open = 0;
  int32_t num_passing = 0;
  uint32_t first_open = UINT32_MAX;
  uint32_t first_failing = UINT32_MAX;
  bool has_bad = false;
  bool is_skipped = false;
};

/// Adds an open position that has a row.
void add_row(const MaskFillRules& rules, const AcceptBlock& block, float threshold,
             Candidate candidate, OpenSet& open) {
  const int32_t row = block.row_index[candidate.index];
  const auto place = static_cast<uint32_t>(candidate.index);
  candidate.id = block.id_of(row);
  if (candidate.id < 0) {
    open.has_bad = true;
    open.first_failing = std::min(open.first_failing, place);
    return;
  }
  const float* stats = block.stats_of(row);
  candidate.p = proposal_probability(stats, rules.raw_confidence);
  candidate.key = ranking_key(rules, stats, candidate.p, candidate.index);
  candidate.is_passing = passes_threshold(rules.rule, candidate.p, threshold);
  open.num_passing += candidate.is_passing ? 1 : 0;
  if (!candidate.is_passing) {
    open.first_failing = std::min(open.first_failing, place);
  }
  block.confidence[candidate.index] = candidate.p;
  open.candidates.push_back(candidate);
}

/// Collects the open positions and writes the confidence output.
void collect(const MaskFillRules& rules, const AcceptBlock& block, float threshold, OpenSet& open) {
  std::fill_n(block.confidence, block.block_size, 0.0F);
  Candidate candidate;
  for (int32_t index = block.editable_start; index < block.editable_end; ++index) {
    if (block.tokens[index] != rules.mask_token_id) {
      ++candidate.run;
      continue;
    }
    ++open.num_open;
    open.first_open = std::min(open.first_open, static_cast<uint32_t>(index));
    if (block.row_index[index] < 0) {
      open.is_skipped = true;
      continue;
    }
    candidate.index = index;
    add_row(rules, block, threshold, candidate, open);
  }
}

bool comes_before(const Candidate* a, const Candidate* b) {
  return ranks_before(a->key, a->index, b->key, b->index);
}

/// The first `count` candidates of the order, in order.
std::vector<Candidate*>& first_of_order(std::vector<Candidate>& candidates, size_t count) {
  thread_local std::vector<Candidate*> order;
  order.clear();
  for (Candidate& candidate : candidates) {
    order.push_back(&candidate);
  }
  count = std::min(count, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(),
                    comes_before);
  order.resize(count);
  return order;
}

/// Marks the positions that the order gives; those that pass where the threshold decides.
void mark_order(const MaskFillRules& rules, const MaskFillStep& step, int32_t block_size,
                OpenSet& open) {
  thread_local std::vector<float> ordered;
  ordered.clear();
  if (rules.rule == AcceptRule::kFactor || rules.rule == AcceptRule::kEntropyBound) {
    for (const Candidate* candidate : first_of_order(open.candidates, open.candidates.size())) {
      ordered.push_back(ordered_value_of(rules.rule, candidate->key, candidate->p));
    }
  }
  bool by_threshold = false;
  const int32_t limit =
      rank_limit(rules, block_size, ordered.data(), static_cast<int32_t>(open.candidates.size()),
                 open.num_passing, step.open_steps, by_threshold);
  if (by_threshold) {
    for (Candidate& candidate : open.candidates) {
      candidate.is_first_of_order = candidate.is_passing;
    }
    return;
  }
  for (Candidate* candidate : first_of_order(open.candidates, static_cast<size_t>(limit))) {
    candidate->is_first_of_order = true;
  }
}

/// Marks the best position of every run of open positions.
void mark_best_of_runs(std::vector<Candidate>& candidates) {
  Candidate* best = nullptr;
  for (Candidate& candidate : candidates) {
    const bool is_new_run = best == nullptr || best->run != candidate.run;
    if (is_new_run || comes_before(&candidate, best)) {
      if (!is_new_run) {
        best->is_best_of_run = false;
      }
      best = &candidate;
      best->is_best_of_run = true;
    }
  }
}

}  // namespace

AcceptOutcome accept_mask_fill_block(const MaskFillRules& rules, const MaskFillStep& step,
                                     const AcceptBlock& block) {
  thread_local std::vector<Candidate> candidates;
  OpenSet open;
  open.candidates.swap(candidates);
  open.candidates.clear();
  std::fill_n(block.write_ids, block.block_size, int64_t{-1});
  collect(rules, block, step.threshold, open);
  int32_t num_accepted = 0;
  if (!open.is_skipped) {
    mark_order(rules, step, block.block_size, open);
    if (rules.rule == AcceptRule::kHierarchy) {
      mark_best_of_runs(open.candidates);
    }
    for (const Candidate& candidate : open.candidates) {
      const auto is_best_of_run = [&candidate] { return candidate.is_best_of_run; };
      const bool is_accepted =
          candidate.is_first_of_order ||
          accepts_by_place(rules, static_cast<uint32_t>(candidate.index), candidate.is_passing,
                           candidate.p, open.first_open, open.first_failing, is_best_of_run);
      if (is_accepted && writes_mask_fill(rules, step.gate, candidate.is_passing, candidate.id)) {
        block.write_ids[candidate.index] = candidate.id;
        ++num_accepted;
      }
    }
  }
  AcceptSummary summary;
  summary.masks_left = open.num_open - num_accepted;
  summary.has_changed = num_accepted > 0;
  summary.has_filled = num_accepted > 0;
  summary.all_confident = open.num_passing == open.num_open;
  summary.has_bad = open.has_bad;
  summary.is_skipped = open.is_skipped;
  open.candidates.swap(candidates);
  return {accept_flags(summary), summary.masks_left};
}

}  // namespace diffulex
