// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Arguments of `diffulex::advance_decode`: what the host scheduler does between two decode steps,
/// by the same rules (core/decode_rules.h), for R requests of N blocks of B positions each.
///
///   is_entry    the requests are in flight already; only the arrays of that step are written
///   otherwise   ends the step in flight with the sampler's decisions, begins the next one and
///               writes its arrays. A request that ends becomes dummy rows.
///
/// Request r owns rows [r Q, (r + 1) Q) with Q = B N, and blocks [r N, (r + 1) N): block r N + i is
/// buffer block i, with valid_len 0 unless it is ACTIVE and run. Logits rows are the rows
/// themselves. T = R Q, Nb = R N.
///
/// With shifted logits (last_row_index is there) the row of a position predicts the next one. The
/// first position of a forward is predicted by the record saved for the request slot, or, where the
/// request draws, by its saved logits: the last row of the request, which predicts no position of
/// the buffer, takes them.
///
/// With a dual cache (seed_row is there) the rules are those of core/dual_cache_rules.h. Every
/// request still has Q rows: those of its forward, then dummy rows.
///
/// With a canvas (prev_argmax is there) the rules are those of core/canvas_rules.h, and N = 1.
struct AdvanceDecodeParams {
  TensorRef requests;     // [R, sizeof(DecodeRequest)] uint8, in and out, rows contiguous
  TensorRef windows;      // [R, Q + 2] int32, in and out: the token before the buffer, those of
                          // the buffer, the mask id
  TensorRef page_tables;  // [R, P] int32, pages of everything that may be stored
  TensorRef write_ids;    // [Nb, B] int64 of the sampler, -1 = unchanged; read unless is_entry
  TensorRef flags;        // [Nb] int32 AcceptFlag bits of the sampler
  TensorRef same_token_ratio;  // [Nb] float32 of the sampler
  TensorRef input_ids;         // [T] int64 out
  TensorRef positions;         // [T] int64 out
  TensorRef slot_mapping;      // [T] int32 out
  TensorRef context_lens;      // [R] int32 out
  TensorRef valid_slices;      // [R] int32 out
  TensorRef tokens;            // [Nb, B] int64 out
  TensorRef row_index;         // [Nb, B] int32 out, row of the position, -1 = not sampled
  TensorRef editable_start;    // [Nb] int32 out
  TensorRef valid_len;         // [Nb] int32 out, B or 0
  TensorRef gate;              // [Nb] uint8 out
  TensorRef accept_threshold;  // [Nb] float32 out
  TensorRef edit_threshold;    // [Nb] float32 out, or absent
  TensorRef open_steps;        // [Nb] int32 out
  TensorRef total_steps;       // [Nb] int32 out
  TensorRef post_edit_steps;   // [Nb] int32 out
  TensorRef inv_temperature;   // [T] float32 out, 0 at greedy rows and rows not sampled
  TensorRef uniforms;          // [T] float64 out, 0.5 there
  TensorRef top_k;             // [T] int32 out
  TensorRef top_p;             // [T] float32 out
  TensorRef min_p;             // [T] float32 out
  TensorRef merge_valid;       // [Nb, B] uint8 of the sampler, or absent; the eight of them or none
  TensorRef merge_ids;         // [Nb, B, K] int64 of the sampler
  TensorRef merge_probs;       // [Nb, B, K] float32 of the sampler
  TensorRef merge_residual;    // [Nb, B] float32 of the sampler
  TensorRef row_merge_mask;    // [T] uint8 out unless is_entry
  TensorRef row_merge_ids;     // [T, K] int64 out unless is_entry
  TensorRef row_merge_probs;   // [T, K] float32 out unless is_entry
  TensorRef row_merge_residual;  // [T] float32 out unless is_entry
  TensorRef last_row_index;  // [R] int32 out, row that is saved for the slot, -1 = none; or absent
  TensorRef logits_source;   // [T] int32 out, slot whose saved logits the row takes, -1 = its own;
                             // there exactly with last_row_index
  TensorRef pending_next_token;  // [R] int64 of the sampler, -1 = none; the three of them or none
  TensorRef seed_row;            // [R] int32 out, row that seeds the next D-block, -1 = none
  TensorRef mask_kinds;          // [R] int32 out, MaskKind; with a canvas too
  TensorRef prev_argmax;         // [Nb, B] int64, in and out: argmax canvas of the step before; the
                                 // eight of a canvas, or none
  TensorRef canvas_argmax;       // [Nb, B] int64 of the sampler
  TensorRef stable_run;          // [Nb] int32 out
  TensorRef steps_left;          // [Nb] int32 out, >= 1
  TensorRef renoise_ids;         // [Nb, B] int64 out
  TensorRef block_slot;          // [Nb] int32 out, slot of the request, -1 = dummy rows
  TensorRef row_pass_kind;       // [T] uint8 out, 1 = decoder
  TensorRef row_self_cond;       // [T] int32 out, row of the signals, -1 = none
  int32_t page_size = 0;
  int32_t first_saved_row = 0;   // record saved for slot 0
  bool masked_rows_only = true;  // sample open positions only, unless the rules edit
  bool has_block_cache = true;   // with a dual cache: a sub-block is refined over cached keys alone
  bool is_entry = false;
};

/// Ends a decode step and prepares the next one where the sampler's decisions are.
[[nodiscard]] DIFFULEX_API Status advance_decode(const AdvanceDecodeParams& params,
                                                 const ExecContext& context);

}  // namespace diffulex
