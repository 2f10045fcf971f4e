// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/block_rules.h"
#include "diffulex/core/philox.h"
#include "diffulex/export.h"

// The state machine of canvas decoding (diffusion_gemma): pure functions over plain structs on top
// of block_rules.h, compilable for host and device.
//
// The buffer holds one block, the canvas: B positions right after the prompt and the canvases
// before it (BufferState::origin is the prompt length). No token is a mask.
//
//   phase           condition                          canvas block      after the forward
//   ENCODE_PROMPT   prompt (or lost KV) not cached     DUMMY, TO_CACHE   C = end of the span
//   DENOISE         everything before is cached        ACTIVE            next canvas; committed
//   when
//                                                                        converged or the last step
//   ENCODE_CANVAS   canvas committed, not finished     TO_CACHE          IN_CACHE, C += B, the next
//                                                                        canvas opened
//
// Random ids are draws of the request's generator: (position, 0, init) for a canvas, (position,
// denoise step, renoise) between its steps. A canvas that starts again is therefore the same one.

namespace diffulex {

/// Longest canvas.
inline constexpr int32_t kMaxCanvasLen = 1024;
/// CanvasState::stable_run of a canvas that has not been denoised yet.
inline constexpr int32_t kNoPreviousCanvas = -1;

/// What the next forward of a request is.
enum class CanvasPhase : int32_t { kEncodePrompt = 0, kDenoise = 1, kEncodeCanvas = 2 };

/// Constants of canvas decoding, equal for all requests of an engine.
struct CanvasRules {
  int32_t max_denoising_steps = 48;  // N
  int32_t max_model_len = 0;
  int32_t vocab_size = 0;  // random ids are below it
  float t_min = 0.4F;
  float t_max = 0.8F;
};

/// Denoising state of the canvas. The previous argmax canvas is B ids kept beside it.
struct CanvasState {
  int32_t denoise_step = 0;                // completed DENOISE forwards of this canvas (s)
  int32_t stable_run = kNoPreviousCanvas;  // equal argmax canvases in a row before the last one
};

/// A uniformly random id below `vocab_size`.
DIFFULEX_HOST_DEVICE inline int32_t random_token_id(uint64_t seed, int32_t position, int32_t step,
                                                    RandomStream stream,
                                                    int32_t vocab_size) noexcept {
  return static_cast<int32_t>(philox_uniform(seed, position, step, stream) *
                              static_cast<double>(vocab_size));
}

/// Denoising steps the canvas has left, this one included (n = N .. 1).
DIFFULEX_HOST_DEVICE inline int32_t canvas_steps_left(const CanvasRules& rules,
                                                      const CanvasState& canvas) noexcept {
  return rules.max_denoising_steps - canvas.denoise_step;
}

/// Temperature with `steps_left` steps to go: t_min + (t_max - t_min) * n / N.
DIFFULEX_HOST_DEVICE inline float canvas_temperature(const CanvasRules& rules,
                                                     int32_t steps_left) noexcept {
  const double low = rules.t_min;
  const double high = rules.t_max;
  return static_cast<float>(low + (high - low) * static_cast<double>(steps_left) /
                                      static_cast<double>(rules.max_denoising_steps));
}

/// Real positions of the canvas at `start`: fewer than B only where it would pass max_model_len.
DIFFULEX_HOST_DEVICE inline int32_t canvas_valid_len(const BlockRules& blocks,
                                                     const CanvasRules& rules,
                                                     int32_t start) noexcept {
  const int32_t room = rules.max_model_len - start;
  return room < blocks.block_size ? room : blocks.block_size;
}

/// Positions of the canvas at `start` that count as output once committed: min(B, L - start).
DIFFULEX_HOST_DEVICE inline int32_t canvas_commit_len(const BlockRules& blocks,
                                                      const BufferState& state,
                                                      int32_t start) noexcept {
  const int32_t room = state.limit_end - start;
  return room < blocks.block_size ? room : blocks.block_size;
}

/// A canvas position holds no mask, whatever its id.
DIFFULEX_HOST_DEVICE inline Block make_canvas_block(int32_t canvas_idx) noexcept {
  Block block;
  block.block_id = canvas_idx;
  return block;
}

/// Initial state: canvas 0 lies right after the prompt and is not opened yet. Keeps the stop ids.
DIFFULEX_HOST_DEVICE inline void init_canvas(const BlockRules& blocks, BufferState& state,
                                             CanvasState& canvas, int32_t prompt_len,
                                             int32_t limit_end) noexcept {
  init_buffer(blocks, state, prompt_len, limit_end);
  state.origin = prompt_len;
  state.num_valid = 0;
  state.blocks[0] = make_canvas_block(0);
  canvas = CanvasState{};
}

/// Opens the canvas but for its ids: ACTIVE, no denoising step taken.
DIFFULEX_HOST_DEVICE inline void open_canvas_block(BufferState& state,
                                                   CanvasState& canvas) noexcept {
  Block block = make_canvas_block(state.blocks[0].block_id);
  block.status = BlockStatus::kActive;
  state.blocks[0] = block;
  state.num_valid = 1;
  canvas = CanvasState{};
}

/// The random id that `position` of an open canvas begins with.
DIFFULEX_HOST_DEVICE inline int32_t initial_canvas_id(const CanvasRules& rules, uint64_t seed,
                                                      int32_t position) noexcept {
  return random_token_id(seed, position, 0, RandomStream::kCanvasInit, rules.vocab_size);
}

/// Opens the canvas with its random ids.
DIFFULEX_HOST_DEVICE inline void open_canvas(const BlockRules& blocks, const CanvasRules& rules,
                                             BufferState& state, CanvasState& canvas, uint64_t seed,
                                             int32_t* tokens) noexcept {
  const int32_t start = buffer_start(blocks, state);
  open_canvas_block(state, canvas);
  const int32_t end = start + canvas_valid_len(blocks, rules, start);
  for (int32_t position = start; position < end; ++position) {
    tokens[position] = initial_canvas_id(rules, seed, position);
  }
}

/// Closes an ACTIVE canvas (preemption): what was denoised is forgotten, open_canvas starts it
/// again from the same random ids. A committed canvas stays.
DIFFULEX_HOST_DEVICE inline void close_canvas(BufferState& state, CanvasState& canvas) noexcept {
  if (state.num_valid > 0 && state.blocks[0].status == BlockStatus::kActive) {
    state.blocks[0] = make_canvas_block(state.blocks[0].block_id);
    state.num_valid = 0;
    canvas = CanvasState{};
  }
}

/// Phase of the next forward over `context_len` cached positions, when positions
/// [0, rebuild_until) belong to the prompt or to KV that a preemption took.
DIFFULEX_HOST_DEVICE inline CanvasPhase next_canvas_phase(const BlockRules& blocks,
                                                          const BufferState& state,
                                                          int32_t context_len,
                                                          int32_t rebuild_until) noexcept {
  if (context_len < rebuild_until) {
    return CanvasPhase::kEncodePrompt;
  }
  return context_len < frozen_end(blocks, state) ? CanvasPhase::kEncodeCanvas
                                                 : CanvasPhase::kDenoise;
}

/// Ends a DENOISE forward: the run of equal argmax canvases and the step count. `is_same`: this one
/// equals the one before, if there was one.
DIFFULEX_HOST_DEVICE inline void note_argmax_run(CanvasState& canvas, bool is_same) noexcept {
  const bool is_equal = is_same && canvas.stable_run != kNoPreviousCanvas;
  canvas.stable_run = is_equal ? canvas.stable_run + 1 : 0;
  ++canvas.denoise_step;
}

/// Takes over the argmax canvas of a DENOISE forward: the run of equal canvases and the step count.
/// `previous` and `argmax` hold `valid_len` ids; `previous` becomes `argmax`.
DIFFULEX_HOST_DEVICE inline void note_argmax_canvas(CanvasState& canvas, const int64_t* argmax,
                                                    int32_t valid_len, int64_t* previous) noexcept {
  bool is_same = true;
  for (int32_t i = 0; i < valid_len; ++i) {
    is_same = is_same && argmax[i] == previous[i];
    previous[i] = argmax[i];
  }
  note_argmax_run(canvas, is_same);
}

/// Commits the canvas: its tokens are final, its first `valid_commit_len` positions output. Finds
/// its first stop id and keeps the trailing run of equal tokens. Returns the new output tokens.
template <typename Tokens>
DIFFULEX_HOST_DEVICE inline int32_t commit_canvas(const BlockRules& blocks, BufferState& state,
                                                  const Tokens& tokens) noexcept {
  Block& block = state.blocks[0];
  const int32_t start = buffer_start(blocks, state);
  block.status = BlockStatus::kToCache;
  block.commit_ready = true;
  block.valid_commit_len = canvas_commit_len(blocks, state, start);
  for (int32_t position = start; position < start + block.valid_commit_len; ++position) {
    if (position < state.stop_pos && is_stop_id(state, tokens[position])) {
      state.stop_pos = position;
    }
    const bool repeats = position > state.prompt_len && tokens[position] == tokens[position - 1];
    state.run_len = repeats ? state.run_len + 1 : 1;
  }
  state.settled_end = start + block.valid_commit_len;
  return block.valid_commit_len;
}

/// Records that the KV of positions [0, cached_len) is in the cache. A committed canvas that lies
/// wholly in it becomes IN_CACHE; the canvas after it is to be opened.
DIFFULEX_HOST_DEVICE inline void mark_canvas_cached(const BlockRules& blocks, BufferState& state,
                                                    int32_t cached_len) noexcept {
  state.context_len = cached_len;
  if (state.num_valid > 0 && buffer_start(blocks, state) + blocks.block_size <= cached_len) {
    state.blocks[0] = make_canvas_block(state.blocks[0].block_id + 1);
    state.num_valid = 0;
  }
}

}  // namespace diffulex
