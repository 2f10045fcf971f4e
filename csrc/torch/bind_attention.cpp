// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/attention.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

void block_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& page_table, const Tensor& cu_seqlens_q,
                     const Tensor& context_lens, const Tensor& valid_slices,
                     const Tensor& mask_kinds, const OptionalTensor& prefix_lens,
                     const OptionalTensor& padded_prefix_lens, const OptionalTensor& q_starts,
                     const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                     const Tensor& out, const OptionalTensor& lse, const OptionalTensor& workspace,
                     double scale, double softcap, int64_t block_size, int64_t sliding_window,
                     int64_t max_seqlen_q, int64_t max_context_len, int64_t num_splits,
                     int64_t kv_layout) {
  OpArguments arguments("block_attention");
  BlockAttentionParams params;
  params.q = arguments.input("q", q);
  params.k = arguments.input("k", k);
  params.v = arguments.input("v", v);
  params.k_cache = arguments.input("k_cache", k_cache);
  params.v_cache = arguments.input("v_cache", v_cache);
  params.page_table = arguments.input("page_table", page_table);
  params.cu_seqlens_q = arguments.input("cu_seqlens_q", cu_seqlens_q);
  params.context_lens = arguments.input("context_lens", context_lens);
  params.valid_slices = arguments.input("valid_slices", valid_slices);
  params.mask_kinds = arguments.input("mask_kinds", mask_kinds);
  params.prefix_lens = arguments.input("prefix_lens", prefix_lens);
  params.padded_prefix_lens = arguments.input("padded_prefix_lens", padded_prefix_lens);
  params.q_starts = arguments.input("q_starts", q_starts);
  params.k_scale = arguments.input("k_scale", k_scale);
  params.v_scale = arguments.input("v_scale", v_scale);
  params.out = arguments.output("out", out);
  params.lse = arguments.output("lse", lse);
  arguments.set_workspace(workspace);
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap);
  params.block_size = arguments.int32("block_size", block_size);
  params.sliding_window = arguments.int32("sliding_window", sliding_window);
  params.max_seqlen_q = arguments.int32("max_seqlen_q", max_seqlen_q);
  params.max_context_len = arguments.int32("max_context_len", max_context_len);
  params.num_splits = arguments.int32("num_splits", num_splits);
  params.kv_layout = arguments.enumeration<KvLayout>("kv_layout", kv_layout);
  arguments.run(&diffulex::block_attention, params);
}

}  // namespace diffulex::torch_ops
