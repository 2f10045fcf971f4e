// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/sampler_flags.h"
#include "diffulex/ops/attention.h"
#include "ops/advance/row.h"

// advance_decode with a canvas (core/canvas_rules.h). Canvases are long: what concerns one position
// is the work of its lane, in the gathering before the rules and in the writing after them.

namespace diffulex {

/// One canvas of B positions: denoised until it is committed, then encoded (diffusion_gemma).
struct CanvasDecode {
  /// Whether the step in flight is the last that may denoise the canvas.
  [[nodiscard]] DIFFULEX_HOST_DEVICE static bool is_last_step(const DecodeRequest& request) {
    return canvas_steps_left(request.canvas_rules, request.canvas) == 1;
  }

  /// Takes over position i of the next canvas, or of the argmax canvas where steps end.
  DIFFULEX_HOST_DEVICE static void gather(const AdvanceArgs& args, int32_t r, int32_t i,
                                          const RowScratch& scratch) {
    const DecodeRequest& request = *scratch.request;
    if (!request.forward.has_sampling || i >= request.forward.num_valid_rows) {
      return;
    }
    const int64_t place = int64_t{r} * args.block_size + i;
    const bool is_converged = (args.output.flags[r] & kSamplerConverged) != 0;
    const int64_t argmax = args.output.canvas_argmax[place];
    const int64_t token =
        !is_converged && is_last_step(request) ? argmax : args.output.write_ids[place];
    const int64_t vocab_size = request.rules.vocab_size;
    if (argmax < 0 || argmax >= vocab_size || token < 0 || token >= vocab_size) {
      scratch.marks[kIllegalId] = 1;
      return;
    }
    if (argmax != args.plan.blk_prev_argmax[place]) {
      scratch.marks[kOtherArgmax] = 1;
      args.plan.blk_prev_argmax[place] = argmax;
    }
    scratch.window[1 + i] = static_cast<int32_t>(token);
  }

  /// Ends the forward; returns how far the buffer slid.
  DIFFULEX_HOST_DEVICE static int32_t finish(const AdvanceArgs& args, int32_t r,
                                             const RowScratch& scratch) {
    DecodeRequest& request = *scratch.request;
    const BlockRules& rules = request.rules;
    BufferState& state = request.state;
    ++request.limits.nfe;
    request.finish_reason = FinishReason::kNone;
    if (!request.forward.has_sampling) {
      mark_canvas_cached(rules, state, request.forward.store_end);
      return rules.block_size;
    }
    const bool has_bad_logits =
        apply_verdict(state.blocks[0], args.output.flags[r], args.output.same_token_ratio[r]);
    if (has_bad_logits || scratch.marks[kIllegalId] != 0) {
      request.finish_reason = FinishReason::kError;
      return 0;
    }
    const bool is_final = is_last_step(request) || (args.output.flags[r] & kSamplerConverged) != 0;
    note_argmax_run(request.canvas, scratch.marks[kOtherArgmax] == 0);
    if (is_final) {
      commit_canvas(rules, state, TokenWindow{scratch.window, buffer_start(rules, state) - 1});
    }
    return 0;
  }

  /// Ends the request or enters its next forward, which may open a canvas.
  DIFFULEX_HOST_DEVICE static void settle(const AdvanceArgs& args, int32_t /*r*/,
                                          const RowScratch& scratch) {
    DecodeRequest& request = *scratch.request;
    BufferState& state = request.state;
    request.finish_reason =
        judge_step(state, request.limits, request.finish_reason == FinishReason::kError);
    request.is_running = request.finish_reason == FinishReason::kNone;
    if (!request.is_running) {
      return;
    }
    if (state.num_valid == 0) {
      open_canvas_block(state, request.canvas);
    }
    Block& block = state.blocks[0];
    BufferForward forward;
    forward.first_pos = state.context_len;
    forward.has_sampling = block.status == BlockStatus::kActive;
    forward.num_valid_rows = args.block_size;
    forward.store_end = forward.first_pos + args.block_size;
    if (forward.has_sampling) {
      ++block.total_steps;
      forward.num_valid_rows =
          canvas_valid_len(request.rules, request.canvas_rules, forward.first_pos);
      forward.store_end = forward.first_pos;
    }
    request.forward = forward;
  }

  /// The arrays at row and position i of the canvas; fills one that was just opened.
  DIFFULEX_HOST_DEVICE static void write(const AdvanceArgs& args, int32_t r, int32_t i,
                                         const RowScratch& scratch) {
    const DecodeRequest& request = *scratch.request;
    const BufferForward& forward = request.forward;
    const bool is_valid = request.is_running && i < forward.num_valid_rows;
    const bool is_sampled = is_valid && forward.has_sampling;
    if (is_sampled && *scratch.shift > 0) {
      scratch.window[1 + i] =
          initial_canvas_id(request.canvas_rules, request.seed, forward.first_pos + i);
    }
    write_row(args, r, i, scratch, whole_rows(args, r));
    const int64_t row = int64_t{r} * args.block_size + i;
    const bool is_decoder = request.is_running && forward.has_sampling;
    args.plan.row_pass_kind[row] = is_decoder ? 1 : 0;
    args.plan.row_self_cond[row] = is_sampled && request.canvas.denoise_step > 0
                                       ? request.request_slot * args.block_size + i
                                       : -1;
    write_draws(args, row, request, forward.first_pos + i, is_sampled);
    args.plan.blk_tokens[row] = is_sampled ? scratch.window[1 + i] : request.rules.mask_token_id;
    args.plan.logits_rows[row] = is_sampled ? static_cast<int32_t>(row) : -1;
    args.plan.blk_row_index[row] = args.plan.logits_rows[row];
  }

  /// What `row` draws for `position`: its token, and the random id should that not be accepted.
  DIFFULEX_HOST_DEVICE static void write_draws(const AdvanceArgs& args, int64_t row,
                                               const DecodeRequest& request, int32_t position,
                                               bool is_sampled) {
    const CanvasRules& rules = request.canvas_rules;
    const int32_t step = request.canvas.denoise_step;
    args.plan.row_inv_temperature[row] = 0.0F;
    args.plan.row_uniforms[row] = 0.5;
    args.plan.blk_renoise[row] = 0;
    if (is_sampled) {
      args.plan.row_inv_temperature[row] =
          1.0F / canvas_temperature(rules, canvas_steps_left(rules, request.canvas));
      args.plan.row_uniforms[row] =
          philox_uniform(request.seed, position, step, RandomStream::kToken);
      args.plan.blk_renoise[row] =
          random_token_id(request.seed, position, step, RandomStream::kRenoise, rules.vocab_size);
    }
    args.plan.row_top_k[row] = 0;
    args.plan.row_top_p[row] = 1.0F;
    args.plan.row_min_p[row] = 0.0F;
  }

  /// The arrays of the canvas.
  DIFFULEX_HOST_DEVICE static void write_block(const AdvanceArgs& args, int32_t r, int32_t i,
                                               const DecodeRequest& request) {
    const bool is_sampled = request.is_running && request.forward.has_sampling;
    write_sampler_block(args, r, i, request, is_sampled, false);
    if (is_sampled) {
      args.plan.blk_valid_len[r] = request.forward.num_valid_rows;
    }
    args.plan.blk_stable_run[r] = is_sampled ? request.canvas.stable_run : kNoPreviousCanvas;
    args.plan.blk_steps_left[r] =
        is_sampled ? canvas_steps_left(request.canvas_rules, request.canvas) : 1;
    args.plan.blk_request_slot[r] = is_sampled ? request.request_slot : -1;
  }

  /// The arrays with one entry per request.
  DIFFULEX_HOST_DEVICE static void write_request(const AdvanceArgs& args, int32_t r,
                                                 const DecodeRequest& request) {
    const BufferForward& forward = request.forward;
    const bool is_decoder = request.is_running && forward.has_sampling;
    args.plan.context_lens[r] = request.is_running ? request.state.context_len : 0;
    args.plan.valid_slices[r] =
        r * args.block_size + (request.is_running ? forward.num_valid_rows : 0);
    args.plan.mask_kinds[r] =
        static_cast<int32_t>(is_decoder ? MaskKind::kFull : MaskKind::kCausal);
  }
};

}  // namespace diffulex
