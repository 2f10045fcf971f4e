// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/accept_rules.h"
#include "diffulex/export.h"

// The acceptance rules of accept_rules.h over one block on the host. No function checks its data:
// row indices lie in [-1, R), positions in the block. Thread-safe; all may throw std::bad_alloc.

namespace diffulex {

/// One block of B positions as every rule sees it, over R rows of statistics.
struct AcceptBlock {
  const int64_t* tokens = nullptr;     // [B] current content
  const int32_t* row_index = nullptr;  // [B] -1 = no row this step; read at editable positions
  const int64_t* ids = nullptr;        // [R] proposals, -1 = no finite candidate
  const float* stats = nullptr;        // [R, kTokenStatsColumns]
  int64_t ids_stride = 1;
  int64_t stats_stride = kTokenStatsColumns;
  int32_t block_size = 0;  // B
  int32_t editable_start = 0;
  int32_t editable_end = 0;      // <= B
  int64_t* write_ids = nullptr;  // [B] out, -1 = unchanged
  float* confidence = nullptr;   // [B] out, probability of the proposal, 0 without one

  [[nodiscard]] int64_t id_of(int32_t row) const noexcept { return ids[row * ids_stride]; }
  [[nodiscard]] const float* stats_of(int32_t row) const noexcept {
    return stats + row * stats_stride;
  }
};

/// What a step did to one block.
struct AcceptOutcome {
  int32_t flags = 0;       // SamplerFlag bits
  int32_t masks_left = 0;  // open positions after the writes
  float same_token_ratio = 1.0F;
};

/// What the rule of mask-filling samplers knows about one block.
struct MaskFillStep {
  float threshold = 0.0F;
  bool gate = false;       // the best position may be forced
  int32_t open_steps = 0;  // earlier steps with an open gate
};

[[nodiscard]] DIFFULEX_API AcceptOutcome accept_mask_fill_block(const MaskFillRules& rules,
                                                                const MaskFillStep& step,
                                                                const AcceptBlock& block);

/// As MaskFillStep, for samplers that edit.
struct EditStep {
  float accept_threshold = 0.0F;  // of open positions
  float edit_threshold = 0.0F;    // of decoded positions
  bool gate = false;
  int32_t open_steps = 0;
  int32_t post_edit_steps = 0;  // earlier steps without an open position
  int32_t max_post_edit_steps = 0;
};

[[nodiscard]] DIFFULEX_API AcceptOutcome accept_edit_block(const EditRules& rules,
                                                           const EditStep& step,
                                                           const AcceptBlock& block);

/// As MaskFillStep, for DMax: the lists of the rows, and the descriptors it writes.
struct DmaxStep {
  float threshold = 0.0F;
  bool gate = false;  // the first open position may be forced
  int32_t open_steps = 0;
  const int64_t* topk_ids = nullptr;    // [R, Kt] descending; or null
  const float* topk_probs = nullptr;    // [R, Kt], with topk_ids
  const int64_t* argmax_ids = nullptr;  // [R]; null = topk_ids[:, 0]
  int64_t topk_ids_stride = 0;
  int64_t topk_probs_stride = 0;
  int64_t argmax_stride = 1;
  uint8_t* merge_valid = nullptr;   // [B] out, 1 = has a descriptor; the four or none
  int64_t* merge_ids = nullptr;     // [B, K] out
  float* merge_probs = nullptr;     // [B, K] out
  float* merge_residual = nullptr;  // [B] out, weight of the mask embedding
  int64_t merge_ids_stride = 0;
  int64_t merge_probs_stride = 0;
  int32_t merge_count = 0;  // K
};

[[nodiscard]] DIFFULEX_API AcceptOutcome accept_dmax_block(const DmaxRules& rules,
                                                           const DmaxStep& step,
                                                           const AcceptBlock& block);

/// What the rule of canvases knows about one canvas; its positions are [0, editable_end).
struct CanvasStep {
  const int64_t* prev_argmax = nullptr;  // [B] of the previous step
  const int64_t* renoise_ids = nullptr;  // [B] random ids >= 0
  const int64_t* argmax_ids = nullptr;   // [R]
  int64_t argmax_stride = 1;
  int32_t stable_run = -1;    // equal argmax canvases in a row so far, -1 = no previous one
  int32_t steps_left = 1;     // 1 at the last step
  int64_t* argmax = nullptr;  // [B] out, -1 without a row
};

[[nodiscard]] DIFFULEX_API AcceptOutcome accept_canvas_block(const GemmaRules& rules,
                                                             const CanvasStep& step,
                                                             const AcceptBlock& block);

/// Sets accepted[i] for `count` positions: 1 for those that the entropy bound admits in ascending
/// order of entropy, ties by position.
DIFFULEX_API void mark_within_entropy_bound(const float* entropies, int32_t count, float bound,
                                            uint8_t* accepted);

}  // namespace diffulex
