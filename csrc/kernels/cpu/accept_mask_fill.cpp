// SPDX-License-Identifier: Apache-2.0

// accept_mask_fill: which open positions of a block take their proposal. p is the probability of
// the proposal (compared with the threshold), c the ranking confidence.

#include <algorithm>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/data_checks.h"
#include "kernels/cpu/parallel.h"

namespace diffulex::cpu {
namespace {

constexpr const char* kOp = "accept_mask_fill";
// Blocks a thread should take at least; a block is a few hundred nanoseconds.
constexpr int64_t kBlockGrain = 64;

/// An open position whose row holds a usable proposal.
struct Candidate {
  int32_t position = 0;
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
  bool bad_logits = false;
  bool skipped = false;
};

int64_t token_at(const AcceptMaskFillParams& params, int64_t block, int64_t position) {
  return params.tokens.as<const int64_t>()[block * params.tokens.stride[0] + position];
}

int32_t row_at(const AcceptMaskFillParams& params, int64_t block, int64_t position) {
  return params.row_index.as<const int32_t>()[block * params.row_index.stride[0] + position];
}

int64_t valid_len(const AcceptMaskFillParams& params, int64_t block) {
  return params.valid_len.present() ? index_at(params.valid_len, block) : params.tokens.size[1];
}

Status check_block(const AcceptMaskFillParams& params, int64_t block) {
  const int64_t block_size = params.tokens.size[1];
  const std::string range = "0 to " + std::to_string(block_size);
  const int64_t start = index_at(params.editable_start, block);
  if (start < 0 || start > block_size) {
    return data_error(kOp, "editable_start", block, range, start);
  }
  const int64_t valid = valid_len(params, block);
  if (valid < 0 || valid > block_size) {
    return data_error(kOp, "valid_len", block, range, valid);
  }
  const int64_t steps = index_at(params.open_steps, block);
  if (steps < 0) {
    return data_error(kOp, "open_steps", block, "a value >= 0", steps);
  }
  for (int64_t position = start; position < valid; ++position) {
    const int64_t row = row_at(params, block, position);
    if (token_at(params, block, position) == params.mask_token_id &&
        (row < -1 || row >= params.ids.size[0])) {
      return make_error(StatusCode::kOutOfRange, "diffulex::", kOp, ": row_index[", block, "][",
                        position, "]: expected -1 or a row below ", params.ids.size[0], ", got ",
                        row);
    }
  }
  return {};
}

float ranking(const AcceptMaskFillParams& params, const float* stats, float p) {
  switch (params.confidence_kind) {
    case ConfidenceKind::kMargin:
      return stats[kStatsMaxProb] - stats[kStatsSecondProb];
    case ConfidenceKind::kNegEntropy:
      return -stats[kStatsEntropy];
    case ConfidenceKind::kMaxProb:
      break;
  }
  return p;
}

/// Collects the open set and writes the confidence output of the block.
void collect(const AcceptMaskFillParams& params, int64_t block, OpenSet* open) {
  open->candidates.clear();
  open->num_open = 0;
  open->bad_logits = false;
  open->skipped = false;
  float* confidence = params.confidence.as<float>() + block * params.confidence.stride[0];
  std::fill_n(confidence, params.tokens.size[1], 0.0F);
  const int64_t end = valid_len(params, block);
  for (int64_t position = index_at(params.editable_start, block); position < end; ++position) {
    if (token_at(params, block, position) != params.mask_token_id) {
      continue;
    }
    ++open->num_open;
    const int32_t row = row_at(params, block, position);
    if (row < 0) {
      open->skipped = true;
      continue;
    }
    Candidate candidate;
    candidate.id = params.ids.as<const int64_t>()[row * params.ids.stride[0]];
    if (candidate.id < 0) {
      open->bad_logits = true;
      continue;
    }
    const float* stats = params.stats.as<const float>() + row * params.stats.stride[0];
    candidate.position = static_cast<int32_t>(position);
    candidate.p = stats[params.raw_confidence ? kStatsRawConfidence : kStatsConfidence];
    candidate.rank = ranking(params, stats, candidate.p);
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
  return params.rule == AcceptRule::kThresholdNonStrict ? p >= rule.threshold : p > rule.threshold;
}

void accept_passing(const AcceptMaskFillParams& params, const BlockRule& rule,
                    std::vector<Candidate>* candidates) {
  for (Candidate& candidate : *candidates) {
    candidate.accepted = passes(params, rule, candidate.p);
  }
}

/// Applies the rule as if the gate were open.
void apply_rule(const AcceptMaskFillParams& params, const BlockRule& rule,
                std::vector<Candidate>* candidates) {
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
    apply_rule(params, rule, &open->candidates);
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
    if (candidate.accepted) {
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
  parallel_ranges(context, num_blocks, kBlockGrain, [&](int64_t begin, int64_t end) {
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
