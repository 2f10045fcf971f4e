// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/merge.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

void token_merge_embed(const Tensor& hidden, const Tensor& embedding, const Tensor& merge_mask,
                       const Tensor& topk_ids, const Tensor& topk_probs,
                       const Tensor& residual_probs, int64_t mask_token_id, int64_t merge_kind,
                       bool renormalize, double weight) {
  OpArguments arguments("token_merge_embed");
  TokenMergeEmbedParams params;
  params.hidden = arguments.output("hidden", hidden);
  params.embedding = arguments.input("embedding", embedding);
  params.merge_mask = arguments.input("merge_mask", merge_mask);
  params.topk_ids = arguments.input("topk_ids", topk_ids);
  params.topk_probs = arguments.input("topk_probs", topk_probs);
  params.residual_probs = arguments.input("residual_probs", residual_probs);
  params.mask_token_id = mask_token_id;
  params.merge_kind = arguments.enumeration<MergeKind>("merge_kind", merge_kind);
  params.renormalize = renormalize;
  params.weight = static_cast<float>(weight);
  arguments.run(&diffulex::token_merge_embed, params);
}

void token_merge_partial(const Tensor& embedding, const Tensor& merge_mask, const Tensor& topk_ids,
                         const Tensor& topk_probs, const Tensor& residual_probs,
                         const Tensor& partial, int64_t mask_token_id, int64_t merge_kind,
                         int64_t vocab_start) {
  OpArguments arguments("token_merge_partial");
  TokenMergePartialParams params;
  params.embedding = arguments.input("embedding", embedding);
  params.merge_mask = arguments.input("merge_mask", merge_mask);
  params.topk_ids = arguments.input("topk_ids", topk_ids);
  params.topk_probs = arguments.input("topk_probs", topk_probs);
  params.residual_probs = arguments.input("residual_probs", residual_probs);
  params.partial = arguments.output("partial", partial);
  params.mask_token_id = mask_token_id;
  params.merge_kind = arguments.enumeration<MergeKind>("merge_kind", merge_kind);
  params.vocab_start = vocab_start;
  arguments.run(&diffulex::token_merge_partial, params);
}

void token_merge_finalize(const Tensor& partial, const Tensor& merge_mask, const Tensor& hidden,
                          int64_t merge_kind, bool renormalize, double weight) {
  OpArguments arguments("token_merge_finalize");
  TokenMergeFinalizeParams params;
  params.partial = arguments.input("partial", partial);
  params.merge_mask = arguments.input("merge_mask", merge_mask);
  params.hidden = arguments.output("hidden", hidden);
  params.merge_kind = arguments.enumeration<MergeKind>("merge_kind", merge_kind);
  params.renormalize = renormalize;
  params.weight = static_cast<float>(weight);
  arguments.run(&diffulex::token_merge_finalize, params);
}

void soft_embedding(const Tensor& logits, const Tensor& lse, const OptionalTensor& inv_temperature,
                    const Tensor& embedding, const OptionalTensor& row_valid, const Tensor& out,
                    const OptionalTensor& workspace, double normalizer, double softcap,
                    int64_t vocab_limit, int64_t vocab_start) {
  OpArguments arguments("soft_embedding");
  SoftEmbeddingParams params;
  params.logits = arguments.input("logits", logits);
  params.lse = arguments.input("lse", lse);
  params.inv_temperature = arguments.input("inv_temperature", inv_temperature);
  params.embedding = arguments.input("embedding", embedding);
  params.row_valid = arguments.input("row_valid", row_valid);
  params.out = arguments.output("out", out);
  arguments.set_workspace(workspace);
  params.normalizer = static_cast<float>(normalizer);
  params.softcap = static_cast<float>(softcap);
  params.vocab_limit = vocab_limit;
  params.vocab_start = vocab_start;
  arguments.run(&diffulex::soft_embedding, params);
}

}  // namespace diffulex::torch_ops
