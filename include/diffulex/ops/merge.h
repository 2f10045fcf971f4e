// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// How the descriptor of a row becomes its input embedding. For ids i_k, probabilities p_k,
/// residual r, embedding table E and mask token M:
///   kDmaxTopk:       s = sum p_k E[i_k] + r E[M]; with `renormalize` s is multiplied by
///                    (sum p_k |E[i_k]| + r |E[M]|) / (|s| + 1e-6); hidden = s.
///   kIterSmoothTopk: hidden = hidden + weight * sum p_k E[i_k].
enum class MergeKind : int32_t { kDmaxTopk = 0, kIterSmoothTopk = 1 };

/// Largest number of merged ids per row.
inline constexpr int64_t kMergeMaxTopK = 16;

/// Arguments of `diffulex::token_merge_embed`. T rows, H hidden size, K merged ids, V table rows.
/// Rows whose merge_mask is 0 are neither read nor written. Negative ids and probabilities of 0 are
/// skipped without reading the table.
struct TokenMergeEmbedParams {
  TensorRef hidden;          // [T, H] float, in: E[input id], out: the merged embedding
  TensorRef embedding;       // [V, H] dtype of hidden
  TensorRef merge_mask;      // [T] uint8
  TensorRef topk_ids;        // [T, K] int64, 1 <= K <= kMergeMaxTopK
  TensorRef topk_probs;      // [T, K] float32
  TensorRef residual_probs;  // [T] float32
  int64_t mask_token_id = 0;
  MergeKind merge_kind = MergeKind::kDmaxTopk;
  bool renormalize = false;
  float weight = 1.0F;  // kIterSmoothTopk only, finite
};

/// Arguments of `diffulex::token_merge_partial`: the sums over the table rows of one vocabulary
/// shard, which holds the ids [vocab_start, vocab_start + rows of `embedding`). The last column is
/// the shard's part of sum p_k |E[i_k]| + r |E[M]|. Rows whose merge_mask is 0 become 0.
struct TokenMergePartialParams {
  TensorRef embedding;       // [rows, H] float
  TensorRef merge_mask;      // [T] uint8
  TensorRef topk_ids;        // [T, K] int64 global ids
  TensorRef topk_probs;      // [T, K] float32
  TensorRef residual_probs;  // [T] float32
  TensorRef partial;         // [T, H + 1] float32 out
  int64_t mask_token_id = 0;
  MergeKind merge_kind = MergeKind::kDmaxTopk;
  int64_t vocab_start = 0;
};

/// Arguments of `diffulex::token_merge_finalize`: the added partials of all shards into hidden.
struct TokenMergeFinalizeParams {
  TensorRef partial;     // [T, H + 1] float32
  TensorRef merge_mask;  // [T] uint8
  TensorRef hidden;      // [T, H] float, as in TokenMergeEmbedParams
  MergeKind merge_kind = MergeKind::kDmaxTopk;
  bool renormalize = false;
  float weight = 1.0F;
};

/// Rows of logits and what makes probabilities of them: p_v = exp(softcap(l_v) * inv_temperature -
/// lse). R rows, V columns (of the shard). Logits are sanitised as in token_stats: NaN and -inf
/// have probability 0, +inf counts as the largest finite float.
struct SoftmaxRows {
  TensorRef logits;           // [R, V] float
  TensorRef lse;              // [R] float32, any stride: kStatsLogSumExp of the same row
  TensorRef inv_temperature;  // [R] float32, 0 = 1; absent = all 1
  TensorRef row_valid;        // [R] uint8, 0 = probabilities of 0; absent = all 1
  float softcap = 0.0F;       // 0 = off
  int64_t vocab_limit = -1;   // global ids at or past it have probability 0; -1 = none
  int64_t vocab_start = 0;    // global id of column 0 (vocabulary shards)
};

/// Arguments of `diffulex::soft_probabilities`: the probabilities, rounded to the dtype of `out`.
struct SoftProbabilitiesParams : SoftmaxRows {
  TensorRef out;  // [R, V] float
};

/// Arguments of `diffulex::soft_embedding`: out = normalizer * sum_v p_v E[v] with p_v rounded to
/// the dtype of the table and summed in fp32. H hidden size.
struct SoftEmbeddingParams : SoftmaxRows {
  TensorRef embedding;      // [V, H] float
  TensorRef out;            // [R, H] float32
  float normalizer = 1.0F;  // finite
};

/// Replaces the input embedding of every row with a descriptor by its merged embedding; fp32 sums,
/// one rounding.
[[nodiscard]] DIFFULEX_API Status token_merge_embed(const TokenMergeEmbedParams& params,
                                                    const ExecContext& context);

/// The part of one vocabulary shard; add the results of all shards, then token_merge_finalize.
[[nodiscard]] DIFFULEX_API Status token_merge_partial(const TokenMergePartialParams& params,
                                                      const ExecContext& context);

/// Writes the merged embeddings of added partials.
[[nodiscard]] DIFFULEX_API Status token_merge_finalize(const TokenMergeFinalizeParams& params,
                                                       const ExecContext& context);

/// The probabilities of a softmax over columns of the vocabulary.
[[nodiscard]] DIFFULEX_API Status soft_probabilities(const SoftProbabilitiesParams& params,
                                                     const ExecContext& context);

/// The expected embedding of a softmax over the vocabulary (self-conditioning signal).
[[nodiscard]] DIFFULEX_API Status soft_embedding(const SoftEmbeddingParams& params,
                                                 const ExecContext& context);

/// Bytes of scratch soft_embedding needs on `device` for a table of `embedding_dtype`; 0 on CPU.
[[nodiscard]] DIFFULEX_API size_t soft_embedding_workspace_bytes(int64_t num_rows,
                                                                 int64_t vocab_size,
                                                                 int64_t hidden_size,
                                                                 DType embedding_dtype,
                                                                 Device device);

}  // namespace diffulex
