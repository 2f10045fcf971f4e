// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/ops/attention.h"
#include "ops/advance/row.h"

// advance_decode with a dual cache (core/dual_cache_rules.h). The forward runs the first
// dual_step.num_rows of the Q rows of a request; its row i decides the next position. Of them at
// most the B that decide the current sub-block have logits, or the one that seeds the next D-block.

namespace diffulex {

/// One D-block of N sub-blocks, of which the current one is sampled (fast_dllm_v2).
struct DualCacheDecode {
  [[nodiscard]] DIFFULEX_HOST_DEVICE static TokenWindow window_of(const RowScratch& scratch) {
    const DecodeRequest& request = *scratch.request;
    return TokenWindow{scratch.window, buffer_start(request.rules, request.state) - 1};
  }

  /// Takes over the sampler's answer for position i.
  DIFFULEX_HOST_DEVICE static void gather(const AdvanceArgs& args, int32_t r, int32_t i,
                                          const RowScratch& scratch) {
    gather_write(args, r, i, scratch);
  }

  /// Applies the sampler's answer; returns how far the buffer slid.
  DIFFULEX_HOST_DEVICE static int32_t finish(const AdvanceArgs& args, int32_t r,
                                             const RowScratch& scratch) {
    DecodeRequest& request = *scratch.request;
    const BlockRules& rules = request.rules;
    BufferState& state = request.state;
    const DualCacheStep& step = request.dual_step;
    const TokenWindow tokens = window_of(scratch);
    bool has_failed = false;
    if (step.mode == DualCacheMode::kFullBufferInit) {
      finish_full_buffer_init(rules, state, request.dual_cache, step, tokens);
    }
    if (step.is_sampled) {
      Block& block = state.blocks[step.sub_idx];
      const int32_t blk = r * rules.buffer_size + step.sub_idx;
      const int32_t* writes = scratch.writes + step.sub_idx * rules.block_size;
      int32_t num_filled = 0;
      ++block.open_steps;
      has_failed =
          !diffulex::write_block(request, state, step.sub_idx, writes, tokens, &num_filled);
      has_failed =
          apply_verdict(block, args.output.flags[blk], args.output.same_token_ratio[blk]) ||
          has_failed;
      has_failed = has_failed || num_filled == 0;
    }
    ++request.limits.nfe;
    request.finish_reason = has_failed ? FinishReason::kError : FinishReason::kNone;
    if (step.mode != DualCacheMode::kFinalCommit) {
      return 0;
    }
    finish_final_commit(rules, state, request.dual_cache);
    return dual_block_len(rules);
  }

  /// Seeds a D-block that was just opened, then ends the request or enters its next forward.
  DIFFULEX_HOST_DEVICE static void settle(const AdvanceArgs& args, int32_t r,
                                          const RowScratch& scratch) {
    DecodeRequest& request = *scratch.request;
    BufferState& state = request.state;
    const TokenWindow tokens = window_of(scratch);
    bool has_failed = request.finish_reason == FinishReason::kError;
    if (request.dual_step.mode == DualCacheMode::kFinalCommit) {
      const int64_t seed = args.output.pending_next_token[r];
      const bool is_token = seed >= 0 && seed <= 0x7fffffff;
      has_failed = has_failed || !is_token;
      if (is_token) {
        place_seed(request.rules, state, static_cast<int32_t>(seed), tokens);
      }
    }
    advance_settled(request.rules, state, tokens);
    request.finish_reason = judge_step(state, request.limits, has_failed);
    request.is_running = request.finish_reason == FinishReason::kNone;
    if (request.is_running) {
      request.dual_step =
          next_dual_step(request.rules, state, request.dual_cache, tokens, args.has_block_cache);
      begin_dual_step(state, request.dual_cache, request.dual_step);
    }
  }

  /// The arrays at row i of the forward, and at position i of the D-block.
  DIFFULEX_HOST_DEVICE static void write(const AdvanceArgs& args, int32_t r, int32_t i,
                                         const RowScratch& scratch) {
    const DecodeRequest& request = *scratch.request;
    const DualCacheStep& step = request.dual_step;
    const TokenWindow tokens = window_of(scratch);
    const int32_t num_rows = args.block_size * args.buffer_size;
    const int64_t row = int64_t{r} * num_rows + i;
    const bool is_valid = request.is_running && i < step.num_rows;
    const int32_t position = step.first_pos + i;
    args.plan.input_ids[row] = request.is_running ? request.rules.mask_token_id : 0;
    if (is_valid) {
      args.plan.input_ids[row] = dual_input_token(request.rules, request.state, request.dual_cache,
                                                  step, tokens, position);
    }
    args.plan.positions[row] = is_valid ? position : 0;
    args.plan.slot_mapping[row] = is_valid && step.is_stored ? cache_slot(args, r, position) : -1;

    args.plan.blk_tokens[row] = tokens[tokens.begin + 1 + i];
    args.plan.blk_row_index[row] = -1;
    if (i / args.block_size == step.sub_idx) {
      write_logits_row(args, r, i, request, tokens);
    }
  }

  /// The logits row of position i, which lies in the current sub-block, or the row of the seed.
  DIFFULEX_HOST_DEVICE static void write_logits_row(const AdvanceArgs& args, int32_t r, int32_t i,
                                                    const DecodeRequest& request,
                                                    const TokenWindow& tokens) {
    const DualCacheStep& step = request.dual_step;
    const int32_t first_row = r * args.block_size * args.buffer_size;
    const int32_t rel = i % args.block_size;
    const int32_t index = r * args.block_size + rel;
    const int32_t position = tokens.begin + 1 + i;
    const bool is_wanted = is_open(request, tokens, position);
    // The head takes all of these rows: one that nothing reads is the first of the request.
    int32_t source = rel == 0 && is_seeding(request) ? step.num_rows - 1 : 0;
    if (is_wanted) {
      source = dual_logits_row(step, position);
      args.plan.blk_row_index[first_row + i] = index;
    }
    args.plan.logits_rows[index] = first_row + source;
    write_draw(args, index, request, request.state.blocks[step.sub_idx], position,
               is_wanted && request.inv_temperature > 0.0F);
  }

  /// Whether the last row of the forward decides the first token of the next D-block.
  [[nodiscard]] DIFFULEX_HOST_DEVICE static bool is_seeding(const DecodeRequest& request) {
    return request.is_running && request.dual_step.mode == DualCacheMode::kFinalCommit;
  }

  /// Whether the forward samples `position`.
  [[nodiscard]] DIFFULEX_HOST_DEVICE static bool is_open(const DecodeRequest& request,
                                                         const TokenWindow& tokens,
                                                         int32_t position) {
    const DualCacheStep& step = request.dual_step;
    const int32_t block_size = request.rules.block_size;
    const int32_t rel = position - (tokens.begin + 1 + step.sub_idx * block_size);
    return request.is_running && step.is_sampled && rel < block_size &&
           rel >= request.state.blocks[step.sub_idx].editable_start &&
           tokens[position] == request.rules.mask_token_id;
  }

  /// The arrays of sub-block i.
  DIFFULEX_HOST_DEVICE static void write_block(const AdvanceArgs& args, int32_t r, int32_t i,
                                               const DecodeRequest& request) {
    const DualCacheStep& step = request.dual_step;
    const bool is_sampled = request.is_running && step.is_sampled && i == step.sub_idx;
    write_sampler_block(args, r, i, request, is_sampled, true);
  }

  /// The arrays with one entry per request.
  DIFFULEX_HOST_DEVICE static void write_request(const AdvanceArgs& args, int32_t r,
                                                 const DecodeRequest& request) {
    const int32_t first_row = r * args.block_size * args.buffer_size;
    const DualCacheStep& step = request.dual_step;
    const bool is_cache_only = request.is_running && step.is_cache_only;
    args.plan.context_lens[r] = request.is_running ? step.context_len : 0;
    args.plan.valid_slices[r] = first_row + (request.is_running ? step.num_rows : 0);
    args.plan.seed_row[r] = is_seeding(request) ? r * args.block_size : -1;
    args.plan.mask_kinds[r] =
        static_cast<int32_t>(is_cache_only ? MaskKind::kCacheOnly : MaskKind::kBlockCausal);
  }
};

}  // namespace diffulex
