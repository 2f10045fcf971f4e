// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/block_rules.h"
#include "diffulex/export.h"

// The state machine of dual-cache decoding (fast_dllm_v2): pure functions over plain structs on top
// of block_rules.h, compilable for host and device.
//
// The buffer is one D-block of N sub-blocks of B tokens, D = B * N, all of them ACTIVE while the
// D-block is decoded. Its KV in the cache (the block cache) is provisional until FINAL_COMMIT, and
// on purpose stale between two FULL_BUFFER_INIT forwards.
//
//   tested in order                                     mode              after the forward
//   every sub-block is complete                         FINAL_COMMIT      C = base + D, next
//                                                                         D-block opened, its
//                                                                         first token seeded
//   block cache not valid (and lost by a preemption     FULL_BUFFER_INIT  block cache valid
//   in the middle of a sub-block: a rebuild)
//   first position of the current sub-block open        FULL_BUFFER_INIT  block cache valid
//   otherwise                                           SUB_BLOCK_REFINE
//
// The current sub-block is the first incomplete one at or after sub_idx; only it is sampled.
//
// A rebuild is a FULL_BUFFER_INIT that samples nothing. It runs the tokens of the last INIT again,
// so that the refinement goes on over exactly the block cache that the preemption took away:
// results do not depend on the other requests. SUB_BLOCK_REFINE rewrites the rows of its sub-block
// in every layer before it reads them, so those tokens determine the whole block cache.

namespace diffulex {

/// What a decode forward of the D-block is.
enum class DualCacheMode : int32_t {
  kFullBufferInit = 0,
  kSubBlockRefine = 1,
  kFinalCommit = 2,
};

/// State of the D-block in addition to its sub-blocks.
struct DualCacheState {
  int32_t sub_idx = 0;          // sub-block that is denoised
  bool is_initialized = false;  // the block cache is valid
  bool needs_rebuild = false;   // it was valid in the middle of a sub-block when it was lost
  uint32_t open_at_init = 0;    // bit i: position i of sub_idx was open at the last INIT
};

/// A decode forward: what it runs and which keys it sees.
struct DualCacheStep {
  DualCacheMode mode = DualCacheMode::kFullBufferInit;
  int32_t sub_idx = 0;         // current sub-block
  bool is_rebuild = false;     // runs the tokens of the last INIT
  bool is_sampled = false;     // open positions of the current sub-block are sampled
  int32_t first_pos = 0;       // position of the first row
  int32_t num_rows = 0;        // D, or B
  int32_t context_len = 0;     // cached keys, provisional ones included
  bool is_stored = false;      // every row is stored
  bool is_cache_only = false;  // keys come from the cache alone
};

/// D, the tokens of a D-block.
DIFFULEX_HOST_DEVICE inline int32_t dual_block_len(const BlockRules& rules) noexcept {
  return rules.block_size * rules.buffer_size;
}

/// Opens the D-block at `base`: all sub-blocks ACTIVE, prompt positions known.
DIFFULEX_HOST_DEVICE inline void open_dual_block(const BlockRules& rules, BufferState& state,
                                                 DualCacheState& cache, int32_t base) noexcept {
  cache = DualCacheState{};
  for (int32_t i = 0; i < rules.buffer_size; ++i) {
    Block block = make_dummy_block(rules, base / rules.block_size + i);
    const int32_t known = state.prompt_len - (base + i * rules.block_size);
    block.status = BlockStatus::kActive;
    block.editable_start = known < 0 ? 0 : (known > rules.block_size ? rules.block_size : known);
    block.num_masks = rules.block_size - block.editable_start;
    state.blocks[i] = block;
  }
  state.num_valid = rules.buffer_size;
}

/// Initial state of a request: the D-block that holds position prompt_len is open, those before it
/// are prompt. Keeps the stop ids.
DIFFULEX_HOST_DEVICE inline void init_dual_cache(const BlockRules& rules, BufferState& state,
                                                 DualCacheState& cache, int32_t prompt_len,
                                                 int32_t limit_end) noexcept {
  init_buffer(rules, state, prompt_len, limit_end);
  const int32_t block_len = dual_block_len(rules);
  open_dual_block(rules, state, cache, prompt_len / block_len * block_len);
}

/// Whether the first token of the D-block is still to be seeded: only after an aligned prompt
/// whose last row was not run.
DIFFULEX_HOST_DEVICE inline bool needs_seed(const BlockRules& rules, const BufferState& state,
                                            const int32_t* tokens) noexcept {
  return state.blocks[0].editable_start == 0 &&
         tokens[buffer_start(rules, state)] == rules.mask_token_id;
}

/// The decode forward that comes next. No side effect.
template <typename Tokens>
DIFFULEX_HOST_DEVICE inline DualCacheStep next_dual_step(const BlockRules& rules,
                                                         const BufferState& state,
                                                         const DualCacheState& cache,
                                                         const Tokens& tokens,
                                                         bool has_block_cache) noexcept {
  DualCacheStep step;
  const int32_t base = buffer_start(rules, state);
  step.sub_idx = cache.sub_idx;
  while (step.sub_idx < rules.buffer_size - 1 && state.blocks[step.sub_idx].num_masks == 0) {
    ++step.sub_idx;
  }
  const Block& current = state.blocks[step.sub_idx];
  const int32_t start = base + step.sub_idx * rules.block_size;
  const bool is_first_open = current.editable_start == 0 && tokens[start] == rules.mask_token_id;
  if (current.num_masks == 0) {
    step.mode = DualCacheMode::kFinalCommit;
  } else if (!cache.is_initialized || is_first_open) {
    step.mode = DualCacheMode::kFullBufferInit;
    step.is_rebuild = cache.needs_rebuild;
  } else {
    step.mode = DualCacheMode::kSubBlockRefine;
  }
  const bool is_refine = step.mode == DualCacheMode::kSubBlockRefine;
  step.is_sampled = step.mode != DualCacheMode::kFinalCommit && !step.is_rebuild;
  step.is_cache_only = is_refine && has_block_cache;
  step.is_stored = !is_refine || has_block_cache;
  step.first_pos = step.is_cache_only ? start : base;
  step.num_rows = step.is_cache_only ? rules.block_size : dual_block_len(rules);
  step.context_len = step.is_cache_only ? base + dual_block_len(rules) : base;
  return step;
}

/// Enters `step`, which next_dual_step returned for this state: counts the sampler step.
DIFFULEX_HOST_DEVICE inline void begin_dual_step(BufferState& state, DualCacheState& cache,
                                                 const DualCacheStep& step) noexcept {
  cache.sub_idx = step.sub_idx;
  if (step.is_sampled) {
    ++state.blocks[step.sub_idx].total_steps;
  }
}

/// Reverts begin_dual_step; only before any write of the step.
DIFFULEX_HOST_DEVICE inline void undo_dual_step(BufferState& state,
                                                const DualCacheStep& step) noexcept {
  if (step.is_sampled) {
    --state.blocks[step.sub_idx].total_steps;
  }
}

/// Input token of `position` in `step`: the current one, or in a rebuild the one of the last INIT.
template <typename Tokens>
DIFFULEX_HOST_DEVICE inline int32_t dual_input_token(
    const BlockRules& rules, const BufferState& state, const DualCacheState& cache,
    const DualCacheStep& step, const Tokens& tokens, int32_t position) noexcept {
  const int32_t rel = position - (buffer_start(rules, state) + step.sub_idx * rules.block_size);
  const bool is_remasked = step.is_rebuild && rel >= 0 && rel < rules.block_size &&
                           ((cache.open_at_init >> rel) & 1U) != 0;
  return is_remasked ? rules.mask_token_id : tokens[position];
}

/// Row of the forward whose logits predict `position`: that of the position before it, and the
/// first row for itself. The first position of a forward is always known, hence never sampled.
DIFFULEX_HOST_DEVICE inline int32_t dual_logits_row(const DualCacheStep& step,
                                                    int32_t position) noexcept {
  return position > step.first_pos ? position - step.first_pos - 1 : 0;
}

/// Ends a FULL_BUFFER_INIT forward; before the writes of the step, for it keeps what was open.
template <typename Tokens>
DIFFULEX_HOST_DEVICE inline void finish_full_buffer_init(const BlockRules& rules,
                                                         const BufferState& state,
                                                         DualCacheState& cache,
                                                         const DualCacheStep& step,
                                                         const Tokens& tokens) noexcept {
  cache.is_initialized = true;
  if (step.is_rebuild) {
    cache.needs_rebuild = false;  // open_at_init still describes what was run
    return;
  }
  const Block& current = state.blocks[step.sub_idx];
  const int32_t start = block_start(rules, state, current);
  cache.open_at_init = 0;
  for (int32_t rel = current.editable_start; rel < rules.block_size; ++rel) {
    if (tokens[start + rel] == rules.mask_token_id) {
      cache.open_at_init |= 1U << rel;
    }
  }
}

/// Ends a FINAL_COMMIT forward: the D-block is IN_CACHE and the next one open, its first position
/// to be seeded by place_seed. Precondition: base + D < limit_end, else the request has finished.
DIFFULEX_HOST_DEVICE inline void finish_final_commit(const BlockRules& rules, BufferState& state,
                                                     DualCacheState& cache) noexcept {
  const int32_t next_base = buffer_start(rules, state) + dual_block_len(rules);
  state.context_len = next_base;
  open_dual_block(rules, state, cache, next_base);
}

/// Writes the first token of the D-block: the greedy choice of the row before it.
template <typename Tokens>
DIFFULEX_HOST_DEVICE inline void place_seed(const BlockRules& rules, BufferState& state,
                                            int32_t token, const Tokens& tokens) noexcept {
  apply_write(rules, state, 0, 0, token, tokens);
}

/// Forgets all KV (preemption): the D-block keeps its tokens, its block cache is lost. Returns the
/// end of the positions whose KV a resume forward must rebuild.
DIFFULEX_HOST_DEVICE inline int32_t drop_dual_cache(const BlockRules& rules, BufferState& state,
                                                    DualCacheState& cache, const int32_t* tokens,
                                                    bool has_block_cache) noexcept {
  const DualCacheStep next = next_dual_step(rules, state, cache, tokens, has_block_cache);
  // Without a block cache, and where an INIT or COMMIT comes next anyway, nothing is lost that the
  // next forward would read.
  cache.needs_rebuild =
      cache.needs_rebuild || (next.mode == DualCacheMode::kSubBlockRefine && has_block_cache);
  cache.is_initialized = false;
  state.context_len = 0;
  return buffer_start(rules, state);
}

}  // namespace diffulex
