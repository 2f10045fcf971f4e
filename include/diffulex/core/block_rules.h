// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/block.h"
#include "diffulex/core/status_enums.h"
#include "diffulex/export.h"

// The one implementation of the block and buffer transitions of strategies that decode in a block
// buffer: pure functions over plain structs, compilable for host and device. The scheduler calls
// them on the host; a device-resident decode loop calls the same code.
//
// Block status table (scanned in buffer order after the writes of a step):
//
//   DUMMY    -> ACTIVE    begin_buffer_step: allowed, and the last block is far enough
//   ACTIVE   -> TO_CACHE  complete, commit_ready, no predecessor before TO_CACHE: tokens frozen
//   TO_CACHE -> IN_CACHE  stored by this forward: C += B, the buffer slides
//
// With stores_settled an ACTIVE block without a mask is stored too. Where the step then rewrites
// none of its tokens and freezes it, that KV is final, and the block goes through TO_CACHE to
// IN_CACHE in the same scan.
//
// Samplers that only fill masks settle a position when they write it. Editing samplers may rewrite
// any editable position of an ACTIVE block, so their positions settle when the block is frozen.
//
// `tokens` is the token store of the request, indexed by absolute position: a pointer to position
// 0, or a TokenWindow of decode_rules.h. It must reach to the end of the buffer and hold the mask
// id at every position not yet written, beyond the buffer too: sliding then needs no write.

namespace diffulex {

/// Largest buffer_size.
inline constexpr int32_t kMaxBufferBlocks = 32;
/// Largest number of distinct stop ids of one request (its own and the engine's together).
inline constexpr int32_t kMaxStopIds = 32;
/// "No such position": greater than every position.
inline constexpr int32_t kNoPosition = 0x7fffffff;

/// Constants of the rules. The thresholds may differ between the requests of an engine.
struct BlockRules {
  int32_t block_size = 0;     // B
  int32_t buffer_size = 0;    // N <= kMaxBufferBlocks
  int32_t mask_token_id = 0;  // M
  int32_t vocab_size = 0;     // written ids must be below it; 0 = unchecked
  float add_block_threshold = 0.1F;
  float semi_complete_threshold = 0.9F;
  float token_stability_threshold = 0.0F;
  bool is_editing = false;        // tokens of ACTIVE blocks may be rewritten
  bool is_canvas = false;         // no mask token: every id of the vocabulary is an ordinary token
  bool starts_at_prompt = false;  // block 0 starts where the prompt ends, not at position 0
  bool stores_settled = false;    // editing: forwards store ACTIVE blocks without a mask as well
};

/// Everything the rules know about one request: the buffer and the incrementally kept facts about
/// its output. blocks[0 .. num_valid) are valid, blocks[num_valid .. N) are DUMMY. Blocks before
/// blocks[0] are IN_CACHE where they end at or before context_len, else TO_CACHE.
struct BufferState {
  int32_t prompt_len = 0;          // P
  int32_t origin = 0;              // block j covers [origin + j * B, origin + (j + 1) * B)
  int32_t limit_end = 0;           // L, exclusive end of the response
  int32_t context_len = 0;         // C, leading positions whose KV is final and cached
  int32_t num_valid = 0;           // cursor: next buffer index to activate
  int32_t num_held = 0;            // see count_held
  int32_t settled_end = 0;         // first position >= P not settled, at most L
  int32_t stop_pos = kNoPosition;  // smallest position in [P, L) holding a stop id
  int32_t run_len = 0;             // trailing run of equal tokens in [P, settled_end)
  int32_t num_stop_ids = 0;        // 0 with ignore_eos
  int32_t stop_ids[kMaxStopIds] = {};
  Block blocks[kMaxBufferBlocks] = {};
};

/// Verdict on one proposed write.
enum class WriteCheck : int32_t {
  kOk = 0,
  kNotActive = 1,    // the block is not ACTIVE
  kNotEditable = 2,  // before editable_start
  kMaskToken = 3,    // the token is the mask id
  kOutOfVocab = 4,   // negative, or at or past vocab_size
  kNotOpen = 5,      // the position already holds a token, and the rules do not edit
};

/// What scan_transitions did.
struct Transitions {
  int32_t num_frozen = 0;  // ACTIVE -> TO_CACHE
  int32_t num_stored = 0;  // TO_CACHE -> IN_CACHE, each slid the buffer by one block
  int32_t num_early = 0;   // of those, frozen by the same scan
};

/// Limits checked after every step; 0 switches max_nfe and max_repetition_run off.
struct StopLimits {
  int32_t max_tokens = 0;
  int32_t nfe = 0;
  int32_t max_nfe = 0;
  int32_t max_repetition_run = 0;
};

/// First position of `block`, a block of the request of `state`.
DIFFULEX_HOST_DEVICE inline int32_t block_start(const BlockRules& rules, const BufferState& state,
                                                const Block& block) noexcept {
  return state.origin + block.block_id * rules.block_size;
}

/// First position of the buffer.
DIFFULEX_HOST_DEVICE inline int32_t buffer_start(const BlockRules& rules,
                                                 const BufferState& state) noexcept {
  return block_start(rules, state, state.blocks[0]);
}

/// End of the last valid buffer block; buffer_start when all are DUMMY.
DIFFULEX_HOST_DEVICE inline int32_t valid_end(const BlockRules& rules,
                                              const BufferState& state) noexcept {
  return buffer_start(rules, state) + state.num_valid * rules.block_size;
}

/// Leading buffer blocks that are TO_CACHE or IN_CACHE.
DIFFULEX_HOST_DEVICE inline int32_t num_frozen_blocks(const BufferState& state) noexcept {
  int32_t count = 0;
  while (count < state.num_valid && (state.blocks[count].status == BlockStatus::kToCache ||
                                     state.blocks[count].status == BlockStatus::kInCache)) {
    ++count;
  }
  return count;
}

/// End of the last TO_CACHE or IN_CACHE position of the request: blocks before the buffer, then the
/// leading frozen blocks of the buffer.
DIFFULEX_HOST_DEVICE inline int32_t frozen_end(const BlockRules& rules,
                                               const BufferState& state) noexcept {
  return buffer_start(rules, state) + num_frozen_blocks(state) * rules.block_size;
}

/// End of the positions that a decode forward stores: frozen_end, and with stores_settled the
/// ACTIVE blocks without a mask that follow. The block of the last output position is never stored:
/// the request ends when it is frozen.
DIFFULEX_HOST_DEVICE inline int32_t storable_end(const BlockRules& rules,
                                                 const BufferState& state) noexcept {
  int32_t count = num_frozen_blocks(state);
  int32_t end = buffer_start(rules, state) + count * rules.block_size;
  while (rules.stores_settled && count < state.num_valid && state.blocks[count].num_masks == 0 &&
         end + rules.block_size < state.limit_end) {
    ++count;
    end += rules.block_size;
  }
  return end;
}

/// Share of positions that are not open masks; prompt positions count as filled.
DIFFULEX_HOST_DEVICE inline float block_progress(const BlockRules& rules,
                                                 const Block& block) noexcept {
  return static_cast<float>(rules.block_size - block.num_masks) /
         static_cast<float>(rules.block_size);
}

/// Whether the sampler must accept at least one open position of buffer block `index`: it has no
/// predecessor, or the predecessor is semi-complete. Uses the state before the writes of the step.
DIFFULEX_HOST_DEVICE inline bool force_top1(const BlockRules& rules, const BufferState& state,
                                            int32_t index) noexcept {
  // The predecessor of the first buffer block is absent, TO_CACHE or IN_CACHE: complete.
  return index == 0 ||
         block_progress(rules, state.blocks[index - 1]) >= rules.semi_complete_threshold;
}

/// A DUMMY block: every position an open mask.
DIFFULEX_HOST_DEVICE inline Block make_dummy_block(const BlockRules& rules,
                                                   int32_t block_id) noexcept {
  Block block;
  block.block_id = block_id;
  block.num_masks = rules.block_size;
  return block;
}

/// Initial state of a request whose prompt stands in tokens[0, prompt_len): full prompt blocks are
/// TO_CACHE and lie before the buffer, a prompt tail is ACTIVE, the rest DUMMY. With
/// starts_at_prompt the whole prompt lies before the buffer. Keeps the stop ids.
DIFFULEX_HOST_DEVICE inline void init_buffer(const BlockRules& rules, BufferState& state,
                                             int32_t prompt_len, int32_t limit_end) noexcept {
  const int32_t head = rules.starts_at_prompt ? 0 : prompt_len / rules.block_size;
  state.origin = rules.starts_at_prompt ? prompt_len : 0;
  const int32_t tail = prompt_len - state.origin - head * rules.block_size;
  state.prompt_len = prompt_len;
  state.limit_end = limit_end;
  state.context_len = 0;
  state.settled_end = prompt_len;
  state.stop_pos = kNoPosition;
  state.run_len = 0;
  state.num_held = 0;
  state.num_valid = tail > 0 ? 1 : 0;
  for (int32_t i = 0; i < rules.buffer_size; ++i) {
    state.blocks[i] = make_dummy_block(rules, head + i);
  }
  if (tail > 0) {
    state.blocks[0].status = BlockStatus::kActive;
    state.blocks[0].editable_start = tail;
    state.blocks[0].num_masks = rules.block_size - tail;
  }
}

/// Whether begin_buffer_step would activate the next block. Only for a forward after which the KV
/// of everything before the buffer is stored: a decode step, or the last one of the prompt.
DIFFULEX_HOST_DEVICE inline bool can_activate(const BlockRules& rules,
                                              const BufferState& state) noexcept {
  const int32_t num_occupied = state.num_valid > 0 ? state.num_valid + state.num_held : 0;
  if (num_occupied >= rules.buffer_size) {
    return false;
  }
  const Block& next = state.blocks[state.num_valid];
  const int32_t start = block_start(rules, state, next);
  if (start >= state.limit_end || state.stop_pos != kNoPosition ||
      next.type == BlockType::kOutOfContext) {
    return false;
  }
  if (state.num_valid == 0) {
    return true;
  }
  const Block& last = state.blocks[state.num_valid - 1];
  return last.type != BlockType::kLastInContext &&
         block_progress(rules, last) >= rules.add_block_threshold &&
         last.same_token_ratio >= rules.token_stability_threshold;
}

/// Counts a forward for every ACTIVE block and opens at most one more; returns whether it did.
DIFFULEX_HOST_DEVICE inline bool begin_buffer_step(const BlockRules& rules,
                                                   BufferState& state) noexcept {
  for (int32_t i = 0; i < state.num_valid; ++i) {
    if (state.blocks[i].status == BlockStatus::kActive) {
      ++state.blocks[i].total_steps;
    }
  }
  if (!can_activate(rules, state)) {
    return false;
  }
  Block& next = state.blocks[state.num_valid];
  next.status = BlockStatus::kActive;
  next.total_steps = 1;
  ++state.num_valid;
  return true;
}

/// Reverts begin_buffer_step, given what it returned; only before any write of the step.
DIFFULEX_HOST_DEVICE inline void undo_buffer_step(const BlockRules& rules, BufferState& state,
                                                  bool activated) noexcept {
  if (activated) {
    --state.num_valid;
    state.blocks[state.num_valid] = make_dummy_block(rules, state.blocks[state.num_valid].block_id);
  }
  for (int32_t i = 0; i < state.num_valid; ++i) {
    if (state.blocks[i].status == BlockStatus::kActive) {
      --state.blocks[i].total_steps;
    }
  }
}

/// Marks the buffer blocks whose positions all lie in [begin, end) of stored positions.
DIFFULEX_HOST_DEVICE inline void mark_stored(const BlockRules& rules, BufferState& state,
                                             int32_t begin, int32_t end) noexcept {
  for (int32_t i = 0; i < rules.buffer_size; ++i) {
    const int32_t start = block_start(rules, state, state.blocks[i]);
    state.blocks[i].stored_this_step = start >= begin && start + rules.block_size <= end;
  }
}

/// Whether `token` may be written at relative position `rel` of `block`, which now holds `current`.
DIFFULEX_HOST_DEVICE inline WriteCheck check_write(const BlockRules& rules, const Block& block,
                                                   int32_t rel, int32_t current,
                                                   int64_t token) noexcept {
  if (block.status != BlockStatus::kActive) {
    return WriteCheck::kNotActive;
  }
  if (rel < block.editable_start) {
    return WriteCheck::kNotEditable;
  }
  if (token == rules.mask_token_id && !rules.is_canvas) {
    return WriteCheck::kMaskToken;
  }
  if (token < 0 || token > 0x7fffffff || (rules.vocab_size > 0 && token >= rules.vocab_size)) {
    return WriteCheck::kOutOfVocab;
  }
  return current == rules.mask_token_id || rules.is_editing || rules.is_canvas
             ? WriteCheck::kOk
             : WriteCheck::kNotOpen;
}

/// Whether `token` ends the request.
DIFFULEX_HOST_DEVICE inline bool is_stop_id(const BufferState& state, int32_t token) noexcept {
  for (int32_t i = 0; i < state.num_stop_ids; ++i) {
    if (state.stop_ids[i] == token) {
      return true;
    }
  }
  return false;
}

/// Counts a sampler step of every ACTIVE block: with an open gate, and without an open position.
/// Before the writes of the step.
DIFFULEX_HOST_DEVICE inline void count_sampler_steps(const BlockRules& rules,
                                                     BufferState& state) noexcept {
  for (int32_t i = 0; i < state.num_valid; ++i) {
    Block& block = state.blocks[i];
    if (block.status != BlockStatus::kActive) {
      continue;
    }
    block.open_steps += force_top1(rules, state, i) ? 1 : 0;
    block.post_edit_steps += block.num_masks == 0 ? 1 : 0;
  }
}

/// Writes position `rel` of buffer block `index`; check_write must have allowed it. Returns whether
/// the position was open. Written tokens of samplers that only fill never change, so their first
/// stop id is kept here; with editing rules see find_stop.
template <typename Tokens>
DIFFULEX_HOST_DEVICE inline bool apply_write(const BlockRules& rules, BufferState& state,
                                             int32_t index, int32_t rel, int32_t token,
                                             const Tokens& tokens) noexcept {
  Block& block = state.blocks[index];
  const int32_t position = block_start(rules, state, block) + rel;
  const bool only_fills = !rules.is_editing && !rules.is_canvas;
  const bool was_open = only_fills || (rules.is_editing && tokens[position] == rules.mask_token_id);
  tokens[position] = token;
  block.num_masks -= was_open ? 1 : 0;
  block.commit_ready = false;
  block.stored_this_step = false;  // what the forward stored is not the KV of this token
  if (position < state.stop_pos && position < state.limit_end && is_stop_id(state, token)) {
    state.stop_pos = position;
  }
  return was_open;
}

/// Recomputes stop_pos from the tokens that were not settled before the step, for rules under which
/// a stop id may have been edited away. Settled ones hold none: the request would have ended.
template <typename Tokens>
DIFFULEX_HOST_DEVICE inline void find_stop(const BlockRules& rules, BufferState& state,
                                           const Tokens& tokens) noexcept {
  state.stop_pos = kNoPosition;
  if (state.num_stop_ids == 0) {
    return;
  }
  const int32_t end = valid_end(rules, state);
  const int32_t last = end < state.limit_end ? end : state.limit_end;
  for (int32_t position = state.settled_end; position < last; ++position) {
    if (is_stop_id(state, tokens[position])) {
      state.stop_pos = position;
      return;
    }
  }
}

/// Pops the first buffer block and appends a DUMMY one.
DIFFULEX_HOST_DEVICE inline void slide_buffer(const BlockRules& rules,
                                              BufferState& state) noexcept {
  const int32_t next_id = state.blocks[rules.buffer_size - 1].block_id + 1;
  for (int32_t i = 0; i + 1 < rules.buffer_size; ++i) {
    state.blocks[i] = state.blocks[i + 1];
  }
  state.blocks[rules.buffer_size - 1] = make_dummy_block(rules, next_id);
  --state.num_valid;
}

/// Applies the block status table in buffer order. A block frozen here is stored here only where
/// the forward stored its final KV; else that forward is still to come.
DIFFULEX_HOST_DEVICE inline Transitions scan_transitions(const BlockRules& rules,
                                                         BufferState& state) noexcept {
  Transitions result;
  int32_t i = 0;
  while (i < state.num_valid) {
    Block& block = state.blocks[i];
    const bool predecessor_frozen = i == 0 || state.blocks[i - 1].status == BlockStatus::kToCache;
    const bool is_frozen_here = block.status == BlockStatus::kActive && block.num_masks == 0 &&
                                block.commit_ready && predecessor_frozen;
    if (is_frozen_here) {
      block.status = BlockStatus::kToCache;
      ++result.num_frozen;
    }
    if (block.status == BlockStatus::kToCache && block.stored_this_step && i == 0) {
      state.context_len = block_start(rules, state, block) + rules.block_size;
      slide_buffer(rules, state);
      ++result.num_stored;
      result.num_early += is_frozen_here ? 1 : 0;
    } else {
      ++i;
    }
  }
  return result;
}

/// Keeps the places of blocks that got into the cache early, until the next decode step is over:
/// those that a resume forward or a prefix hit moved there, and those stored by the step that froze
/// them. Else that decode step would have stored them, and no block could have been activated in
/// their places while it refined the others; activating one earlier would let it see its
/// predecessors one step younger and change its tokens.
DIFFULEX_HOST_DEVICE inline void count_held(BufferState& state, bool is_decode,
                                            const Transitions& transitions) noexcept {
  state.num_held = is_decode ? transitions.num_early : state.num_held + transitions.num_stored;
}

/// Extends [P, settled_end) over newly settled positions and keeps the length of its trailing run.
template <typename Tokens>
DIFFULEX_HOST_DEVICE inline void advance_settled(const BlockRules& rules, BufferState& state,
                                                 const Tokens& tokens) noexcept {
  int32_t end = state.limit_end;
  if (rules.is_editing) {
    const int32_t frozen = frozen_end(rules, state);
    end = frozen < end ? frozen : end;
  }
  while (state.settled_end < end && tokens[state.settled_end] != rules.mask_token_id) {
    const int32_t position = state.settled_end;
    const bool repeats = position > state.prompt_len && tokens[position] == tokens[position - 1];
    state.run_len = repeats ? state.run_len + 1 : 1;
    ++state.settled_end;
  }
}

/// First stop condition that holds after a step, in the order of priority; kNone = go on. Aborts
/// and errors are the caller's.
DIFFULEX_HOST_DEVICE inline FinishReason check_stop(const BufferState& state,
                                                    const StopLimits& limits) noexcept {
  if (state.stop_pos < state.settled_end) {
    return FinishReason::kEosTokenGenerated;
  }
  if (state.settled_end == state.limit_end) {
    return state.limit_end - state.prompt_len == limits.max_tokens
               ? FinishReason::kMaxNewTokensReached
               : FinishReason::kMaxModelLenReached;
  }
  if (limits.max_nfe > 0 && limits.nfe >= limits.max_nfe) {
    return FinishReason::kMaxNfeReached;
  }
  if (limits.max_repetition_run > 0 && state.run_len >= limits.max_repetition_run) {
    return FinishReason::kMaxRepetitionRunReached;
  }
  return FinishReason::kNone;
}

/// End of the final output: the stop id and what follows it are cut.
DIFFULEX_HOST_DEVICE inline int32_t output_end(const BufferState& state) noexcept {
  return state.stop_pos < state.settled_end ? state.stop_pos : state.settled_end;
}

/// Records that the KV of positions [0, cached_len) is in the cache (prefix hit, prefill of blocks
/// before the buffer). cached_len is a multiple of B and does not pass frozen_end.
DIFFULEX_HOST_DEVICE inline void mark_cached(const BlockRules& rules, BufferState& state,
                                             int32_t cached_len) noexcept {
  state.context_len = cached_len;
  while (state.num_valid > 0 && buffer_start(rules, state) < cached_len) {
    slide_buffer(rules, state);
    ++state.num_held;
  }
}

/// Forgets all KV (preemption): every IN_CACHE block becomes TO_CACHE. Returns the end of the
/// leading TO_CACHE run, which a resume forward must rebuild; 0 if there is none.
DIFFULEX_HOST_DEVICE inline int32_t drop_cached(const BlockRules& rules,
                                                BufferState& state) noexcept {
  for (int32_t i = 0; i < state.num_valid; ++i) {
    if (state.blocks[i].status == BlockStatus::kInCache) {
      state.blocks[i].status = BlockStatus::kToCache;
    }
    state.blocks[i].stored_this_step = false;
  }
  state.context_len = 0;
  return frozen_end(rules, state);
}

}  // namespace diffulex
