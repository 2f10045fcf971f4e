// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/block_rules.h"
#include "diffulex/core/canvas_rules.h"
#include "diffulex/core/dual_cache_rules.h"
#include "diffulex/core/sampler_flags.h"
#include "diffulex/export.h"

// The phases of a decode step of strategies with a block buffer, for host and device: what
// block_rules.h does to single blocks, put in the order of a step.
//
//   enter_buffer            activation; which rows the forward runs and stores
//   (forward, sampler)
//   count_sampler_steps     block_rules.h
//   apply_write             of every position the sampler wrote; block_rules.h
//   apply_verdict           of every block that was sampled
//   close_buffer            freeze, store, slide
//   settle_buffer           stop ids, settled positions
//   judge_step              end of the request

namespace diffulex {

/// Tokens of a request from position `begin` on, indexed by absolute position.
struct TokenWindow {
  int32_t* data = nullptr;  // token of position `begin`; owner: the caller
  int32_t begin = 0;

  DIFFULEX_HOST_DEVICE int32_t& operator[](int32_t position) const noexcept {
    return data[position - begin];
  }
};

/// Entries of a window over Q rows: the token before the buffer, those of the buffer, and the mask
/// that ends every scan.
[[nodiscard]] DIFFULEX_HOST_DEVICE constexpr int32_t window_len(int32_t num_rows) noexcept {
  return num_rows + 2;
}

/// What a forward runs of the buffer it entered.
struct BufferForward {
  int32_t first_pos = 0;       // position of the first row
  int32_t num_valid_rows = 0;  // leading rows that are real
  int32_t store_end = 0;       // rows of positions [first_pos, store_end) are stored
  bool has_activated = false;  // a block was opened
  bool has_sampling = false;   // ACTIVE blocks are run and sampled
};

/// Counts the forward, opens at most one block and marks what will be stored.
DIFFULEX_HOST_DEVICE inline BufferForward enter_buffer(const BlockRules& rules,
                                                       BufferState& state) noexcept {
  BufferForward forward;
  forward.has_activated = begin_buffer_step(rules, state);
  forward.first_pos = state.context_len;
  forward.num_valid_rows = valid_end(rules, state) - forward.first_pos;
  forward.store_end = storable_end(rules, state);
  forward.has_sampling = frozen_end(rules, state) < valid_end(rules, state);
  mark_stored(rules, state, forward.first_pos, forward.store_end);
  return forward;
}

/// Last position the forward stores, -1 = none. With shifted logits, which no editing sampler has,
/// its row predicts the first position after the cache and is saved for the forwards to come.
DIFFULEX_HOST_DEVICE inline int32_t last_stored_pos(const BufferForward& forward) noexcept {
  return forward.store_end > forward.first_pos ? forward.store_end - 1 : -1;
}

/// Takes over the sampler's verdict on a block that was sampled; returns whether one of its rows
/// had no finite candidate.
DIFFULEX_HOST_DEVICE inline bool apply_verdict(Block& block, int32_t flags,
                                               float same_token_ratio) noexcept {
  block.commit_ready = (flags & (kSamplerCommittable | kSamplerSkipped)) == kSamplerCommittable;
  block.same_as_previous = (flags & kSamplerSameAsPrevious) != 0;
  block.all_confident = (flags & kSamplerAllConfident) != 0;
  block.same_token_ratio = same_token_ratio;
  return (flags & kSamplerBadLogits) != 0;
}

/// Freezes and stores blocks after the writes and verdicts of a step.
DIFFULEX_HOST_DEVICE inline Transitions close_buffer(const BlockRules& rules, BufferState& state,
                                                     bool is_decode) noexcept {
  const Transitions transitions = scan_transitions(rules, state);
  count_held(state, is_decode, transitions);
  return transitions;
}

/// Finds what became final, after close_buffer. `tokens` must reach from the first position that
/// was not settled to a mask id after the end of the previous buffer.
template <typename Tokens>
DIFFULEX_HOST_DEVICE inline void settle_buffer(const BlockRules& rules, BufferState& state,
                                               bool has_sampling, const Tokens& tokens) noexcept {
  if (rules.is_editing && has_sampling) {
    find_stop(rules, state, tokens);
  }
  advance_settled(rules, state, tokens);
}

/// Whether a decode step that sampled came to nothing, which no sampler that only fills may do. An
/// editing sampler may take a step to confirm what stands there.
DIFFULEX_HOST_DEVICE inline bool is_stuck(const BlockRules& rules, const Transitions& transitions,
                                          int32_t new_tokens) noexcept {
  return !rules.is_editing && new_tokens == 0 &&
         transitions.num_frozen + transitions.num_stored == 0;
}

/// How the request stands after a step; kNone = it goes on. `limits.nfe` counts the step.
DIFFULEX_HOST_DEVICE inline FinishReason judge_step(const BufferState& state,
                                                    const StopLimits& limits,
                                                    bool has_failed) noexcept {
  return has_failed ? FinishReason::kError : check_stop(state, limits);
}

/// A decoding request as a device keeps it between steps: the fields in batch_arrays.def. A plain
/// struct, copied bytewise.
struct DecodeRequest {
#define DIFFULEX_FIELD(type, name, ...) type name __VA_ARGS__;
#include "diffulex/core/batch_arrays.def"
};

}  // namespace diffulex
