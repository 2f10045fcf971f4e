// SPDX-License-Identifier: Apache-2.0

// accept_mask_fill: which open positions of a block take their proposal. p is the probability of
// the proposal (compared with the threshold), c the ranking confidence.

#include <algorithm>
#include <vector>

#include "ops/accept/block_cpu.h"
#include "ops/cpu_ops.h"

namespace diffulex::cpu {
namespace {

constexpr const char* kOp = "accept_mask_fill";

/// An open position whose row holds a usable proposal.
struct Candidate {
  int32_t position = 0;
  int32_t run = 0;  // number of the maximal run of open positions it belongs to
  int64_t id = -1;
  float p = 0.0F;
  float rank = 0.0F;
  float entropy = 0.0F;
  bool accepted = false;
};

/// The open set of one block.
struct OpenSet {
  std::vector<Candidate> candidates;  // ascending positions, bad rows left out
  int32_t num_open = 0;
  int64_t first_bad = INT64_MAX;  // first open position without a usable proposal
  bool bad_logits = false;
  bool skipped = false;
};

Status check_block(const AcceptMaskFillParams& params, int64_t block) {
  const int64_t block_size = params.tokens.size[1];
  DIFFULEX_RETURN_IF_ERROR(
      check_block_value(kOp, "editable_start", params.editable_start, block, 0, block_size));
  if (params.valid_len.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        check_block_value(kOp, "valid_len", params.valid_len, block, 0, block_size));
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_block_value(kOp, "open_steps", params.open_steps, block, 0, INT32_MAX));
  const auto* tokens = row_of<const int64_t>(params.tokens, block);
  const int64_t end = valid_end(params, block);
  for (int64_t position = index_at(params.editable_start, block); position < end; ++position) {
    if (tokens[position] == params.mask_token_id) {
      DIFFULEX_RETURN_IF_ERROR(check_block_row(kOp, params, block, position));
    }
  }
  return {};
}

/// Collects the open set and writes the confidence output of the block.
void collect(const AcceptMaskFillParams& params, int64_t block, OpenSet* open) {
  open->candidates.clear();
  open->num_open = 0;
  open->first_bad = INT64_MAX;
  open->bad_logits = false;
  open->skipped = false;
  const auto* tokens = row_of<const int64_t>(params.tokens, block);
  const auto* rows = row_of<const int32_t>(params.row_index, block);
  auto* confidence = row_of<float>(params.confidence, block);
  std::fill_n(confidence, params.tokens.size[1], 0.0F);
  const int64_t end = valid_end(params, block);
  int32_t run = 0;
  for (int64_t position = index_at(params.editable_start, block); position < end; ++position) {
    if (tokens[position] != params.mask_token_id) {
      ++run;
      continue;
    }
    ++open->num_open;
    const int32_t row = rows[position];
    if (row < 0) {
      open->skipped = true;
      continue;
    }
    Candidate candidate;
    candidate.id = value_at<int64_t>(params.ids, row);
    if (candidate.id < 0) {
      open->bad_logits = true;
      open->first_bad = std::min(open->first_bad, position);
      continue;
    }
    const float* stats = row_of<const float>(params.stats, row);
    candidate.position = static_cast<int32_t>(position);
    candidate.run = run;
    candidate.p = stats[params.raw_confidence ? kStatsRawConfidence : kStatsConfidence];
    candidate.rank = ranking_confidence(params.confidence_kind, stats, candidate.p);
    candidate.entropy = stats[kStatsEntropy];
    confidence[position] = candidate.p;
    open->candidates.push_back(candidate);
  }
}

/// Accepts the first `count` candidates in the order of `before`, ties by position.
template <typename Before>
void accept_first(std::vector<Candidate>* candidates, int64_t count, const Before& before) {
  thread_local std::vector<Candidate*> order;
  order.clear();
  for (Candidate& candidate : *candidates) {
    order.push_back(&candidate);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](const Candidate* a, const Candidate* b) { return before(*a, *b); });
  const int64_t limit = std::min<int64_t>(count, static_cast<int64_t>(order.size()));
  for (int64_t i = 0; i < limit; ++i) {
    order[static_cast<size_t>(i)]->accepted = true;
  }
}

bool higher_rank(const Candidate& a, const Candidate& b) {
  return a.rank > b.rank;
}

/// Tokens per step of the schedule: B / S, one more in the first B mod S steps.
int64_t scheduled_count(int64_t block_size, int64_t steps, int64_t step) {
  const int64_t index = std::min(step, steps - 1);
  const int64_t count = block_size / steps + (index < block_size % steps ? 1 : 0);
  return step >= steps ? std::max<int64_t>(1, count) : count;
}

/// Largest n with (n + 1)(1 - p(n)) < f over descending p, at least 1.
void accept_factor(std::vector<Candidate>* candidates, float factor) {
  thread_local std::vector<float> descending;
  descending.clear();
  for (const Candidate& candidate : *candidates) {
    descending.push_back(candidate.p);
  }
  std::sort(descending.begin(), descending.end(), [](float a, float b) { return a > b; });
  int64_t count = 1;
  for (size_t i = 0; i < descending.size(); ++i) {
    if (static_cast<float>(i + 2) * (1.0F - descending[i]) < factor) {
      count = static_cast<int64_t>(i) + 1;
    }
  }
  accept_first(candidates, count, [](const Candidate& a, const Candidate& b) { return a.p > b.p; });
}

/// Ascending entropy while the sum of the entropies before is at most the bound; the first always.
void accept_entropy(std::vector<Candidate>* candidates, float bound) {
  thread_local std::vector<float> ascending;
  ascending.clear();
  for (const Candidate& candidate : *candidates) {
    ascending.push_back(candidate.entropy);
  }
  std::sort(ascending.begin(), ascending.end());
  int64_t count = 0;
  float before = 0.0F;
  for (const float entropy : ascending) {
    if (count > 0 && !(before <= bound)) {
      break;
    }
    ++count;
    before += entropy;
  }
  accept_first(candidates, count,
               [](const Candidate& a, const Candidate& b) { return a.entropy < b.entropy; });
}

/// What the rule needs to know about one block.
struct BlockRule {
  float threshold = 0.0F;
  bool gate = false;
  bool last_step = false;
  int64_t scheduled = 1;
};

bool passes(const AcceptMaskFillParams& params, const BlockRule& rule, float p) {
  const bool admits_equal =
      params.rule == AcceptRule::kThresholdNonStrict || params.rule == AcceptRule::kLeftmostPrefix;
  return admits_equal ? p >= rule.threshold : p > rule.threshold;
}

void accept_passing(const AcceptMaskFillParams& params, const BlockRule& rule,
                    std::vector<Candidate>* candidates) {
  for (Candidate& candidate : *candidates) {
    candidate.accepted = passes(params, rule, candidate.p);
  }
}

/// The leading open positions that pass, the first one in any case.
void accept_prefix(const AcceptMaskFillParams& params, const BlockRule& rule, OpenSet* open) {
  bool is_first = true;
  for (Candidate& candidate : open->candidates) {
    if (candidate.position > open->first_bad || !(is_first || passes(params, rule, candidate.p))) {
      return;
    }
    candidate.accepted = true;
    // A forced first position ends the prefix.
    if (!passes(params, rule, candidate.p)) {
      return;
    }
    is_first = false;
  }
}

/// All that pass, the best one of each run above the low threshold, and the best one of all.
void accept_hierarchy(const AcceptMaskFillParams& params, const BlockRule& rule,
                      std::vector<Candidate>* candidates) {
  Candidate* best = nullptr;
  Candidate* best_of_run = nullptr;
  const auto accept_run = [&](Candidate* winner) {
    if (winner != nullptr && winner->p > params.low_threshold) {
      winner->accepted = true;
    }
  };
  accept_passing(params, rule, candidates);
  for (Candidate& candidate : *candidates) {
    if (best_of_run != nullptr && best_of_run->run != candidate.run) {
      accept_run(best_of_run);
      best_of_run = nullptr;
    }
    if (best_of_run == nullptr || higher_rank(candidate, *best_of_run)) {
      best_of_run = &candidate;
    }
    if (best == nullptr || higher_rank(candidate, *best)) {
      best = &candidate;
    }
  }
  accept_run(best_of_run);
  if (best != nullptr) {
    best->accepted = true;
  }
}

/// Applies the rule as if the gate were open.
void apply_rule(const AcceptMaskFillParams& params, const BlockRule& rule, OpenSet* open) {
  std::vector<Candidate>* candidates = &open->candidates;
  const int64_t passing =
      std::count_if(candidates->begin(), candidates->end(),
                    [&](const Candidate& candidate) { return passes(params, rule, candidate.p); });
  switch (params.rule) {
    case AcceptRule::kThreshold:
    case AcceptRule::kThresholdNonStrict:
      if (passing > 0) {
        return accept_passing(params, rule, candidates);
      }
      return accept_first(candidates, 1, higher_rank);
    case AcceptRule::kStatic:
      return accept_first(candidates, rule.scheduled, higher_rank);
    case AcceptRule::kDynamic:
      if (passing >= rule.scheduled) {
        return accept_passing(params, rule, candidates);
      }
      return accept_first(candidates, rule.scheduled, higher_rank);
    case AcceptRule::kSequential:
      return accept_first(candidates, rule.scheduled, [](const Candidate& a, const Candidate& b) {
        return a.position < b.position;
      });
    case AcceptRule::kFactor:
      return accept_factor(candidates, params.factor);
    case AcceptRule::kEntropyBound:
      return accept_entropy(candidates, params.entropy_bound);
    case AcceptRule::kLeftmostPrefix:
      return accept_prefix(params, rule, open);
    case AcceptRule::kHierarchy:
      return accept_hierarchy(params, rule, candidates);
  }
}

void decide(const AcceptMaskFillParams& params, const BlockRule& rule, OpenSet* open) {
  if (open->skipped || open->candidates.empty()) {
    return;
  }
  if (rule.last_step) {
    for (Candidate& candidate : open->candidates) {
      candidate.accepted = true;
    }
  } else {
    apply_rule(params, rule, open);
  }
  if (!rule.gate) {
    for (Candidate& candidate : open->candidates) {
      candidate.accepted = candidate.accepted && passes(params, rule, candidate.p);
    }
  }
}

BlockRule block_rule(const AcceptMaskFillParams& params, int64_t block) {
  const int64_t block_size = params.tokens.size[1];
  const int64_t steps = params.denoising_steps > 0 ? params.denoising_steps : block_size;
  const int64_t step = index_at(params.open_steps, block);
  BlockRule rule;
  rule.threshold =
      params.accept_threshold.as<const float>()[block * params.accept_threshold.stride[0]];
  rule.gate = params.gate.as<const uint8_t>()[block * params.gate.stride[0]] != 0;
  rule.last_step = params.force_accept_last_step && step >= steps - 1;
  rule.scheduled = scheduled_count(block_size, steps, step);
  return rule;
}

void write_block(const AcceptMaskFillParams& params, int64_t block, const BlockRule& rule,
                 const OpenSet& open) {
  int64_t* write_ids = params.write_ids.as<int64_t>() + block * params.write_ids.stride[0];
  std::fill_n(write_ids, params.tokens.size[1], int64_t{-1});
  int32_t written = 0;
  bool all_confident = !open.bad_logits && !open.skipped;
  for (const Candidate& candidate : open.candidates) {
    all_confident = all_confident && passes(params, rule, candidate.p);
    // A mask over a mask changes nothing.
    if (candidate.accepted && candidate.id != params.mask_token_id) {
      write_ids[candidate.position] = candidate.id;
      ++written;
    }
  }
  const int32_t left = open.num_open - written;
  int32_t flags = 0;
  flags |= left == 0 && !open.skipped ? kAcceptCommittable : 0;
  flags |= written == 0 ? kAcceptSameAsPrevious : kAcceptProgressed;
  flags |= all_confident ? kAcceptAllConfident : 0;
  flags |= open.bad_logits ? kAcceptBadLogits : 0;
  flags |= open.skipped ? kAcceptSkipped : 0;
  params.masks_left.as<int32_t>()[block * params.masks_left.stride[0]] = left;
  params.flags.as<int32_t>()[block * params.flags.stride[0]] = flags;
}

}  // namespace

Status accept_mask_fill(const AcceptMaskFillParams& params, const ExecContext& context) {
  const int64_t num_blocks = params.tokens.size[0];
  for (int64_t block = 0; block < num_blocks; ++block) {
    DIFFULEX_RETURN_IF_ERROR(check_block(params, block));
  }
  parallel_ranges(context, num_blocks, kAcceptBlockGrain, [&](int64_t begin, int64_t end) {
    thread_local OpenSet open;
    for (int64_t block = begin; block < end; ++block) {
      const BlockRule rule = block_rule(params, block);
      collect(params, block, &open);
      decide(params, rule, &open);
      write_block(params, block, rule, open);
    }
  });
  return {};
}

}  // namespace diffulex::cpu
