// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/threshold_block.h"
#include "core/toy_model.h"
#include "diffulex/core/options.h"
#include "diffulex/core/sampler_output.h"

// Reference samplers of the property tests, after sections 4, 6 and 7 of the sampler specification.
// What they see is gathered twice: by the simulator from the arrays of a plan, by the brute-force
// decoder from its own state.

namespace diffulex::test {

/// Descriptor of one position; not valid without ids.
struct ToyDescriptor {
  std::vector<int64_t> ids;
  std::vector<float> probs;
  float residual = 0.0F;

  [[nodiscard]] bool is_valid() const { return !ids.empty(); }
};

/// One block as a sampler sees it.
struct ToyBlock {
  std::vector<int64_t> tokens;
  std::vector<int64_t> proposals;  // -1 = the position has no row
  std::vector<float> confidence;   // of the proposal
  int32_t editable_start = 0;
  int64_t mask_token_id = 0;
  bool gate = false;
  float accept_threshold = 0.0F;
  float edit_threshold = 0.0F;
  int32_t open_steps = 0;       // earlier ones
  int32_t post_edit_steps = 0;  // earlier ones
};

/// What a sampler decides for one block.
struct ToyVerdict {
  std::vector<int64_t> writes;
  std::vector<ToyDescriptor> descriptors;
  int32_t flags = 0;
  float same_token_ratio = 1.0F;
};

inline constexpr int32_t kToyMaxPostEditSteps = 3;
inline constexpr float kToyConfident = 0.5F;

[[nodiscard]] inline ToyVerdict toy_mask_fill(const ToyBlock& block) {
  ToyVerdict verdict;
  verdict.writes.assign(block.tokens.size(), -1);
  ThresholdBlock view;
  view.tokens = block.tokens.data();
  view.proposals = block.proposals.data();
  view.confidence = block.confidence.data();
  view.block_size = static_cast<int32_t>(block.tokens.size());
  view.editable_start = block.editable_start;
  view.mask_token_id = block.mask_token_id;
  view.threshold = block.accept_threshold;
  view.gate = block.gate;
  const int32_t left = accept_by_threshold(view, verdict.writes.data());
  verdict.flags = left == 0 ? kSamplerCommittable : 0;
  return verdict;
}

/// Share of the decided positions whose proposal is what stands there; 1 if none is decided.
[[nodiscard]] inline float toy_same_token_ratio(const ToyBlock& block) {
  int32_t num_decided = 0;
  int32_t num_same = 0;
  for (auto i = static_cast<size_t>(block.editable_start); i < block.tokens.size(); ++i) {
    if (block.tokens[i] != block.mask_token_id) {
      ++num_decided;
      num_same += block.proposals[i] == block.tokens[i] ? 1 : 0;
    }
  }
  return num_decided == 0 ? 1.0F : static_cast<float>(num_same) / static_cast<float>(num_decided);
}

/// Section 6: M2T by the threshold rule, T2T above the edit threshold, bounded post-edit steps.
[[nodiscard]] inline ToyVerdict toy_edit(const ToyBlock& block) {
  ToyVerdict verdict = toy_mask_fill(block);
  const size_t size = block.tokens.size();
  const auto first = static_cast<size_t>(block.editable_start);
  const int32_t open_steps = block.open_steps + (block.gate ? 1 : 0);
  const bool is_timed_out = open_steps >= static_cast<int32_t>(size) + kToyMaxPostEditSteps;
  bool has_open = false;
  bool is_changed = false;
  bool has_mask_left = false;
  for (size_t i = first; i < size; ++i) {
    const bool is_open = block.tokens[i] == block.mask_token_id;
    has_open = has_open || is_open;
    if ((is_open && is_timed_out) || (!is_open && block.proposals[i] != block.tokens[i] &&
                                      block.confidence[i] > block.edit_threshold)) {
      verdict.writes[i] = block.proposals[i];
    }
    is_changed = is_changed || verdict.writes[i] >= 0;
    has_mask_left = has_mask_left || (is_open && verdict.writes[i] < 0);
  }
  const int32_t post_edit_steps = block.post_edit_steps + (has_open ? 0 : 1);
  const bool is_spent = !has_open && post_edit_steps >= kToyMaxPostEditSteps;
  const bool is_done = !has_mask_left && (!is_changed || is_timed_out || is_spent);
  verdict.flags = (is_done ? kSamplerCommittable : 0) | (is_timed_out ? kSamplerTimedOut : 0) |
                  (is_changed ? 0 : kSamplerSameAsPrevious);
  verdict.same_token_ratio = toy_same_token_ratio(block);
  return verdict;
}

/// Section 7: leftmost prefix, full refresh, descriptors; forced at open step B.
[[nodiscard]] inline ToyVerdict toy_dmax(const ToyBlock& block, int32_t top_k) {
  ToyVerdict verdict;
  const size_t size = block.tokens.size();
  verdict.writes.assign(size, -1);
  verdict.descriptors.resize(size);
  const int32_t open_steps = block.open_steps + (block.gate ? 1 : 0);
  const bool is_forced = open_steps >= static_cast<int32_t>(size);
  bool is_prefix = true;
  bool has_filled = false;
  bool is_changed = false;
  bool is_confident = true;
  bool has_mask_left = false;
  for (auto i = static_cast<size_t>(block.editable_start); i < size; ++i) {
    is_confident = is_confident && block.confidence[i] >= kToyConfident;
    if (block.tokens[i] != block.mask_token_id) {
      verdict.writes[i] = block.proposals[i];
      is_changed = is_changed || block.proposals[i] != block.tokens[i];
    } else {
      const bool passes = block.confidence[i] >= block.accept_threshold;
      if (is_forced || (is_prefix && passes) || (is_prefix && !has_filled && block.gate)) {
        verdict.writes[i] = block.proposals[i];
        is_changed = true;
        has_filled = true;
      }
      is_prefix = is_prefix && passes;
      has_mask_left = has_mask_left || verdict.writes[i] < 0;
    }
    if (verdict.writes[i] >= 0) {
      ToyDescriptor& descriptor = verdict.descriptors[i];
      float left = 1.0F;
      for (int32_t k = 0; k < top_k; ++k) {
        descriptor.ids.push_back(verdict.writes[i]);
        descriptor.probs.push_back(left * block.confidence[i]);
        left -= descriptor.probs.back();
      }
      descriptor.residual = std::max(left, 0.0F);
    }
  }
  const bool is_done = !has_mask_left && (is_confident || !is_changed || is_forced);
  verdict.flags = (is_done ? kSamplerCommittable : 0) | (is_confident ? kSamplerAllConfident : 0);
  verdict.same_token_ratio = toy_same_token_ratio(block);
  return verdict;
}

/// The sampler that belongs to `options`.
[[nodiscard]] inline ToyVerdict toy_sample(const EngineOptions& options, const ToyBlock& block) {
  if (options.strategy == "dmax") {
    return toy_dmax(block, options.token_merge_top_k);
  }
  return options.is_editing ? toy_edit(block) : toy_mask_fill(block);
}

/// What a soft embedding is to the toy model: a token of its own.
[[nodiscard]] inline int64_t toy_soft_token(const ToyDescriptor& descriptor) {
  uint64_t value = 0x50F7;
  const auto fold = [&value](float number) {
    uint32_t bits = 0;
    std::memcpy(&bits, &number, sizeof(bits));
    value = toy_hash(value, bits);
  };
  for (size_t k = 0; k < descriptor.ids.size(); ++k) {
    value = toy_hash(value, static_cast<uint64_t>(descriptor.ids[k]));
    fold(descriptor.probs[k]);
  }
  fold(descriptor.residual);
  return static_cast<int64_t>(value);
}

}  // namespace diffulex::test
