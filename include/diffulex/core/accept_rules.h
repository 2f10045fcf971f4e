// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "diffulex/core/sampler_flags.h"
#include "diffulex/export.h"

// The one text of the acceptance rules: what a sampler decides of one position or one block, as
// pure functions that compile for host and device. acceptance.h applies them to whole blocks on the
// host; the CUDA kernels give every position a thread, and do the counting and ordering between
// threads.
//
// A position is open while it holds the mask token, decoded afterwards. It is ready when it has a
// row of statistics whose proposal is an id, bad when that row has no finite candidate, and missing
// without a row. p is the probability of the proposal.

namespace diffulex {

/// Columns of the statistics of a row, all float32, at the row's temperature.
enum TokenStatsColumn : int32_t {
  kStatsConfidence = 0,     // probability of the chosen id
  kStatsMaxProb = 1,        // probability of the most likely candidate
  kStatsSecondProb = 2,     // probability of the second candidate, 0 if there is none
  kStatsEntropy = 3,        // -sum p ln p over the normaliser, nats
  kStatsLogSumExp = 4,      // natural log of the normaliser
  kStatsMaxLogit = 5,       // logit of the most likely candidate, before the temperature
  kStatsRawConfidence = 6,  // probability of the chosen id at temperature 1
  kStatsBadCount = 7,       // number of NaN or infinite logits in the row
  kTokenStatsColumns = 8,
};

/// Which open positions a step accepts.
enum class AcceptRule : int32_t {
  kThreshold = 0,           // p > tau, else the best one if the gate is open
  kThresholdNonStrict = 1,  // p >= tau, else the best one if the gate is open
  kStatic = 2,              // the k_s best
  kDynamic = 3,             // those above tau if at least k_s, else the k_s best
  kSequential = 4,          // the first k_s
  kFactor = 5,              // largest n with (n + 1)(1 - p(n)) < factor
  kEntropyBound = 6,        // ascending entropy while the exclusive prefix sum <= bound
  kLeftmostPrefix = 7,      // from the left while p >= tau, the first one at least
  kHierarchy = 8,           // p > tau, the best of each run of masks above low_threshold, the best
};

/// What ranks positions (never compared with the threshold).
enum class ConfidenceKind : int32_t { kMaxProb = 0, kMargin = 1, kNegEntropy = 2 };

/// Largest number of positions of a block in the acceptance rules.
inline constexpr int64_t kMaxAcceptPositions = 1024;

/// Probability of the argmax from which a position counts as confident in the rule of DMax; a
/// constant of the sampler, independent of the threshold.
inline constexpr float kDmaxConfident = 0.9F;

// All rules.

/// p of a row: at temperature 1 with `raw_confidence`.
DIFFULEX_HOST_DEVICE inline float proposal_probability(const float* stats,
                                                       bool raw_confidence) noexcept {
  return stats[raw_confidence ? kStatsRawConfidence : kStatsConfidence];
}

/// Ranking confidence of a row whose proposal has the given probability.
DIFFULEX_HOST_DEVICE inline float ranking_confidence(ConfidenceKind kind, const float* stats,
                                                     float probability) noexcept {
  switch (kind) {
    case ConfidenceKind::kMargin:
      return stats[kStatsMaxProb] - stats[kStatsSecondProb];
    case ConfidenceKind::kNegEntropy:
      return -stats[kStatsEntropy];
    case ConfidenceKind::kMaxProb:
      break;
  }
  return probability;
}

/// True when the position of the first key comes before the other: the larger key, then the lower
/// position.
DIFFULEX_HOST_DEVICE inline bool ranks_before(float key, int32_t index, float other_key,
                                              int32_t other_index) noexcept {
  return key > other_key || (key == other_key && index < other_index);
}

/// Share of the decoded positions whose proposal is the token they hold; 1 if none is decoded.
DIFFULEX_HOST_DEVICE inline float same_token_share(int32_t num_same, int32_t num_decoded) noexcept {
  return num_decoded == 0 ? 1.0F : static_cast<float>(num_same) / static_cast<float>(num_decoded);
}

/// What a step did to a block.
struct AcceptSummary {
  int32_t masks_left = 0;      // open positions after the writes
  bool is_settled = true;      // the block may end once it has no open positions
  bool has_changed = false;    // a position got another token
  bool has_filled = false;     // an open one did
  bool all_confident = false;  // every position that counts passes
  bool timed_out = false;
  bool has_bad = false;     // a row without a finite candidate
  bool is_skipped = false;  // a row was missing: nothing was written
};

/// The bits of SamplerFlag.
DIFFULEX_HOST_DEVICE inline int32_t accept_flags(const AcceptSummary& summary) noexcept {
  int32_t flags = 0;
  flags |= summary.masks_left == 0 && summary.is_settled && !summary.is_skipped
               ? kSamplerCommittable
               : 0;
  flags |= summary.has_changed ? 0 : kSamplerSameAsPrevious;
  flags |= summary.all_confident ? kSamplerAllConfident : 0;
  flags |= summary.has_filled ? kSamplerProgressed : 0;
  flags |= summary.timed_out ? kSamplerTimedOut : 0;
  flags |= summary.has_bad ? kSamplerBadLogits : 0;
  flags |= summary.is_skipped ? kSamplerSkipped : 0;
  return flags;
}

// Filling masks.

/// Constants of the samplers that only fill masks.
struct MaskFillRules {
  int64_t mask_token_id = 0;
  AcceptRule rule = AcceptRule::kThreshold;
  ConfidenceKind confidence_kind = ConfidenceKind::kMaxProb;
  int32_t denoising_steps = 0;  // S of the schedule; 0 = B
  float factor = 1.0F;
  float entropy_bound = 0.0F;
  float low_threshold = 0.0F;   // of the hierarchy rule
  bool raw_confidence = false;  // compare the probability at temperature 1
  bool force_accept_last_step = false;
};

/// Positions that step `step` of the schedule takes: B / S, one more in the first B mod S steps,
/// and after the schedule its last count.
DIFFULEX_HOST_DEVICE inline int32_t scheduled_count(int32_t block_size, int32_t num_steps,
                                                    int32_t step) noexcept {
  const int32_t index = step < num_steps ? step : num_steps - 1;
  const int32_t count = block_size / num_steps + (index < block_size % num_steps ? 1 : 0);
  return step >= num_steps && count < 1 ? 1 : count;
}

DIFFULEX_HOST_DEVICE inline bool passes_threshold(AcceptRule rule, float probability,
                                                  float threshold) noexcept {
  const bool admits_equal =
      rule == AcceptRule::kThresholdNonStrict || rule == AcceptRule::kLeftmostPrefix;
  return admits_equal ? probability >= threshold : probability > threshold;
}

/// Place of a ready position in the order of the rule: the larger key first.
DIFFULEX_HOST_DEVICE inline float ranking_key(const MaskFillRules& rules, const float* stats,
                                              float probability, int32_t index) noexcept {
  switch (rules.rule) {
    case AcceptRule::kSequential:
      return -static_cast<float>(index);
    case AcceptRule::kFactor:
      return probability;
    case AcceptRule::kEntropyBound:
      return -stats[kStatsEntropy];
    default:
      break;
  }
  return ranking_confidence(rules.confidence_kind, stats, probability);
}

/// The value of a position that the rules with sums over the order add up: its entropy, or p.
DIFFULEX_HOST_DEVICE inline float ordered_value_of(AcceptRule rule, float key,
                                                   float probability) noexcept {
  return rule == AcceptRule::kEntropyBound ? -key : probability;
}

/// How many positions of the order the rule takes. `by_threshold`: those that pass instead.
/// `ordered` holds ordered_value_of of the ready positions in their order.
DIFFULEX_HOST_DEVICE inline int32_t rank_limit(const MaskFillRules& rules, int32_t block_size,
                                               const float* ordered, int32_t num_ready,
                                               int32_t num_passing, int32_t step,
                                               bool& by_threshold) noexcept {
  const int32_t num_steps = rules.denoising_steps > 0 ? rules.denoising_steps : block_size;
  const int32_t scheduled = scheduled_count(block_size, num_steps, step);
  by_threshold = false;
  if (rules.force_accept_last_step && step >= num_steps - 1) {
    return num_ready;
  }
  switch (rules.rule) {
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
        if (static_cast<float>(n + 1) * (1.0F - ordered[n - 1]) < rules.factor) {
          limit = n;
        }
      }
      return limit;
    }
    case AcceptRule::kEntropyBound: {
      float before = 0.0F;
      int32_t limit = 0;
      while (limit < num_ready && (limit == 0 || before <= rules.entropy_bound)) {
        before += ordered[limit];
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

/// What the rules that look at the place of a position accept beyond the order. `first_open` and
/// `first_failing` are places of the block, and matter to the leftmost prefix only;
/// `is_best_of_run` tells whether no ready position of the same run of open positions ranks before
/// this one.
template <typename IsBestOfRun>
DIFFULEX_HOST_DEVICE inline bool accepts_by_place(const MaskFillRules& rules, uint32_t place,
                                                  bool is_passing, float probability,
                                                  uint32_t first_open, uint32_t first_failing,
                                                  const IsBestOfRun& is_best_of_run) {
  if (rules.rule == AcceptRule::kLeftmostPrefix) {
    return place < first_failing || place == first_open;
  }
  if (rules.rule == AcceptRule::kHierarchy) {
    return is_passing || (probability > rules.low_threshold && is_best_of_run());
  }
  return false;
}

/// Whether an accepted position is written: a closed gate leaves only what passes the threshold on
/// its own, and a mask over a mask changes nothing.
DIFFULEX_HOST_DEVICE inline bool writes_mask_fill(const MaskFillRules& rules, bool gate,
                                                  bool is_passing, int64_t id) noexcept {
  return (gate || is_passing) && id != rules.mask_token_id;
}

// Filling masks and rewriting decoded positions.

/// Constants of the samplers that edit.
struct EditRules {
  int64_t mask_token_id = 0;
  ConfidenceKind confidence_kind = ConfidenceKind::kMaxProb;
  bool raw_confidence = true;  // compare the probability at temperature 1
};

/// Whether a ready open position takes its proposal.
DIFFULEX_HOST_DEVICE inline bool passes_edit_mask(float probability,
                                                  float accept_threshold) noexcept {
  return probability > accept_threshold;
}

/// Whether a ready decoded position takes its proposal.
DIFFULEX_HOST_DEVICE inline bool accepts_edit(int64_t token, int64_t id, float probability,
                                              float edit_threshold) noexcept {
  return id != token && probability > edit_threshold;
}

/// Where a block stands in its life.
struct EditPhase {
  bool timed_out = false;
  bool is_over = false;  // more steps without an open position than allowed
  bool is_last = false;  // the last step without an open position that is allowed, or a later one
};

/// `open_steps` and `post_edit_steps` count the steps before this one; `max_post_edit_steps` is the
/// number of steps without an open position that the request allows.
DIFFULEX_HOST_DEVICE inline EditPhase edit_phase(int32_t max_post_edit_steps, int32_t block_size,
                                                 int32_t open_steps, int32_t post_edit_steps,
                                                 bool gate, bool has_open,
                                                 bool is_skipped) noexcept {
  const int64_t limit = max_post_edit_steps;
  const int64_t num_open_steps = int64_t{open_steps} + (gate ? 1 : 0);
  const int64_t num_post_steps = int64_t{post_edit_steps} + (has_open ? 0 : 1);
  EditPhase phase;
  phase.timed_out = !is_skipped && num_open_steps >= block_size + limit;
  phase.is_over = !has_open && num_post_steps > limit;
  phase.is_last = !has_open && num_post_steps >= limit;
  return phase;
}

/// Whether a position takes its proposal in this phase; a block that timed out is filled.
DIFFULEX_HOST_DEVICE inline bool writes_edit(const EditPhase& phase, bool is_accepted, bool is_open,
                                             bool is_ready) noexcept {
  bool is_written = is_accepted && !phase.is_over;
  if (phase.timed_out) {
    is_written = is_accepted || (is_open && is_ready);
  }
  return is_written;
}

/// Whether a block without an open position may end with this step.
DIFFULEX_HOST_DEVICE inline bool is_edit_settled(int32_t max_post_edit_steps,
                                                 const EditPhase& phase,
                                                 bool none_accepted) noexcept {
  return none_accepted || phase.timed_out || max_post_edit_steps == 0 || phase.is_last;
}

// DMax: the leftmost prefix of masks, and a new proposal for every decoded position.

/// Constants of the sampler.
struct DmaxRules {
  int64_t mask_token_id = 0;
  bool fast_path = false;  // decoded positions count as certain
};

/// The two probabilities of a ready position that the rule uses.
struct DmaxProbabilities {
  float proposal = 0.0F;
  float argmax = 0.0F;
};

/// `stats` is the row of the position, `listed` the probability of its first listed candidate or
/// null without a list; a certain position is the token itself.
DIFFULEX_HOST_DEVICE inline DmaxProbabilities dmax_probabilities(const float* stats,
                                                                 const float* listed,
                                                                 bool is_certain) noexcept {
  DmaxProbabilities probabilities;
  probabilities.proposal = is_certain ? 1.0F : stats[kStatsRawConfidence];
  probabilities.argmax = stats[kStatsMaxProb];
  if (listed != nullptr) {
    probabilities.argmax = *listed;
  }
  probabilities.argmax = is_certain ? 1.0F : probabilities.argmax;
  return probabilities;
}

DIFFULEX_HOST_DEVICE inline bool passes_dmax(float probability, float threshold) noexcept {
  return probability >= threshold;
}

/// Whether the block may end with this position as it is; `argmax_probability` is that of the
/// position's row.
DIFFULEX_HOST_DEVICE inline bool is_dmax_confident(float argmax_probability) noexcept {
  return argmax_probability >= kDmaxConfident;
}

/// Whether the block has had its B steps with an open gate, `open_steps` before this one.
DIFFULEX_HOST_DEVICE inline bool dmax_timed_out(int32_t block_size, int32_t open_steps, bool gate,
                                                bool is_skipped) noexcept {
  const int64_t num_open_steps = int64_t{open_steps} + (gate ? 1 : 0);
  return !is_skipped && num_open_steps >= block_size;
}

/// Whether a ready position of a block without missing rows takes its proposal.
DIFFULEX_HOST_DEVICE inline bool writes_dmax(bool is_decoded, bool timed_out, bool gate,
                                             uint32_t place, uint32_t first_open,
                                             uint32_t first_failing) noexcept {
  const bool is_forced = gate && place == first_open;
  return is_decoded || timed_out || place < first_failing || is_forced;
}

/// Whether the block may end once it has no open positions.
DIFFULEX_HOST_DEVICE inline bool is_dmax_settled(bool all_confident, bool has_changed,
                                                 bool timed_out) noexcept {
  return all_confident || !has_changed || timed_out;
}

/// What the merge descriptor of a position is made of.
struct MergeSource {
  const int64_t* topk_ids = nullptr;  // of the row, descending; with has_list
  const float* topk_probs = nullptr;
  const int64_t* argmax_id = nullptr;  // instead of topk_ids[0]; with has_argmax
  int64_t id = -1;                     // the proposal, the only entry without a list
  float argmax_probability = 0.0F;
  bool has_list = false;
  bool has_argmax = false;
  bool is_valid = false;    // the position gets a descriptor
  bool is_certain = false;  // it is the token itself
};

/// Writes the `count` entries of a descriptor and returns the weight of the mask embedding.
DIFFULEX_HOST_DEVICE inline float write_merge_descriptor(const DmaxRules& rules,
                                                         const MergeSource& source, int32_t count,
                                                         int64_t* ids, float* probs) noexcept {
  float total = 0.0F;
  bool is_listed = source.is_valid;
  for (int32_t k = 0; k < count; ++k) {
    int64_t id = -1;
    float probability = 0.0F;
    if (is_listed && source.is_certain) {
      id = k == 0 ? source.id : -1;
      probability = k == 0 ? 1.0F : 0.0F;
    } else if (is_listed && !source.has_list) {
      id = source.id;
      probability = source.argmax_probability;
    } else if (is_listed) {
      id = source.topk_ids[k];
      probability = source.topk_probs[k];
      if (k == 0 && source.has_argmax) {
        id = *source.argmax_id;
      }
    }
    is_listed = is_listed && id >= 0;  // a list ends at its first empty entry
    ids[k] = is_listed ? id : rules.mask_token_id;
    probs[k] = is_listed ? probability : 0.0F;
    total += is_listed ? probability : 0.0F;
  }
  return source.is_valid && !source.is_certain ? fmaxf(0.0F, 1.0F - total) : 0.0F;
}

// Canvases: draws within an entropy bound.

/// Constants of the sampler.
struct GemmaRules {
  float entropy_bound = 0.0F;
  int32_t stability_threshold = 0;  // previous argmax canvases that must equal the current one
  float confidence_threshold = 0.0F;
};

/// Entropy by which a position is ordered: NaN comes last, like an infinite one.
DIFFULEX_HOST_DEVICE inline float ordering_entropy(float entropy) noexcept {
  return entropy != entropy ? INFINITY : entropy;
}

/// Whether the bound admits the position of the given rank; `before` is the sum of the entropies
/// ahead of it.
DIFFULEX_HOST_DEVICE inline bool is_within_entropy_bound(int64_t rank, double before,
                                                         float bound) noexcept {
  return rank == 0 || before <= static_cast<double>(bound);
}

/// What a step found out about a canvas of `count` positions.
struct CanvasVerdict {
  bool is_usable = false;     // no bad and no missing row
  bool is_confident = false;  // the mean entropy is low
  bool is_converged = false;  // the canvas becomes its argmax
};

/// `total_entropy` is the sum over all positions; `stable_run` counts the equal argmax canvases
/// before this one, -1 without a previous one.
DIFFULEX_HOST_DEVICE inline CanvasVerdict judge_canvas(const GemmaRules& rules, int32_t count,
                                                       double total_entropy, int32_t stable_run,
                                                       int32_t steps_left, bool is_same_argmax,
                                                       bool has_bad, bool is_skipped) noexcept {
  CanvasVerdict verdict;
  verdict.is_usable = !is_skipped && !has_bad;
  verdict.is_confident =
      verdict.is_usable && count > 0 &&
      total_entropy / static_cast<double>(count) < static_cast<double>(rules.confidence_threshold);
  const int64_t run = stable_run >= 0 && is_same_argmax ? int64_t{stable_run} + 1 : 0;
  const bool is_stable = run >= rules.stability_threshold;
  const bool is_last = count > 0 && steps_left == 1;
  verdict.is_converged = verdict.is_usable && (is_last || (verdict.is_confident && is_stable));
  return verdict;
}

/// The bits of SamplerFlag of a canvas.
DIFFULEX_HOST_DEVICE inline int32_t canvas_flags(const CanvasVerdict& verdict, bool has_changed,
                                                 bool has_bad, bool is_skipped) noexcept {
  int32_t flags = 0;
  flags |= has_changed ? 0 : kSamplerSameAsPrevious;
  flags |= verdict.is_confident ? kSamplerAllConfident : 0;
  flags |= has_bad ? kSamplerBadLogits : 0;
  flags |= is_skipped ? kSamplerSkipped : 0;
  flags |= verdict.is_converged ? kSamplerConverged : 0;
  return flags;
}

}  // namespace diffulex
