// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/sampling.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

// Acceptance of the samplers that rewrite decoded positions. Nb blocks of B <= 1024 positions, R
// statistics rows of token_stats. Editable positions of a block are those in
// [editable_start, valid_len); the others are neither read nor written. A block in which an
// editable position has no row takes no writes and gets kAcceptSkipped; a row without a finite
// candidate (id -1) proposes nothing, passes no rule and sets kAcceptBadLogits.

/// Arguments of `diffulex::accept_edit`: masks take their proposal above accept_threshold (the best
/// one at least, if the gate is open), decoded positions take a different proposal above
/// edit_threshold. All writes are simultaneous.
struct AcceptEditParams {
  TensorRef tokens;               // [Nb, B] int64, current content
  TensorRef row_index;            // [Nb, B] int32 into ids/stats, -1 = no row this step
  TensorRef editable_start;       // [Nb] int32
  TensorRef valid_len;            // [Nb] int32 or absent (= B); 0 = padding entry
  TensorRef gate;                 // [Nb] uint8, 1 = the best position may be forced
  TensorRef accept_threshold;     // [Nb] float32, of open positions
  TensorRef edit_threshold;       // [Nb] float32, of decoded positions
  TensorRef open_steps;           // [Nb] int32, earlier sampler steps with an open gate
  TensorRef post_edit_steps;      // [Nb] int32, earlier sampler steps without an open position
  TensorRef max_post_edit_steps;  // [Nb] int32, >= 0: after so many of them the block ends
  TensorRef ids;                  // [R] int64 proposals of token_stats
  TensorRef stats;                // [R, kTokenStatsColumns] float32
  TensorRef write_ids;            // [Nb, B] int64 out, -1 = unchanged
  TensorRef confidence;  // [Nb, B] float32 out, p of the proposal at editable positions, else 0
  TensorRef masks_left;  // [Nb] int32 out, open positions after the writes
  TensorRef flags;       // [Nb] int32 out, AcceptFlag bits
  TensorRef same_token_ratio;  // [Nb] float32 out, share of decoded positions proposed unchanged
  int64_t mask_token_id = 0;
  ConfidenceKind confidence_kind = ConfidenceKind::kMaxProb;
  bool raw_confidence = true;  // compare the probability at temperature 1
};

/// Arguments of `diffulex::accept_dmax`: masks are decoded left to right while p >= threshold,
/// every decoded position takes its new proposal, and each position decoded after the writes gets
/// the mix of embeddings that stands for it in the next forward (a merge descriptor). Probabilities
/// are those at temperature 1. The argmax of a row is topk_ids[:, 0] with probability topk_probs[:,
/// 0] where these are given (take them from a greedy token_stats call), else ids with the max_prob
/// of stats, which holds for greedy rows only.
struct AcceptDmaxParams {
  TensorRef tokens;            // [Nb, B] int64, current content
  TensorRef row_index;         // [Nb, B] int32 into the row arrays, -1 = no row this step
  TensorRef editable_start;    // [Nb] int32
  TensorRef valid_len;         // [Nb] int32 or absent (= B); 0 = padding entry
  TensorRef gate;              // [Nb] uint8, 1 = the first open position may be forced
  TensorRef accept_threshold;  // [Nb] float32
  TensorRef open_steps;        // [Nb] int32, earlier sampler steps with an open gate
  TensorRef ids;               // [R] int64 proposals of token_stats
  TensorRef stats;             // [R, kTokenStatsColumns] float32
  TensorRef argmax_ids;        // [R] int64, any stride; requires topk_ids; absent = topk_ids[:, 0]
  TensorRef topk_ids;          // [R, Kt] int64 candidates at temperature 1, descending; or absent
  TensorRef topk_probs;        // [R, Kt] float32, present exactly with topk_ids
  TensorRef write_ids;         // [Nb, B] int64 out, -1 = unchanged
  TensorRef confidence;  // [Nb, B] float32 out, p of the proposal at editable positions, else 0
  TensorRef masks_left;  // [Nb] int32 out, open positions after the writes
  TensorRef flags;       // [Nb] int32 out, AcceptFlag bits
  TensorRef same_token_ratio;  // [Nb] float32 out, share of decoded positions proposed unchanged
  TensorRef merge_valid;       // [Nb, B] uint8 out, 1 = has a descriptor; the four or none
  TensorRef merge_ids;         // [Nb, B, K] int64 out, mask_token_id where there is none
  TensorRef merge_probs;       // [Nb, B, K] float32 out, 0 where there is none
  TensorRef merge_residual;    // [Nb, B] float32 out, weight of the mask embedding
  int64_t mask_token_id = 0;
  bool fast_path = false;  // decoded positions count as certain: descriptor = the token itself
};

/// Arguments of `diffulex::accept_gemma`: one denoise step of a canvas without mask token. The draw
/// is kept where the entropy bound admits it, every other position takes a random id; a converged
/// canvas becomes its argmax.
struct AcceptGemmaParams {
  TensorRef tokens;       // [Nb, B] int64, current canvas
  TensorRef row_index;    // [Nb, B] int32 into the row arrays, -1 = no row this step
  TensorRef valid_len;    // [Nb] int32 or absent (= B); 0 = padding entry
  TensorRef prev_argmax;  // [Nb, B] int64 of the previous step
  TensorRef stable_run;   // [Nb] int32 equal argmax canvases in a row so far, -1 = no previous one
  TensorRef steps_left;   // [Nb] int32, N at the first step, 1 at the last
  TensorRef renoise_ids;  // [Nb, B] int64 random ids
  TensorRef ids;          // [R] int64 draws of token_stats
  TensorRef stats;        // [R, kTokenStatsColumns] float32 at the temperature of the step
  TensorRef argmax_ids;   // [R] int64, any stride
  TensorRef write_ids;   // [Nb, B] int64 out, the next canvas; -1 past valid_len or without a write
  TensorRef argmax;      // [Nb, B] int64 out, -1 past valid_len or without a row
  TensorRef confidence;  // [Nb, B] float32 out, p of the draw, of the argmax once converged
  TensorRef flags;       // [Nb] int32 out: converged, same as previous, all confident (mean entropy
                         // below confidence_threshold), bad logits, skipped
  float entropy_bound = 0.0F;
  int32_t stability_threshold = 0;  // previous argmax canvases that must equal the current one
  float confidence_threshold = 0.0F;
};

/// Edit sampler: fills masks and rewrites decoded positions (samplers with token-to-token edits).
[[nodiscard]] DIFFULEX_API Status accept_edit(const AcceptEditParams& params,
                                              const ExecContext& context);

/// Leftmost-prefix decoding with full refresh and merge descriptors.
[[nodiscard]] DIFFULEX_API Status accept_dmax(const AcceptDmaxParams& params,
                                              const ExecContext& context);

/// Entropy-bounded denoising of canvases and their convergence.
[[nodiscard]] DIFFULEX_API Status accept_gemma(const AcceptGemmaParams& params,
                                               const ExecContext& context);

}  // namespace diffulex
