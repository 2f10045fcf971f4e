// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "diffulex/core/accept_rules.h"
#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// What a forbidden id (mask token, ids at or past vocab_limit) still counts for.
enum class ExclusionMode : int32_t {
  kExclude = 0,      // not chosen, stays in the normaliser
  kRenormalize = 1,  // not chosen, not in the normaliser
  kOff = 2,          // an ordinary candidate
};

/// Arguments of `diffulex::token_stats`. N stored rows, R result rows, V columns.
/// Ties of the greedy choice go to the lowest id; a draw is the inverse CDF in id order.
struct TokenStatsParams {
  TensorRef logits;           // [N, V] float, row stride >= V
  TensorRef extra_logits;     // [M, V] dtype of logits, addressed by row_index >= N; or absent
  TensorRef row_index;        // [R] int32/int64 source row, -1 = empty row; absent = identity
  TensorRef inv_temperature;  // [R] float32, 0 = greedy; absent = all greedy
  TensorRef uniforms;         // [R] float64 in (0, 1); required with inv_temperature
  TensorRef forbidden_ids;    // [<= 8] int64, negative entries ignored; or absent
  TensorRef penalty_ids;      // [R] int64, -1 = none; or absent
  TensorRef penalties;        // [R] float32, subtracted from the logit of penalty_ids[r]; with them
  TensorRef ids;              // [R] int64 out, -1 where no candidate is finite
  TensorRef stats;            // [R, kTokenStatsColumns] float32 out, zeros where ids is -1
  TensorRef topk_ids;         // [R, Kt] int64 out or absent, candidates, descending, Kt <= 64
  TensorRef topk_probs;       // [R, Kt] float32 out, present exactly with topk_ids
  int64_t vocab_limit = -1;   // global ids at or past it are forbidden; -1 = none
  float softcap = 0.0F;       // 0 = off
  ExclusionMode exclusion = ExclusionMode::kExclude;
  int64_t vocab_start = 0;  // global id of column 0 (vocabulary shards)
  bool partial = false;     // write mergeable records instead; greedy rows only
};

/// Arguments of `diffulex::merge_token_stats`: P partial records per row become one.
struct MergeTokenStatsParams {
  TensorRef part_ids;        // [P, R] int64
  TensorRef part_stats;      // [P, R, kTokenStatsColumns] float32
  TensorRef part_topk_ids;   // [P, R, Kt] int64 or absent
  TensorRef part_topk_vals;  // [P, R, Kt] float32 logits, present exactly with part_topk_ids
  TensorRef ids;             // [R] int64 out
  TensorRef stats;           // [R, kTokenStatsColumns] float32 out
  TensorRef topk_ids;        // [R, Kt] int64 out or absent
  TensorRef topk_probs;      // [R, Kt] float32 out or absent
};

/// Order of the filters of sample_filtered; each renormalises before the next.
enum class FilterOrder : int32_t {
  kTopPFirst = 0,  // top_p, min_p, top_k
  kTopKFirst = 1,  // top_k, min_p, top_p
};

/// Which distribution the columns of sample_filtered describe.
enum class ConfidenceSpace : int32_t {
  kProcessed = 0,  // after temperature and filters
  kTempered = 1,   // after the temperature, before the filters
};

/// Arguments of `diffulex::sample_filtered`: draws from filtered distributions. N stored rows, R
/// result rows, V columns. A row is active when its inverse temperature is not 0 and one of its
/// filters is on; the other rows are left untouched. Filters see the whole distribution, forbidden
/// ids included (not under kRenormalize); the draw is by inverse CDF in id order over what they
/// keep without the forbidden ids. If nothing is left, the most likely candidate is taken and the
/// columns describe the unfiltered distribution.
struct SampleFilteredParams {
  TensorRef logits;           // [N, V] float, row stride >= V
  TensorRef extra_logits;     // [M, V] dtype of logits, addressed by row_index >= N; or absent
  TensorRef row_index;        // [R] int32/int64 source row, -1 = empty row; absent = identity
  TensorRef inv_temperature;  // [R] float32, 0 = greedy
  TensorRef uniforms;         // [R] float64 in (0, 1)
  TensorRef top_k;            // [R] int32, <= 0 = off, ties with the k-th value stay; or absent
  TensorRef top_p;            // [R] float32, >= 1 = off, <= 0 keeps one id; or absent
  TensorRef min_p;            // [R] float32 share of the largest probability, <= 0 = off; or absent
  TensorRef forbidden_ids;    // [<= 8] int64, negative entries ignored; or absent
  TensorRef ids;              // [R] int64 out, -1 where no candidate is finite
  TensorRef stats;            // [R, kTokenStatsColumns] float32 out, zeros where ids is -1
  int64_t vocab_limit = -1;   // ids at or past it are forbidden; -1 = none
  float softcap = 0.0F;       // 0 = off
  ExclusionMode exclusion = ExclusionMode::kExclude;
  FilterOrder filter_order = FilterOrder::kTopPFirst;
  ConfidenceSpace confidence_space = ConfidenceSpace::kProcessed;
};

/// Arguments of `diffulex::entropy_bound_mask`: S segments of at most kMaxAcceptPositions of R
/// rows.
struct EntropyBoundMaskParams {
  TensorRef entropy;   // [R] float32
  TensorRef segments;  // [S + 1] int32 first rows, starting at 0; rows past the last one stay
  TensorRef mask;      // [R] uint8 out, 1 = accepted
  float bound = 0.0F;  // negative accepts all
};

/// Bits of the `flags` output of the acceptance ops; the values are those of SamplerFlag.
enum AcceptFlag : int32_t {
  kAcceptCommittable = kSamplerCommittable,
  kAcceptSameAsPrevious = kSamplerSameAsPrevious,
  kAcceptAllConfident = kSamplerAllConfident,
  kAcceptProgressed = kSamplerProgressed,
  kAcceptTimedOut = kSamplerTimedOut,
  kAcceptBadLogits = kSamplerBadLogits,
  kAcceptSkipped = kSamplerSkipped,
  kAcceptConverged = kSamplerConverged,
};

/// Arguments of `diffulex::accept_mask_fill`. Nb blocks of B positions, R statistics rows.
struct AcceptMaskFillParams {
  TensorRef tokens;            // [Nb, B] int64, current content
  TensorRef row_index;         // [Nb, B] int32 into ids/stats, -1 = no row this step
  TensorRef editable_start;    // [Nb] int32
  TensorRef valid_len;         // [Nb] int32 or absent (= B); 0 = padding entry
  TensorRef gate;              // [Nb] uint8, 1 = the best position may be forced
  TensorRef accept_threshold;  // [Nb] float32
  TensorRef open_steps;        // [Nb] int32, earlier sampler steps with an open gate
  TensorRef ids;               // [R] int64 proposals of token_stats
  TensorRef stats;             // [R, kTokenStatsColumns] float32
  TensorRef write_ids;         // [Nb, B] int64 out, -1 = unchanged
  TensorRef confidence;        // [Nb, B] float32 out, p of the proposal at open positions, else 0
  TensorRef masks_left;        // [Nb] int32 out, open positions after the writes
  TensorRef flags;             // [Nb] int32 out, AcceptFlag bits
  int64_t mask_token_id = 0;
  AcceptRule rule = AcceptRule::kThreshold;
  ConfidenceKind confidence_kind = ConfidenceKind::kMaxProb;
  bool raw_confidence = false;  // compare the probability at temperature 1
  int32_t denoising_steps = 0;  // S of the schedule; 0 = B
  bool force_accept_last_step = false;
  float factor = 1.0F;
  float entropy_bound = 0.0F;
  float low_threshold = 0.0F;  // of the hierarchy rule
};

/// One pass over each vocabulary row: chosen id and the statistics the block samplers need.
[[nodiscard]] DIFFULEX_API Status token_stats(const TokenStatsParams& params,
                                              const ExecContext& context);

/// Bytes of scratch token_stats needs on `device`; `top_k` adds none, lists stay inside the CTAs.
[[nodiscard]] DIFFULEX_API size_t token_stats_workspace_bytes(int64_t num_rows, int64_t vocab_size,
                                                              int32_t top_k, Device device);

/// Merges vocabulary-shard records in rank order.
[[nodiscard]] DIFFULEX_API Status merge_token_stats(const MergeTokenStatsParams& params,
                                                    const ExecContext& context);

/// Draws with top-k, top-p and min-p, and the statistics of token_stats for the drawn ids.
[[nodiscard]] DIFFULEX_API Status sample_filtered(const SampleFilteredParams& params,
                                                  const ExecContext& context);

/// Accepts the rows of each segment in ascending order of entropy (ties by row) while the sum of
/// the entropies before is at most `bound`; the first one always.
[[nodiscard]] DIFFULEX_API Status entropy_bound_mask(const EntropyBoundMaskParams& params,
                                                     const ExecContext& context);

/// Decides which masked positions of each block take their proposal (samplers that never rewrite).
[[nodiscard]] DIFFULEX_API Status accept_mask_fill(const AcceptMaskFillParams& params,
                                                   const ExecContext& context);

}  // namespace diffulex
